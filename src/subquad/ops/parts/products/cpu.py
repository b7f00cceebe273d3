"""Causal products in compiled code."""

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
def compute(out: Tensor, query: Tensor, key: Tensor, value: Tensor, reverse: bool) -> None:
    """As `causal_product`, forwards or backwards."""
    B, H, N, R = query.shape
    G, E = value.shape[1], value.shape[3]
    threads = interface.threads(multiplications(query.shape, key.shape, value.shape))
    sizes = interface.Sizes(B, H, G, N, N, R, E, 0, 0, 0, 0, threads)
    query, key, value = (with_contiguous_rows(x) for x in (query, key, value))
    interface.run(
        "causal_product", interface.CausalProduct(sizes, *(rows(x) for x in (query, key, value, out)), reverse)
    )
