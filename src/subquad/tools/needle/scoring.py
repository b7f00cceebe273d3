"""Score how well a model continues a prompt with its answer.

The prompt is one prefill with whatever attention is in the model, and the answer's tokens are steps on its cache, one
after the other, as in `generate`. Each step is given the answer's token, not the model's (teacher forcing), so the
score is the mean log-likelihood of the answer's tokens. Greedy decoding gives the answer if and only if each of these
steps has the answer's token as the most likely one, because then both have the same cache.
"""

import inspect
from dataclasses import dataclass

import torch

from subquad.core.versions import name_of_cache
from subquad.hf.rotary_passes import reach_of
from subquad.tools.models.pretrained import Pretrained
from subquad.tools.needle.prompts import Prompt


@dataclass
class AnswerScore:
    """The mean log-likelihood in nats per token of an answer, and whether greedy decoding gives it."""

    log_likelihood: float
    right: bool


@torch.inference_mode()
def answer_score(pretrained: Pretrained, prompt: Prompt) -> AnswerScore:
    """Score the answer of one prompt by the model as it is.

    If its positions are extended, those of the prompt are the ones that prompt and answer together need.
    """
    with reach_of(len(prompt.tokens) + len(prompt.answer)):
        return _score(pretrained, prompt)


def _score(pretrained: Pretrained, prompt: Prompt) -> AnswerScore:
    model = pretrained.model
    batch = pretrained.batch([prompt.tokens])
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    cache = name_of_cache(model.forward)
    output = model(**batch, use_cache=True, **last)
    likelihoods, right = [], True
    for number, token in enumerate(prompt.answer, 1):
        log_probabilities = output.logits[0, -1].float().log_softmax(-1)
        likelihoods.append(float(log_probabilities[token]))
        right &= int(log_probabilities.argmax()) == token
        if number < len(prompt.answer):
            ids = torch.tensor([[token]], device=model.device)
            visible = torch.ones(1, len(prompt.tokens) + number, dtype=torch.long, device=model.device)
            output = model(input_ids=ids, attention_mask=visible, use_cache=True, **{cache: output[cache]})
    return AnswerScore(sum(likelihoods) / len(likelihoods), right)
