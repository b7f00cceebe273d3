"""One model type: its own attention against `full` swapped in, on everything that a user sees of it."""

import inspect
import os
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import subquad as sq
from subquad.hf.example_inputs import example_inputs
from tests.hf.survey.outputs import TOLERANCE, defined_where, farthest, farthest_gradient, forward, gradients
from tests.hf.survey.zoo import small_model

LENGTH = 9
STATUSES = (
    "equal", "silently wrong", "refused at swap", "refused at first forward", "crashed", "not on the interface",
    "cannot be built",
)  # fmt: skip
TOKENS = 8
OURS = str(Path(sq.__file__).parent)


@dataclass
class Check:
    """One comparison: what the model's own attention gives, and how far swapped attention is from it."""

    name: str
    run: Callable[[], dict[str, Tensor]]
    want: dict[str, Tensor] = field(default_factory=dict)
    defined: dict[str, Tensor] | None = None
    real: dict[str, Tensor] | None = None  # where no padded token stands
    distance: Callable[..., tuple[float, str]] = farthest


def survey(model_type: str) -> dict[str, Any]:
    """The status of one model type and what it rests on, as data for JSON."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    started = time.monotonic()
    result: dict[str, Any] = {"status": "cannot be built", "checks": {}}
    try:
        model = small_model(model_type, attention=None)
        result["class"] = type(model).__name__
        _survey(model, result)
    except Exception as error:
        result["reason"] = _told(error)
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def _survey(model: PreTrainedModel, result: dict[str, Any]) -> None:
    layers = [name for name, module in model.named_modules() if on_interface(module)]
    result["layers"] = len(layers)
    if not layers:
        result["status"] = "not on the interface"
        return
    checks = _own(model, result)
    try:
        sq.hf.swap(model, "full")
    except Exception as error:
        result["status"] = "refused at swap" if isinstance(error, ValueError) else "crashed"
        result["reason"] = _told(error)
        return
    reached = _count_calls(model)
    statuses = [_checked(check, result["checks"]) for check in checks]
    result["reached"] = len(reached)
    worst = next((s for s in ("silently wrong", "crashed", "refused at first forward") if s in statuses), "equal")
    result["status"] = worst
    if worst != "equal":
        name = checks[statuses.index(worst)].name
        result["reason"] = f"{name}: {result['checks'][name]}"


def on_interface(module: nn.Module) -> bool:
    """Whether this module computes attention by transformers' attention interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _count_calls(model: PreTrainedModel) -> set[str]:
    reached: set[str] = set()
    for name, module in model.named_modules():
        if on_interface(module):
            module.register_forward_hook(lambda *_, name=name: reached.add(name))
    return reached


# ---------------------------------------------------------------------- what the model's own attention gives


def _own(model: PreTrainedModel, result: dict[str, Any]) -> list[Check]:
    """Every comparison that the model's own attention can make; a model that cannot run at all raises."""
    inputs = {"none": example_inputs(model, length=LENGTH)}
    for side in ("right", "left"):
        try:
            inputs[side] = example_inputs(model, length=LENGTH, padding=side)
        except ValueError as error:
            result["checks"][f"outputs, padded {side}"] = f"not compared: {error}"
    default = {side: _attempt(lambda g=given: forward(model, g)) for side, given in inputs.items()}
    model.set_attn_implementation("eager")
    checks: list[Check] = []
    for side, given in inputs.items():
        run = lambda g=given: forward(model, g)  # noqa: E731
        name = "outputs" if side == "none" else f"outputs, padded {side}"
        try:
            with torch.no_grad():
                want = run()
        except Exception as error:
            if side == "none":
                raise
            result["checks"][name] = f"not compared: its own attention fails: {_told(error)}"
            continue
        defined = defined_where(want, default[side])
        if side == "left" and is_causal(model, inputs["none"]):
            _leave_out_blind_rows(defined, given)
        checks.append(Check(name, run, want, defined, _at_real_tokens(defined, given)))
        if side != "left":
            _add(checks, result, name.replace("outputs", "gradients"),
                 lambda g=given, d=defined: gradients(model, g, d), distance=farthest_gradient, grad=True)  # fmt: skip
    _add_generation(model, inputs, checks, result)
    _add_packing(model, inputs["none"], checks, result)
    return checks


