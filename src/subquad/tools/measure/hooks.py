"""Diagnostic hooks of methods: the keys that a method chooses, and the scores by which it hashes.

A method may define two optional hooks:

    meetings(query, key, call) -> tuple[Buckets, ...]      which queries meet which keys
    scores(query, key, call) -> (of_query, of_key)         (B,H,N,C) and (B,H,M,C): each token's score in each bucket

A token's bucket before any balancing is the one that it scores highest. Both are given fp32 or fp64 inputs.
"""

from dataclasses import fields, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import ModuleDict

from subquad.kernels.tokens.slots import Buckets
from subquad.methods import BoundMethod, ByLength, Method
from subquad.methods.core.method import Call

AT_N_B = {"enlarge": 1.0, "rounds": 1}  # the settings that give a query N/B keys


@runtime_checkable
class ChoosesKeys(Protocol):
    """A method whose chosen keys can be read."""

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """The pairs of queries and keys that meet."""


@runtime_checkable
class Hashes(Protocol):
    """A method that hashes each token by itself."""

    def scores(self, query: Tensor, key: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """The score of each query, and of each key, in each bucket."""


def inner(method: Method | BoundMethod) -> Method:
    """The method inside a bound method."""
    return method.method if isinstance(method, BoundMethod) else method


def at_n_b(method: Method | BoundMethod) -> Method | BoundMethod:
    """The method with the settings that give a query N/B keys; itself where it has them."""
    base = inner(method)
    names = {f.name for f in fields(base)}
    lean = replace(base, **{name: value for name, value in AT_N_B.items() if name in names})
    if lean == base:
        return method
    if isinstance(method, BoundMethod):
        sizes = {"heads": method.heads, "kv_heads": method.kv_heads, "head_dim": method.head_dim}
        return BoundMethod(lean, **sizes, learned=method.learned)
    return lean


def at_length(method: Method | BoundMethod, keys: int) -> Method | BoundMethod:
    """Returns what runs for an input of `keys` keys: of `by-length` that step's method, with its learned parameters."""
    base = inner(method)
    if not isinstance(base, ByLength):
        return method
    number = base.number_at(keys)
    step = base.at[number].method
    if not isinstance(method, BoundMethod):
        return step
    learned = dict(method.learned.items()) if isinstance(method.learned, ModuleDict) else {}
    sizes = {"heads": method.heads, "kv_heads": method.kv_heads, "head_dim": method.head_dim}
    return BoundMethod(step, **sizes, learned=learned.get(str(number)))


def asked(
    method: Method | BoundMethod, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"], **options: Any
) -> tuple[Tensor, Tensor, Call]:
    """Query and key in fp32 or fp64, and the call, as the method's hooks take them.

    `options` are those of `subquad.attention` (`mask`, `scale`, …).

    Raises:
        ValueError: what `subquad.attention` refuses; learned parameters that are not there; packed segments.
    """
    if inner(method).traits.learned and not isinstance(method, BoundMethod):
        raise ValueError(f"{inner(method).name!r} has learned parameters: give what method.bind(…) returns")
    if isinstance(method, Method):
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    query, key, _, call = method.prepare(query, key, key, **options)
    if call.mask.ids:
        raise ValueError("the mask packs segments, but buckets are one segment's; give each segment by itself")
    exact = torch.promote_types(query.dtype, torch.float32)
    return query.to(exact), key.to(exact), call


@torch.no_grad()
def meetings(method: Method | BoundMethod, query: Tensor, key: Tensor, **options: Any) -> tuple[Buckets, ...]:
    """The pairs of queries and keys that meet. ValueError if the method does not declare them; others as in `asked`."""
    chooses = inner(method)
    if not isinstance(chooses, ChoosesKeys):
        raise ValueError(f"{chooses.name!r} does not declare which keys a query meets: it has no `meetings`")
    return chooses.meetings(*asked(method, query, key, **options))


@torch.no_grad()
def scores(
    method: Method | BoundMethod, query: Tensor, key: Tensor, **options: Any
) -> tuple[Float[Tensor, "B H N C"], Float[Tensor, "B H M C"]]:
    """The score of each token in each bucket. ValueError where the method hashes none; others as in `asked`."""
    hashes = inner(method)
    if not isinstance(hashes, Hashes):
        raise ValueError(f"{hashes.name!r} does not hash tokens by themselves: it has no `scores`")
    return hashes.scores(*asked(method, query, key, **options))
