"""Axis names, and the validation of query, key and value.

====  ===========================================
B     batch
H     query heads
G     key/value heads (G = H, or H a multiple of G)
N     queries
M     keys
D     key width
E     value width
C     clusters or buckets
K     top-k
R     random features
====  ===========================================
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
AXES = ("batch (B)", "heads", "positions", "width")


@dataclass(frozen=True)
class Sizes:
    """The axis sizes of one attention call, under the names of this module's table."""

    B: int
    H: int
    G: int
    N: int
    M: int
    D: int
    E: int


def validate(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool = False) -> Sizes:
    """Check that (B,H,N,D), (B,G,M,D) and (B,G,M,E) fit together and return their sizes.

    Raises:
        TypeError: an argument is not a floating tensor, or dtypes differ.
        ValueError: a shape, a device or a head count does not fit; the message names both sides.
    """
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        _validate_tensor(name, tensor)
    for name in ("key", "value"):
        other = named[name]
        if other.dtype != query.dtype:
            raise TypeError(f"`query` is {query.dtype} but `{name}` is {other.dtype}; they must match")
        if other.device != query.device:
            raise ValueError(f"`query` is on {query.device} but `{name}` is on {other.device}; move them together")
    _same("query", query, "key", key, axis=0)
    _same("query", query, "key", key, axis=3)
    for axis in (0, 1, 2):
        _same("key", key, "value", value, axis)
    H, G = query.shape[1], key.shape[1]
    if H != G and not enable_gqa:
        hint = "; pass enable_gqa=True to share key heads" if H % G == 0 else ""
        raise ValueError(f"`query` has {H} heads but `key` has {G}; they must match{hint}")
    if H % G:
        raise ValueError(f"`query` has {H} heads but `key` has {G}; {H} is not a multiple of {G}")
    return Sizes(query.shape[0], H, G, query.shape[2], key.shape[2], query.shape[3], value.shape[3])


def _validate_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATING:
        raise TypeError(f"`{name}` is {tensor.dtype}; attention supports float64, float32, bfloat16 or float16")
    if tensor.ndim != 4:
        raise ValueError(f"`{name}` must be (batch, heads, positions, width), got {tensor.ndim} axes: {_show(tensor)}")
    for axis, size in enumerate(tensor.shape):
        if size == 0:
            raise ValueError(f"`{name}` is empty: its {AXES[axis]} axis is 0 in {_show(tensor)}")


def _same(a: str, left: Tensor, b: str, right: Tensor, axis: int) -> None:
    if left.shape[axis] != right.shape[axis]:
        raise ValueError(
            f"`{a}` has {left.shape[axis]} {AXES[axis]} but `{b}` has {right.shape[axis]}; they must match "
            f"({_show(left)} and {_show(right)})"
        )


def _show(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
