"""One model type: its own attention against `full` swapped in, on everything that a user sees of it."""

import inspect
import time
import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import subquad as sq
import subquad.hf  # puts MPNet on the interface
from tests.library.hf.survey.checks import Check, checks_of, status_of, told
from tests.library.hf.survey.long_prompts import by_halves
from tests.library.hf.survey.outputs import TOLERANCE
from tests.library.hf.survey.zoo import has_no_interface, small_model

STATUSES = (
    "equal", "silently wrong", "refused at swap", "refused at first forward", "crashed", "not on the interface",
    "cannot be built",
)  # fmt: skip


def survey(model_type: str) -> dict[str, Any]:
    """The status of one model type and what it rests on, as data for JSON."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # models are tiny and run side by side
    started = time.monotonic()
    result: dict[str, Any] = {"status": "cannot be built", "checks": {}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = small_model(model_type)
            result["class"] = type(model).__name__
            _survey(model, result)
            if result["status"] == "equal" and (halves := by_halves(model)) is not None:
                result["by halves"] = halves
    except Exception as error:
        result["reason"] = told(error)
        if "class" not in result and has_no_interface(model_type):
            result["status"] = "not on the interface"
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def _survey(model: PreTrainedModel, result: dict[str, Any]) -> None:
    result["layers"] = sum(on_interface(module) for module in model.modules())
    if not result["layers"]:
        result["status"] = "not on the interface"
        return
    default = _implementations(model)
    model.set_attn_implementation("eager")
    notes = result["checks"]
    checks = checks_of(model, notes)
    try:
        sq.hf.swap(model, "full")
    except Exception as error:
        result["status"] = "refused at swap" if isinstance(error, ValueError) else "crashed"
        result["reason"] = told(error)
        return
    reached = _reached(model)
    statuses = {check.name: status_of(check, notes) for check in checks}
    result["reached"] = len(reached)
    sq.hf.restore(model)
    for config, implementation in default:
        config._attn_implementation = implementation
    for check in checks:
        if statuses[check.name][0] == "silently wrong" and _is_default(check, statuses[check.name][1]):
            statuses[check.name] = ("equal", None)
            notes[check.name] += "; equal to the model's default attention, which is not as its eager one"
    order = ("silently wrong", "crashed", "refused at first forward")
    found = {status: name for name, (status, _) in reversed(statuses.items())}
    result["status"] = next((s for s in order if s in found), "equal")
    if result["status"] != "equal":
        name = found[result["status"]]
        result["reason"] = f"{name}: {notes[name]}"


def on_interface(module: nn.Module) -> bool:
    """Tell whether this module computes attention by transformers' attention interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _implementations(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, Any]]:
    found = {id(c): c for m in model.modules() if isinstance(c := getattr(m, "config", None), PreTrainedConfig)}
    return [(config, config._attn_implementation) for config in found.values()]


def _reached(model: PreTrainedModel) -> set[str]:
    reached: set[str] = set()
    for name, module in model.named_modules():
        if on_interface(module):
            module.register_forward_hook(lambda *_, name=name: reached.add(name))
    return reached


def _is_default(check: Check, have: Any) -> bool:
    """Tell whether the model's default attention gives this; few models' eager attention differs from it."""
    try:
        check.want = check.again()
    except Exception:  # it takes less than eager attention does
        return False
    return check.distance(have)[0] <= TOLERANCE
