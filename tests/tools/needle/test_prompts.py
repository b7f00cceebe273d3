"""Prompts of an exact length, with the facts at their depths and the question at the end."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from subquad.core.errors import InputError
from subquad.tools.needle.prompts import SENTENCE, Haystack
from subquad.tools.needle.tasks import COMMON, TASKS, UNCOMMON, Puzzle
from tests.tools.workflows import tiny


def index_of(part, tokens):
    """The position of the part in the tokens, in which it must occur exactly once."""
    hits = [at for at in range(len(tokens)) if tokens[at : at + len(part)] == part]
    assert len(hits) == 1
    return hits[0]


def task_of(facts, spread=False):
    """A task whose facts are words that the text does not have."""
    return replace(
        TASKS["niah_single"], make=lambda draw, depth, words: Puzzle(facts(depth), "zz?", " the"), spread=spread
    )


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [400, 401, 512])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_prompt_with_its_answer_has_exactly_its_length(haystack, task, length, depth):
    prompt = haystack.prompt(TASKS[task], length, depth, 0, 0)
    assert len(prompt.tokens) + len(prompt.answer) == length
    assert len(prompt.answer) >= 1


@pytest.mark.parametrize("task", TASKS)
def test_the_question_is_at_the_end(haystack, task):
    draw = random.Random(f"0/{task}/400/0")
    draw.random()
    puzzle = TASKS[task].make(draw, 0.5, haystack.words)
    question = haystack.pretrained.content_ids(puzzle.question)
    assert haystack.prompt(TASKS[task], 400, 0.5, 0, 0).tokens[-len(question) :] == question


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_fact_is_at_its_depth_after_a_sentence(haystack, depth):
    fact = "model model model model"
    ids = haystack.pretrained.content_ids(fact)
    tokens = haystack.prompt(task_of(lambda at: [(at, fact)]), 500, depth, 0, 0).tokens
    question = haystack.pretrained.content_ids("zz?")
    at, text = index_of(ids, tokens), len(tokens) - len(ids) - len(question)
    if depth in (0.0, 1.0):
        assert at == depth * text
    else:
        assert depth * text - SENTENCE <= at <= depth * text + 1
        assert haystack.pretrained.tokenizer.decode([tokens[at - 1]]) == "."


def test_without_a_sentence_near_it_the_fact_is_at_its_depth(pretrained):
    haystack = Haystack(pretrained, pretrained.content_ids("key value " * 300))
    ids = pretrained.content_ids("model model")
    tokens = haystack.prompt(task_of(lambda at: [(at, "model model")]), 300, 0.5, 0, 0).tokens
    question = pretrained.content_ids("zz?")
    assert index_of(ids, tokens) == round(0.5 * (len(tokens) - len(ids) - len(question)))


def test_several_facts_stand_in_the_order_of_their_depths(haystack):
    facts = {depth: f"zz {word} zz" for depth, word in ((0.8, "model"), (0.2, "token"), (0.5, "sees"), (1.0, "layer"))}
    tokens = haystack.prompt(task_of(lambda _: list(facts.items())), 500, 0.0, 0, 0).tokens
    found = [index_of(haystack.pretrained.content_ids(facts[depth]), tokens) for depth in sorted(facts)]
    assert found == sorted(found)


def test_the_depth_changes_the_order_of_the_tokens_and_not_which_they_are(haystack):
    early, late = (haystack.prompt(TASKS["niah_single"], 400, depth, 0, 0) for depth in (0.1, 0.9))
    assert early.tokens != late.tokens
    assert sorted(early.tokens) == sorted(late.tokens)


@pytest.mark.parametrize("sample", range(5))
def test_the_list_has_a_common_word_and_others_of_the_text_and_then_made_up_ones(haystack, sample):
    assert haystack.words == sorted({word for word in tiny.WORDS.split() if len(word) >= 3})
    prompt, content_ids = haystack.prompt(TASKS["cwe"], 512, None, sample, 0), haystack.pretrained.content_ids
    question = content_ids(TASKS["cwe"].make(random.Random(0), 0.0, haystack.words).question)
    (comma,) = content_ids(",")
    listed = "".join(f"{token}/" for token in prompt.tokens[: -len(question)]).split(f"/{comma}/")
    first, counts = listed[0].rpartition("/")[2], Counter(word for word in listed[1:] if word)
    counts[first] += 1  # some tokens of text are before the first word
    assert counts[str(prompt.answer[0])] == COMMON
    others = [str(content_ids(word)[0]) for word in haystack.words]
    others.remove(str(prompt.answer[0]))
    assert {counts[word] for word in others} == {UNCOMMON}
    assert len(counts) > len(haystack.words)


def test_without_room_for_the_common_word_a_length_is_refused(haystack):
    with pytest.raises(InputError, match=r"70 tokens are too few for the task cwe, .* at least \d+ tokens"):
        haystack.prompt(TASKS["cwe"], 70, None, 0, 0)


def test_samples_and_seeds_read_other_parts_of_the_text(haystack):
    first = haystack.prompt(TASKS["niah_single"], 400, 0.5, 0, 0)
    assert first == haystack.prompt(TASKS["niah_single"], 400, 0.5, 0, 0)
    assert first.tokens != haystack.prompt(TASKS["niah_single"], 400, 0.5, 1, 0).tokens
    assert first.tokens != haystack.prompt(TASKS["niah_single"], 400, 0.5, 0, 1).tokens


def test_a_prompt_begins_with_special_tokens_and_does_not_end_with_them(pretrained, haystack):
    special = Haystack(replace(pretrained, tokenizer=tiny.tokenizer(special=True)), haystack.tokens)
    prompt = special.prompt(TASKS["niah_single"], 400, 0.5, 0, 0)
    assert prompt.tokens[0] == special.pretrained.tokenizer.cls_token_id
    assert special.pretrained.tokenizer.sep_token_id not in prompt.tokens
    assert len(prompt.tokens) + len(prompt.answer) == 400


def test_a_length_without_room_is_refused_with_one_that_has_it(haystack):
    with pytest.raises(InputError, match=r"40 tokens are too few for the task vt, .* at least (\d+)") as error:
        haystack.prompt(TASKS["vt"], 40, 0.5, 0, 0)
    least = int(str(error.value).rpartition("at least ")[2].partition(" ")[0])
    with pytest.raises(InputError, match="too few"):
        haystack.prompt(TASKS["vt"], least - 20, 0.5, 0, 0)


def test_a_text_that_is_too_short_is_refused_with_both_numbers(haystack):
    short = Haystack(haystack.pretrained, haystack.tokens[:100])
    with pytest.raises(InputError, match=r"a prompt of 400 tokens takes \d+ tokens of text, but the text has 100;"):
        short.prompt(TASKS["niah_single"], 400, 0.5, 0, 0)
