"""The score of an answer is what `generate` would give it."""

from dataclasses import replace

import pytest
import torch
import transformers as hf

from subquad.core.errors import InputError
from subquad.tools.models.pretrained import running
from subquad.tools.needle.prompts import Haystack, Prompt
from subquad.tools.needle.scoring import answer_score
from subquad.tools.needle.tasks import TASKS

METHODS = [None, "clustered-tail:block=32,last=8,clusters=4,topk=4,cells=2", "local:window=16"]


@pytest.fixture(scope="module")
def tokens(haystack):
    return haystack.tokens[:200]


@pytest.fixture(autouse=True)
def endless(pretrained, monkeypatch):
    """No token ends what is generated."""
    monkeypatch.setattr(pretrained.model.generation_config, "eos_token_id", None)


def generated(pretrained, tokens, count=5):
    """Greedy decoding: the tokens, and the mean of their log-likelihoods."""
    batch = pretrained.batch([tokens])
    options = {"max_new_tokens": count, "do_sample": False, "output_logits": True}
    output = pretrained.model.generate(**batch, **options, return_dict_in_generate=True)
    answer = output.sequences[0, len(tokens) :].tolist()
    likelihoods = [float(step[0].log_softmax(-1)[token]) for step, token in zip(output.logits, answer, strict=True)]
    return answer, sum(likelihoods) / count


@pytest.mark.parametrize("method", METHODS)
def test_the_answer_of_greedy_decoding_is_right_with_its_log_likelihood(pretrained, tokens, method):
    with running(pretrained.model, method):
        answer, log_likelihood = generated(pretrained, tokens)
        score = answer_score(pretrained, Prompt(tokens, answer))
    assert score.right
    assert score.log_likelihood == pytest.approx(log_likelihood, abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_whose_answer_crosses_the_models_positions_is_extended_from_its_start(pretrained, haystack, method):
    tokens, extended = haystack.tokens[:510], pretrained.extended_to(600).reaching(600)
    with running(extended.model, method):
        answer, log_likelihood = generated(extended, tokens)
        score = answer_score(extended, Prompt(tokens, answer))
    assert score.right
    assert score.log_likelihood == pytest.approx(log_likelihood, abs=1e-4)


@pytest.mark.parametrize("wrong", range(5))
def test_one_other_token_makes_the_answer_wrong(pretrained, tokens, wrong):
    answer, _ = generated(pretrained, tokens)
    answer[wrong] = (answer[wrong] + 1) % 200
    assert not answer_score(pretrained, Prompt(tokens, answer)).right


@torch.inference_mode()
def test_each_step_is_given_the_token_of_the_answer(pretrained, tokens):
    answer = [7, 11, 13, 17]
    logits = pretrained.model(torch.tensor([tokens + answer])).logits[0, len(tokens) - 1 : -1].log_softmax(-1)
    expected = sum(float(row[token]) for row, token in zip(logits, answer, strict=True)) / len(answer)
    assert answer_score(pretrained, Prompt(tokens, answer)).log_likelihood == pytest.approx(expected, abs=1e-4)


def test_methods_have_other_scores(pretrained, tokens):
    scores = set()
    for method in METHODS:
        with running(pretrained.model, method):
            scores.add(answer_score(pretrained, Prompt(tokens, [7, 11])).log_likelihood)
    assert len(scores) == len(METHODS)


def test_a_model_that_gives_all_logits_is_read_by_the_last(pretrained, tokens):
    class WithAllLogits(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.device = model, model.device
            self.get_input_embeddings = model.get_input_embeddings
            self.config = model.config

        def forward(self, input_ids, attention_mask, past_key_values=None, use_cache=True):
            return self.model(input_ids, attention_mask, past_key_values=past_key_values, use_cache=use_cache)

    expected = answer_score(pretrained, Prompt(tokens, [7, 11]))
    whole = replace(pretrained, model=WithAllLogits(pretrained.model))
    assert answer_score(whole, Prompt(tokens, [7, 11])).log_likelihood == pytest.approx(expected.log_likelihood)


def test_a_prompt_and_its_answer_fill_learned_positions(pretrained, haystack):
    config = hf.GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=4, n_positions=256)
    learned = replace(pretrained, model=hf.GPT2LMHeadModel(config).eval(), limit=256)
    filled, beyond = (
        Haystack(learned, haystack.tokens).prompt(TASKS["niah_single"], length, 0.5, 0, 0) for length in (256, 258)
    )
    assert answer_score(learned, replace(filled, answer=[7, 11])).log_likelihood < 0
    with pytest.raises((InputError, IndexError)):
        answer_score(learned, replace(beyond, answer=[7, 11]))