def _add_generation(model: PreTrainedModel, inputs: Mapping[str, Any], checks: list[Check], result: Any) -> None:
    if not model.can_generate():
        return
    given = inputs.get("none" if model.config.is_encoder_decoder else "left", inputs["none"])
    given = {k: v for k, v in given.items() if not k.startswith(("decoder_", "mm_token")) or k == "mm_token_type_ids"}
    for cache in ("dynamic", "static"):
        _add(checks, result, f"generation, {cache} cache", lambda c=cache: _generated(model, given, c))


def _generated(model: PreTrainedModel, inputs: Mapping[str, Any], cache: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        options["decoder_start_token_id"] = 1
    found = model.generate(
        **inputs, **options, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, num_beams=1,
        return_dict_in_generate=True, output_logits=True, disable_compile=True,
    )  # fmt: skip
    return {"tokens": found.sequences.float(), "logits": torch.stack(found.logits).float()}


def _add_packing(model: PreTrainedModel, inputs: Mapping[str, Any], checks: list[Check], result: Any) -> None:
    parameters = inspect.signature(model.forward).parameters
    if set(inputs) != {"input_ids"} or not {"position_ids", "use_cache"} <= parameters.keys():
        return
    first = LENGTH // 2
    positions = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])[None].expand(2, -1)
    packed = {**inputs, "position_ids": positions}
    _add(checks, result, "packing", lambda: forward(model, packed, use_cache=False))


def _add(
    checks: list[Check], result: Any, name: str, run: Callable[[], dict[str, Tensor]], *, grad: bool = False,
    distance: Callable[..., tuple[float, str]] = farthest,
) -> None:  # fmt: skip
    try:
        with torch.set_grad_enabled(grad):
            want = run()
    except Exception as error:
        result["checks"][name] = f"not compared: its own attention fails: {_told(error)}"
        return
    if all(bool(torch.isfinite(v).all()) for v in want.values()):
        checks.append(Check(name, run, want, distance=distance))
    else:
        result["checks"][name] = "not compared: its own attention gives NaN or infinity"


def _attempt(run: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor] | None:
    try:
        with torch.no_grad():
            return run()
    except Exception:  # the default implementation takes less than eager attention, which decides
        return None


def is_causal(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> bool:
    """Whether the first token's output is blind to the last token."""
    ids = inputs.get("input_ids")
    if ids is None or model.config.is_encoder_decoder:
        return False
    other = ids.clone()
    other[:, -1] = ids[:, -2]
    with torch.no_grad():
        a, b = (forward(model, {**inputs, "input_ids": i}) for i in (ids, other))
    return all(torch.equal(a[k][:, 0], b[k][:, 0]) for k in a if a[k].ndim > 2 and a[k].shape[1] == ids.shape[1])


def _leave_out_blind_rows(defined: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
    mask = inputs.get("attention_mask")
    for name, where in defined.items():
        if mask is not None and where.ndim > 2 and where.shape[:2] == mask.shape:
            where &= mask.bool().view(*mask.shape, *[1] * (where.ndim - 2))


def _at_real_tokens(defined: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    masks = {tuple(v.shape): v.bool() for k, v in inputs.items() if k.endswith("attention_mask") and v.ndim == 2}
    found = {}
    for name, where in defined.items():
        mask = masks.get(tuple(where.shape[:2]))
        found[name] = where if mask is None else where & mask.view(*mask.shape, *[1] * (where.ndim - 2))
    return found


# ---------------------------------------------------------------------- what swapped attention gives


def _checked(check: Check, notes: dict[str, str]) -> str:
    try:
        with torch.set_grad_enabled(check.distance is farthest_gradient):
            have = check.run()
    except Exception as error:
        refused = _is_refusal(error)
        notes[check.name] = f"{'refused' if refused else 'crashed'}: {_told(error)}"
        return "refused at first forward" if refused else "crashed"
    given = (check.want, have) if check.defined is None else (check.want, have, check.defined)
    deviation, where = check.distance(*given)
    notes[check.name] = f"{deviation:.1e}" + (f" {where}" if deviation > TOLERANCE else "")
    if deviation > TOLERANCE and check.real is not None:
        elsewhere, _ = farthest(check.want, have, check.real)
        notes[check.name] += f"; {elsewhere:.1e} at real tokens"
    return "equal" if deviation <= TOLERANCE else "silently wrong"


def _is_refusal(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError | TypeError) and frames[-1].filename.startswith(OURS)


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]} ({where})"
