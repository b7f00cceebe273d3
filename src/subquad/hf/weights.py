"""A check of whether the weights in a file are those of the model that its config describes.

transformers fills what a file lacks with random numbers and goes on. A figure that is measured on such a model is
noise, so that every command refuses it, unless what is missing does not reach the output that is read.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subquad.core.errors import InputError
from subquad.hf.layers import NAME

SHOWN = 3  # names in a message


def check_weights(
    where: str, model: nn.Module, info: dict[str, Any], output: Callable[[], Tensor] | None = None
) -> list[str]:
    """Check that a file gave a model all of its weights.

    Args:
        info: the loading info of `from_pretrained(…, output_loading_info=True)`.
        output: runs the model on a short input and gives what is read from it, for autograd to see which of the missing
            weights it depends on. None: it depends on all of them.

    Returns:
        What a reader must know: parts that start at random but are not read, and weights of the file that are not used.

    Raises:
        InputError: weights that are missing, have other shapes, or are of layers that the model does not have; names
            the first ones and a prefix that would explain it.
    """
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    shapes = sorted(info["mismatched_keys"])
    if shapes:
        name, stored, wanted = shapes[0]
        raise InputError(
            f"{where}: {len(shapes):,} of its weights have other shapes than in its config.json ({name} is "
            f"{_sizes(stored)} in the file, but {_sizes(wanted)} in the model); the config and the weights must belong "
            "together"
        )
    unread = _unread(model, missing, output) if missing and output else {}
    needed = [name for name in missing if name not in unread]
    if needed:
        raise InputError(
            f"{where}: {len(needed):,} of the model's {len(model.state_dict()):,} weights are not in the file and "
            f"would be random ({_first(needed)}); {_meant(needed, unused)}"
        )
    beyond = [name for name in unused if _is_of_a_layer(model, name) and f".{NAME}." not in name]
    if beyond:
        raise InputError(
            f"{where}: {len(beyond):,} weights of the file have no place in the model that its config.json describes "
            f"({_first(beyond)}); the config and the weights must belong together"
        )
    return _notes(sorted(set(unread.values())), unused)


def _unread(model: nn.Module, missing: Collection[str], output: Callable[[], Tensor]) -> dict[str, str]:
    """{weight: the part of the model that it is in} of those whose whole part does not reach the output.

    A part is never inside of a list of layers: an expert that a short input does not meet has no gradient either.
    """
    weights = {name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
    asked = [p.requires_grad for p in weights.values()]
    model.requires_grad_(True)
    with torch.enable_grad():
        gradients = torch.autograd.grad(output().float().sum(), list(weights.values()), allow_unused=True)
    for parameter, before in zip(weights.values(), asked, strict=True):
        parameter.requires_grad_(before)
    reached = [name for name, gradient in zip(weights, gradients, strict=True) if gradient is not None]
    parts = {}
    for name in missing:
        for part in _parts(name) if name in weights else []:
            if not any(each.startswith(f"{part}.") for each in reached):
                parts[name] = part
                break
    return parts


def _parts(name: str) -> list[str]:
    """The parts that contain a weight, from outside: "text", "text.pooler" of "text.pooler.dense.0.bias"."""
    words = name.split(".")[:-1]
    end = next((at for at, word in enumerate(words) if word.isdigit()), len(words))
    return [".".join(words[:at]) for at in range(1, end + 1)]


def _is_of_a_layer(model: nn.Module, name: str) -> bool:
    """True if a weight's name goes into a list of layers that the model has, such as layer.12 of twelve layers."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    module: Any = model
    for word in name.removeprefix("" if hasattr(model, prefix[:-1]) else prefix).split("."):
        if isinstance(module, nn.ModuleList) and word.isdigit():
            return True
        module = getattr(module, word, None)
    return False


def _meant(missing: Sequence[str], unused: Sequence[str]) -> str:
    """An explanation of the missing weights: a prefix that one side has and the other does not."""
    surplus, lacking = _prefix(missing, unused), _prefix(unused, missing)
    if surplus:
        return (
            f"the file has them with the prefix {surplus!r}, as weights of a wrapper are saved: save the model "
            "inside of it with save_pretrained"
        )
    if lacking:
        return f"the file has them without the prefix {lacking!r}: save the whole model with save_pretrained"
    if unused:
        return f"the file has other names ({_first(unused)}): its config.json is of another model"
    return "the file is not whole, or its config.json is of a larger model"


def _prefix(short: Sequence[str], long: Sequence[str]) -> str:
    """The prefix of most of the `short` names in `long`."""
    known = set(short)
    prefixes = Counter[str]()
    for name in long:
        words = name.split(".")
        for at in range(1, len(words)):
            if ".".join(words[at:]) in known:
                prefixes[".".join(words[:at]) + "."] += 1
                break
    prefix, count = prefixes.most_common(1)[0] if prefixes else ("", 0)
    return prefix if 2 * count > min(len(short), len(long)) else ""


def _notes(unread: Sequence[str], unused: Sequence[str]) -> list[str]:
    notes = []
    if unread:
        notes.append(f"Not in the model's file, and not read by what is measured: {_first(unread)}.")
    ours = [name for name in unused if f".{NAME}." in name]
    if ours:
        notes.append(
            f"The file has {len(ours):,} weights of attention methods, as a model has that was saved while swapped; "
            "the model is measured with its own attention, and they are not read."
        )
    others = [name for name in unused if name not in ours]
    if others:
        notes.append(f"Not part of the model that is measured, of the weights in its file: {_first(others)}.")
    return notes


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _sizes(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "a number"
