"""Decoders by halves: a prompt of several blocks under `clustered-tail`, against the model's own attention.

With more top keys than there are keys the method is exact, so outputs, generated tokens and what later tokens change
must be the model's own. With few of them, each prompt of a padded batch must be what it is alone.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import subquad as sq
from subquad.hf.example_inputs import example_inputs
from tests.library.hf.survey.checks import Check, Outputs, add, generated, status_of, told
from tests.library.hf.survey.outputs import TOLERANCE, farthest, forward

LENGTH, PADS, LATE = 27, 9, 10  # tokens of a prompt, of which so many are padding in the second; those that change
EXACT = "clustered-tail:topk=1000,block=8,last=3"
COARSE = "clustered-tail:clusters=3,topk=3,cells=2,bits=15,block=8,last=3"

ROUNDING = 1e-5  # what the same attention in another order may differ by, as a share of the largest number

Inputs = dict[str, Tensor]


def by_halves(model: PreTrainedModel) -> dict[str, Any] | None:
    """The status of a decoder by halves and what it rests on, as data for JSON; None for what is no decoder."""
    model.set_attn_implementation("eager")
    try:
        swapped = sq.hf.swap(model, EXACT)
    except ValueError as error:
        causal = any(layer.causal for layer in sq.hf.describe(model).layers)
        return {"status": "refused", "reason": told(error)} if causal else None
    sq.hf.restore(model)
    if not any(layer.causal for layer in swapped.layers):
        return None
    inputs, notes = _prompts(model), dict[str, str]()
    if inputs is None:
        return {"status": "not surveyed", "reason": f"no prompts of {LENGTH} tokens"}
    statuses = _at_the_exact_limit(model, inputs, notes) | _of_few_keys(model, inputs, notes)
    causal = [swapped.methods[layer.number] for layer in swapped.layers if layer.causal]
    layers = [sum(not method.is_exact for method in causal), len(causal)]
    result: dict[str, Any] = {"status": "equal", "layers": layers, "checks": notes}
    wrong = {name: status for name, status in statuses.items() if status != "equal"}
    if wrong:
        name, result["status"] = min(wrong.items(), key=lambda item: item[1] == "no effect")
        result["reason"] = f"{name}: {notes[name]}"
    return result


def _prompts(model: PreTrainedModel) -> Inputs | None:
    """Two prompts, of text alone where the model takes that; None where it takes no such prompts."""
    for images in (False, True):
        try:
            inputs = example_inputs(model, length=LENGTH, images=images)
            _outputs(model, inputs)
        except Exception:
            continue
        if "input_ids" in inputs:
            return inputs
    return None


def _at_the_exact_limit(model: PreTrainedModel, inputs: Inputs, notes: dict[str, str]) -> dict[str, str]:
    """The status of each comparison with the model's own attention."""
    checks = _own(model, inputs, notes)
    sq.hf.swap(model, EXACT)
    outcomes = {check.name: status_of(check, notes) for check in checks}
    sq.hf.restore(model)
    for check in checks:  # some models remember a call, so that their own attention then gives something else
        if outcomes[check.name][0] == "silently wrong" and _gives(check, outcomes[check.name][1]):
            outcomes[check.name], notes[check.name] = ("equal", None), "equal to its own attention after the same calls"
    return {name: status for name, (status, _) in outcomes.items()}


def _of_few_keys(model: PreTrainedModel, inputs: Inputs, notes: dict[str, str]) -> dict[str, str]:
    """Return whether few clusters and keys change the outputs, and each prompt of a padded batch is as it is alone."""
    own, apart = _outputs(model, inputs), _apart(model, inputs)
    sq.hf.swap(model, COARSE)
    statuses: dict[str, str] = {}
    try:
        if farthest(own, _outputs(model, inputs))[0] <= ROUNDING:  # as uniform weights, which clusters keep
            statuses["few keys"], notes["few keys"] = "no effect", "few clusters and keys change nothing"
        if apart is None or apart > TOLERANCE:
            notes["left padding"] = "not compared: its own attention differs, or it takes no positions"
        else:
            distance = _apart(model, inputs)
            notes["left padding"] = "fails" if distance is None else f"{distance:.1e}"
            statuses["left padding"] = "equal" if distance is not None and distance <= TOLERANCE else "silently wrong"
    finally:
        sq.hf.restore(model)
    return statuses


