"""The tasks: what the facts say, and which answer follows from them alone."""

import random
import re

import pytest

from subquad.tools.needle.settings import NeedleSettings
from subquad.tools.needle.tasks import CHAIN, COUNTS, NUMBERS, TASKS, different_words
from subquad.tools.runs.options import options

WORDS = ["whale", "ship", "captain", "harpoon", "ocean", "mast"]


def made(task, depth=0.3, seed=0):
    return TASKS[task].make(random.Random(seed), depth, WORDS)


def test_the_command_offers_every_task_and_runs_those_with_short_answers():
    assert NeedleSettings().tasks == ("niah_single", "niah_multikey", "vt", "cwe", "fwe")
    assert set(TASKS) - set(NeedleSettings().tasks) == {"niah_multivalue", "niah_multiquery"}
    assert ", ".join(TASKS) in options(NeedleSettings)["tasks"].help


@pytest.mark.parametrize("task", TASKS)
def test_puzzles_come_from_the_seed(task):
    assert made(task) == made(task)
    assert made(task).answer != made(task, seed=1).answer


@pytest.mark.parametrize("task", TASKS)
def test_the_depth_moves_facts_and_changes_nothing_else(task):
    near, far = made(task, 0.9), made(task, 0.1)
    assert [fact for _, fact in near.needles] == [fact for _, fact in far.needles]
    assert (near.question, near.answer) == (far.question, far.answer)
    assert (near.needles == far.needles) == TASKS[task].spread


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seed", range(5))
def test_depths_are_inside_the_text(task, seed):
    assert all(0 <= depth <= 1 for where in (0.0, 1.0) for depth, _ in made(task, where, seed).needles)


def test_the_single_number_is_the_answer():
    puzzle = made("niah_single")
    assert [depth for depth, _ in puzzle.needles] == [0.3]
    assert puzzle.needles[0][1].count(puzzle.answer.strip()) == 2


@pytest.mark.parametrize("seed", range(5))
def test_one_of_several_keys_has_the_name_that_is_asked_for(seed):
    puzzle = made("niah_multikey", seed=seed)
    name = re.search(r"What is the (\w+) key", puzzle.question).group(1)
    values = dict(re.search(r"The (\w+) key is: (\d+)", fact).groups() for _, fact in puzzle.needles)
    assert len(values) == NUMBERS == len(set(values.values()))
    assert puzzle.answer == f" {values[name]}"
    assert [depth for depth, fact in puzzle.needles if f"The {name} key" in fact] == [0.3]


@pytest.mark.parametrize("seed", range(5))
def test_all_numbers_of_one_name_are_asked_for_in_the_order_of_the_text(seed):
    puzzle = made("niah_multivalue", seed=seed)
    name = re.search(r"The (\w+) keys are:", puzzle.question).group(1)
    facts = [re.search(r"the (\w+) keys is: (\d+)", fact).groups() for _, fact in sorted(puzzle.needles)]
    assert [each for each, _ in facts] == [name] * NUMBERS
    assert puzzle.answer == f" {', '.join(value for _, value in facts)}"
    assert [depth for depth, _ in puzzle.needles] == pytest.approx([0.3, 0.475, 0.65, 0.825])


@pytest.mark.parametrize("seed", range(5))
def test_all_numbers_are_asked_for_in_the_order_of_their_names_in_the_question(seed):
    puzzle = made("niah_multiquery", seed=seed)
    *names, last = re.search(r"What are the (.*) keys\?", puzzle.question).group(1).replace(" and ", ", ").split(", ")
    values = dict(re.search(r"The (\w+) key is: (\d+)", fact).groups() for _, fact in puzzle.needles)
    assert puzzle.answer == f" {', '.join(values[name] for name in (*names, last))}"
    assert len(values) == NUMBERS
    assert puzzle.needles[0][0] == 0.3
    assert f"The {names[0]} key" in puzzle.needles[0][1]


def test_the_common_word_is_one_of_the_text():
    assert {made("cwe", seed=seed).common for seed in range(99)} == set(WORDS)
    puzzle = made("cwe")
    assert puzzle.answer == f" {puzzle.common}"
    assert not puzzle.needles


def test_made_up_words_follow_those_of_the_text_and_no_word_comes_twice():
    words = different_words(random.Random(0), WORDS)
    listed = [next(words) for _ in range(5000)]
    assert sorted(listed[: len(WORDS)]) == sorted(WORDS)
    assert listed[: len(WORDS)] != WORDS
    assert len(set(listed)) == 5000


@pytest.mark.parametrize("seed", range(5))
def test_the_chain_of_the_variable_ends_at_the_answer(seed):
    puzzle = made("vt", seed=seed)
    values = dict(re.search(r"variable (X\d+) is: (\w+)\.", fact).groups() for _, fact in puzzle.needles)
    assert len(values) == 2 * CHAIN
    asked = re.search(r"the variable (X\d+)\?", puzzle.question).group(1)
    names = [asked]
    while names[-1] in values:
        names.append(values[names[-1]])
    assert len(names) == CHAIN + 1
    assert puzzle.answer == f" {names[-1]}"
    depths = {re.search(r"X\d+", fact).group(): depth for depth, fact in puzzle.needles}
    chain = [depths[name] for name in reversed(names[:-1])]
    assert chain[0] == 0.3
    assert chain == sorted(chain)


@pytest.mark.parametrize("seed", range(5))
def test_the_most_frequent_word_is_the_answer(seed):
    puzzle = made("fwe", seed=seed)
    words = [re.search(r"is: (\w+)", fact).group(1) for _, fact in puzzle.needles]
    counts = sorted((words.count(word) for word in set(words)), reverse=True)
    assert counts == list(COUNTS)
    assert words.count(puzzle.answer.strip()) == COUNTS[0]
