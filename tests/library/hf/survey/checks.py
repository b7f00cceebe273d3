"""The checks of one model: outputs, gradients, generated tokens, packed sequences, by its own attention first."""

import inspect
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import subquad as sq
from subquad.hf.example_inputs import example_inputs
from tests.library.hf.survey.outputs import TOLERANCE, farthest, farthest_gradient, forward, gradients

LENGTH = 9
TOKENS = 8
OURS = str(Path(sq.__file__).parent)

Outputs = dict[str, Tensor]


@dataclass
class Check:
    """One comparison: how to run the model, and what its eager attention gives."""

    name: str
    run: Callable[[], Outputs]
    want: Outputs
    defined: Outputs | None = None  # where an output says something; None: everywhere
    valid: Outputs | None = None  # where no padded token stands
    gradient: bool = False

    def again(self) -> Outputs:
        """Return the outputs that the model gives now."""
        with torch.set_grad_enabled(self.gradient):
            return self.run()

    def distance(self, have: Outputs) -> tuple[float, str]:
        """The largest distance of this from `want`, and where it is."""
        return farthest_gradient(self.want, have) if self.gradient else farthest(self.want, have, self.defined)


def checks_of(model: PreTrainedModel, notes: dict[str, str]) -> list[Check]:
    """Every comparison that the model's eager attention can make; notes say which it cannot.

    Raises:
        Exception: the model cannot run at all.
    """
    inputs = {"none": example_inputs(model, length=LENGTH)}
    for side in ("right", "left"):
        try:
            inputs[side] = example_inputs(model, length=LENGTH, padding=side)
        except ValueError as error:
            notes[f"outputs, padded {side}"] = f"not compared: {error}"
    checks: list[Check] = []
    for side, given in inputs.items():
        _add_outputs(model, side, inputs, checks, notes)
        if side != "left" and checks and checks[-1].name == _named("outputs", side):
            defined = checks[-1].defined or {}
            run = lambda g=given, d=defined: gradients(model, g, d)  # noqa: E731
            add(checks, notes, _named("gradients", side), run, gradient=True)
    _add_generation(model, inputs, checks, notes)
    _add_packing(model, inputs["none"], checks, notes)
    return checks


def _named(what: str, side: str) -> str:
    return what if side == "none" else f"{what}, padded {side}"


def _add_outputs(
    model: PreTrainedModel, side: str, inputs: Mapping[str, Any], checks: list[Check], notes: dict[str, str]
) -> None:
    given = inputs[side]
    before = len(checks)
    add(checks, notes, _named("outputs", side), lambda: forward(model, given))
    if len(checks) == before:
        if side == "none":
            raise ValueError(notes["outputs"])
        return
    check = checks[-1]
    check.defined = {name: torch.isfinite(want) for name, want in check.want.items()}
    if side == "left" and (model.config.is_encoder_decoder or is_causal(model, inputs["none"])):
        check.defined = _at_valid_tokens(check.defined, given)  # before its first token a causal row sees no key
    check.valid = _at_valid_tokens(check.defined, given)


def _add_generation(
    model: PreTrainedModel, inputs: Mapping[str, Any], checks: list[Check], notes: dict[str, str]
) -> None:
    if not model.can_generate():
        return
    given = inputs.get("none" if model.config.is_encoder_decoder else "left", inputs["none"])
    given = {k: v for k, v in given.items() if not k.startswith("decoder_")}
    for cache in ("dynamic", "static"):
        add(checks, notes, f"generation, {cache} cache", lambda c=cache: generated(model, given, c))


def generated(model: PreTrainedModel, inputs: Mapping[str, Any], cache: str) -> Outputs:
    """Greedily generated tokens and their logits."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        options["decoder_start_token_id"] = 1
    found = model.generate(
        **inputs, **options, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, num_beams=1,
        return_dict_in_generate=True, output_logits=True, disable_compile=True,
    )  # fmt: skip
    return {"tokens": found.sequences.float(), "logits": torch.stack(found.logits).float()}


def _add_packing(model: PreTrainedModel, inputs: Mapping[str, Any], checks: list[Check], notes: dict[str, str]) -> None:
    parameters = inspect.signature(model.forward).parameters
    if set(inputs) != {"input_ids"} or not {"position_ids", "use_cache"} <= parameters.keys():
        return
    first = LENGTH // 2
    positions = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])[None].expand(2, -1)
    packed = {**inputs, "position_ids": positions}
    add(checks, notes, "packing", lambda: forward(model, packed, use_cache=False))


def add(
    checks: list[Check], notes: dict[str, str], name: str, run: Callable[[], Outputs], *, gradient: bool = False
) -> None:
    """Add a comparison with what the model gives now; a note says so where it gives nothing to compare with."""
    check = Check(name, run, {}, gradient=gradient)
    try:
        check.want = check.again()
    except Exception as error:
        notes[name] = f"not compared: its own attention fails: {told(error)}"
        return
    if gradient and not all(bool(torch.isfinite(v).all()) for v in check.want.values()):
        notes[name] = "not compared: its own attention gives NaN or infinity"
        return
    checks.append(check)


def status_of(check: Check, notes: dict[str, str]) -> tuple[str, Any]:
    """The status of one comparison, and what swapped attention gave."""
    try:
        have = check.again()
    except Exception as error:
        refused = _is_refusal(error)
        notes[check.name] = f"{'refused' if refused else 'crashed'}: {told(error)}"
        return "refused at first forward" if refused else "crashed", None
    deviation, where = check.distance(have)
    notes[check.name] = f"{deviation:.1e}" + (f" {where}" if deviation > TOLERANCE else "")
    if deviation > TOLERANCE and check.valid is not None:
        notes[check.name] += f"; {farthest(check.want, have, check.valid)[0]:.1e} at real tokens"
    return "equal" if deviation <= TOLERANCE else "silently wrong", have


def _is_refusal(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError | TypeError) and frames[-1].filename.startswith(OURS)


def is_causal(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> bool:
    """Tell whether the first token's output is blind to the last token."""
    ids = inputs.get("input_ids")
    if ids is None:
        return False
    other = ids.clone()
    other[:, -1] = ids[:, -2]
    with torch.no_grad():
        a, b = (forward(model, {**inputs, "input_ids": i}) for i in (ids, other))
    return all(torch.equal(a[k][:, 0], b[k][:, 0]) for k in a if a[k].ndim > 2 and a[k].shape[1] == ids.shape[1])


def _at_valid_tokens(defined: Outputs, inputs: Mapping[str, Tensor]) -> Outputs:
    masks = {tuple(v.shape): v.bool() for k, v in inputs.items() if k.endswith("attention_mask") and v.ndim == 2}
    found = {}
    for name, where in defined.items():
        mask = masks.get(tuple(where.shape[:2]))
        found[name] = where if mask is None else where & mask.view(*mask.shape, *[1] * (where.ndim - 2))
    return found


def told(error: BaseException) -> str:
    """An error in one line: its type, its text, where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]} ({where})"
