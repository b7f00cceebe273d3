"""The op `attend_few`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.steps import reference
from subquad.kernels.dispatch import Op
from subquad.kernels.tensors import token_major

MOST_QUERIES = 32  # that the compiled kernels take

attend_few = Op(reference.attend_few)


@attend_few.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor]:
    """Run on a compiled backend."""
    options = x.valid, x.valid_queries, x.offsets, x.causal, x.offset, x.scale, x.window, x.softcap
    return steps_forward.run(backend, x.query, x.key, x.value, *options)


def prepare_few(*args: Any, **kwargs: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The outputs of `attend_few` as a function of query, key and value; all other arguments are those of this call.

    Their shapes and dtypes are those of this call too. None if no compiled backend runs it.
    """
    x = attend_few.arguments(*args, **kwargs)
    backend = attend_few.backend_of(x)
    if backend is None or backend == "reference":
        return None
    inputs = steps_forward.arguments(**{name: getattr(x, name) for name in steps_forward.arguments._fields})
    return steps_forward.prepare(backend, inputs, "query", "key", "value")


@attend_few.operator(
    *("query", "key", "value", "valid", "valid_queries", "offsets", "causal", "offset", "scale", "window", "softcap")
)
def steps_forward(x: Any) -> tuple[Tensor, Tensor]:
    """Allocate out and lse."""
    return token_major(x.query, x.value.shape[3]), x.query.new_empty(x.query.shape[:3], dtype=torch.float32)


@steps_forward.flops
def forward_flops(x: Any) -> int:
    """Operations of the products: logits, weighted values."""
    (B, H, N, D), (_, _, M, E) = x.query, x.value
    return 2 * B * H * N * M * (D + E)
