"""Run a model one way or another, and say how far two runs are apart."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

TOLERANCE = 1e-3  # of the largest number of a tensor


def forward(model: PreTrainedModel, inputs: Mapping[str, Any], **options: Any) -> dict[str, Tensor]:
    """Every tensor among the outputs of one pass, by name; hidden states too where the model gives them."""
    torch.manual_seed(0)  # for models that draw
    try:
        found = model(**inputs, **options, output_hidden_states=True)
    except TypeError:
        torch.manual_seed(0)
        found = model(**inputs, **options)
    return dict(_tensors("", found))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if "past" not in str(key) and "cache" not in str(key) and "attentions" not in str(key):
                yield from _tensors(f"{name}.{key}".strip("."), inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _tensors(f"{name}[{index}]", inner)


def gradients(model: PreTrainedModel, inputs: Mapping[str, Any], defined: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of one fixed scalar of the defined outputs, for every parameter and every real-valued input."""
    model.zero_grad(set_to_none=True)
    leaves = {k: v.clone().requires_grad_() if _is_valid(v) else v for k, v in inputs.items()}
    with torch.enable_grad():
        outputs = forward(model, leaves)
        generator = torch.Generator().manual_seed(1)
        total = torch.zeros(())
        for name, output in outputs.items():
            weights = torch.randn(output.shape, generator=generator) / output.numel() ** 0.5
            if output.requires_grad:
                total = total + torch.where(defined[name], output * weights, 0.0).sum()
        total.backward()
    found = {f"input {k}": v.grad for k, v in leaves.items() if _is_valid(v) and v.grad is not None}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {name: grad.detach() for name, grad in found.items()}


def _is_valid(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _distance(want: Tensor, have: Tensor) -> Tensor:
    finite = want[torch.isfinite(want)]
    scale = finite.abs().max().clamp(min=1e-6) if finite.numel() else torch.ones(())
    return ((want - have).abs() / scale).nan_to_num(nan=float("inf"))


def farthest(
    want: Mapping[str, Tensor], have: Mapping[str, Tensor], defined: Mapping[str, Tensor] | None = None
) -> tuple[float, str]:
    """(largest deviation, where) over the tensors of both, as a share of the largest number of the tensor."""
    worst, where = 0.0, ""
    for name, expected in want.items():
        if name not in have:
            return float("inf"), f"{name} is missing"
        if have[name].shape != expected.shape:
            return float("inf"), f"{name} has shape {tuple(have[name].shape)} for {tuple(expected.shape)}"
        distance = _distance(expected, have[name])
        if defined is not None:
            distance = torch.where(defined[name], distance, 0.0)
        largest = float(distance.max()) if distance.numel() else 0.0
        if largest > worst:
            index = torch.nonzero(distance == distance.max())[0].tolist()
            worst, where = largest, f"{name} at {index} of {list(expected.shape)}"
    return worst, where


def farthest_gradient(want: Mapping[str, Tensor], have: Mapping[str, Tensor]) -> tuple[float, str]:
    """Like `farthest`, as a share of the largest gradient of the parameter or, where that is tiny, of all of them.

    The gradients of keys' biases are 0 but for rounding, since softmax is the same with any number added: their floor
    is ten times as high.
    """
    largest = max((float(g.abs().max()) for g in want.values() if g.numel()), default=0.0)
    worst, where = 0.0, ""
    for name, expected in want.items():
        if not expected.numel():
            continue
        floor = 1e-2 if name.endswith("k_proj.bias") else 1e-3
        scale = max(float(expected.abs().max()), floor * largest, 1e-9)
        found = have[name] if name in have else torch.zeros_like(expected)
        off = float(((expected - found).abs() / scale).nan_to_num(nan=float("inf")).max())
        if off > worst:
            worst, where = off, name
    return worst, where
