"""Causal products in compiled code."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.products.op import (
    causal_product,
    check_heads,
    directed_product,
    multiplications,
    refusal_of_dtype,
)
from subquad.kernels.native import interface
from subquad.kernels.operators import shapes_of


@causal_product.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernels cannot take this call; None if they can."""
    return refusal_of_dtype(x.query) or interface.refusal(x.query)


@directed_product.on("cpu")
def compute(out: Tensor, x: Any) -> None:
    """The CPU backend of `causal_product`, in either direction."""
    (B, H, N, D), (_, G, _, E) = x.query.shape, x.value.shape
    check_heads(x)
    interface.check(
        "causal_product",
        query=(x.query, torch.float32, (B, H, N, D)),
        key=(x.key, torch.float32, (B, G, N, D)),
        value=(x.value, torch.float32, (B, G, N, E)),
    )
    threads = interface.threads(multiplications(shapes_of(x)))
    interface.run(
        "causal_product", **{"B": B, "H": H, "G": G, "N": N, "D": D, "E": E}, threads=threads, out=out, **x._asdict()
    )