def _own(model: PreTrainedModel, inputs: Inputs, notes: dict[str, str]) -> list[Check]:
    """The checks of the exact limit, with the results of the model's own attention."""
    checks: list[Check] = []
    padded = _padded(model, inputs)
    add(checks, notes, "outputs", lambda: forward(model, inputs))
    add(checks, notes, "outputs, padded left", lambda: _tokens_of(forward(model, padded), padded))
    add(checks, notes, "prompt in two pieces", lambda: _in_pieces(model, inputs))
    if model.can_generate():
        prompt = {name: value for name, value in padded.items() if name != "position_ids"}
        for cache in ("dynamic", "static"):
            add(checks, notes, f"generation, {cache} cache", lambda cache=cache: generated(model, prompt, cache))
    early = lambda: _early(forward(model, _with_other_end(inputs)), inputs)  # noqa: E731
    add(checks, notes, "other tokens behind", early)
    with torch.no_grad():
        if checks and checks[-1].name == "other tokens behind":
            checks[-1].want = _early(forward(model, inputs), inputs)
            if farthest(checks[-1].want, early())[0] > TOLERANCE:
                notes["other tokens behind"] = "not compared: its own attention differs"
                del checks[-1]
    return checks


def _gives(check: Check, have: Outputs) -> bool:
    """Tell whether the model's own attention gives this now."""
    check.want = check.again()
    return check.distance(have)[0] <= TOLERANCE


@torch.no_grad()
def _outputs(model: PreTrainedModel, inputs: Inputs) -> Outputs:
    return forward(model, inputs)


def _padded(model: PreTrainedModel, inputs: Inputs) -> Inputs:
    """The inputs with the first tokens of the second item hidden, at the positions that `generate` gives them."""
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :PADS] = 0
    padded = {**inputs, "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        padded["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return padded


def _tokens_of(outputs: Outputs, padded: Inputs) -> Outputs:
    """The outputs that have a row for each token, at real tokens."""
    mask = padded["attention_mask"].bool()
    return {name: value[mask] for name, value in outputs.items() if value.shape[:2] == mask.shape}


@torch.no_grad()
def _apart(model: PreTrainedModel, inputs: Inputs) -> float | None:
    """The distance of a left-padded batch from each prompt alone; None if it cannot be told.

    Rotary queries form other clusters at other positions, so the model must take positions.
    """
    padded = _padded(model, inputs)
    if "position_ids" not in padded:
        return None
    try:
        together = forward(model, padded)
        worst = 0.0
        for row, pads in enumerate((0, PADS)):
            one = {
                name: value[row : row + 1, pads:] if value.shape == inputs["input_ids"].shape else value[row : row + 1]
                for name, value in padded.items()
            }
            alone = forward(model, one)
            mine = {
                name: value[row : row + 1, pads:]
                for name, value in together.items()
                if value.shape[:2] == inputs["input_ids"].shape and name in alone
            }
            worst = max(worst, farthest(mine, alone)[0])
        return worst
    except Exception:
        return None


def _with_other_end(inputs: Inputs) -> Inputs:
    ids = inputs["input_ids"].clone()
    ids[:, -LATE:] = ids[:, :LATE]
    return {**inputs, "input_ids": ids}


def _early(outputs: Outputs, inputs: Inputs) -> Outputs:
    """The outputs that have a row for each token, before the tokens that change."""
    by_token = {name: value for name, value in outputs.items() if value.shape[:2] == inputs["input_ids"].shape}
    return {name: value[:, :-LATE] for name, value in by_token.items()}


def _in_pieces(model: PreTrainedModel, inputs: Inputs) -> Outputs:
    """The outputs at the second piece of a prompt, whose first piece is in the cache."""
    first = model(input_ids=inputs["input_ids"][:, :-LATE], use_cache=True)
    cache = first.past_key_values
    return forward(model, {"input_ids": inputs["input_ids"][:, -LATE:], "past_key_values": cache}, use_cache=True)
