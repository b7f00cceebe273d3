"""Causal products in compiled code."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from subquad.ops.native import interface
from subquad.ops.native.interface import rows, with_contiguous_rows
from subquad.ops.parts.products.op import causal_product, directed_product, multiplications


@causal_product.refusal("cpu")
def refusal(query: Tensor, *_: object) -> str | None:
    """Why the compiled kernels cannot take this call; None where they can."""
    if query.dtype in (torch.bfloat16, torch.float16):
        return f"the dtype is {query.dtype}, and causal products take fp32"
    return interface.refusal(query)


@directed_product.on("cpu")
def compute(out: Tensor, x: Any) -> None:
    """As `causal_product`, forwards or backwards."""
    query, key, value = (with_contiguous_rows(t) for t in (x.query, x.key, x.value))
    (B, H, N, R), (_, G, _, E) = query.shape, value.shape
    threads = interface.threads(multiplications(SimpleNamespace(query=query.shape, key=key.shape, value=value.shape)))
    sizes = interface.Sizes(B, H, G, N, N, R, E, 0, 0, 0, 0, threads)
    interface.run(
        "causal_product", interface.CausalProduct(sizes, *(rows(t) for t in (query, key, value, out)), x.reverse)
    )
