"""The op `by_bucket`."""

from typing import Any

from jaxtyping import Int64
from torch import Tensor

from subquad.core.rounding import ceil_div
from subquad.kernels.dispatch import Op
from subquad.kernels.selection.blocks import reference
from subquad.kernels.transforms import shapes_may_follow_data

BLOCK = 32  # slots of a block


def by_bucket(
    labels: Int64[Tensor, "B H N"], buckets: int, size: int = BLOCK
) -> tuple[Int64[Tensor, "B H T S"], Int64[Tensor, "B H T"]]:
    """Sort tokens by bucket into blocks of `size` slots: (the tokens, the bucket of each block).

    A label of `buckets` is in none. If reading a number from the tensors does not wait for a device, the blocks that
    nobody uses are cut off.
    """
    tokens, bucket, used = sorted_blocks(labels, buckets, size)
    most = int(used.max()) if shapes_may_follow_data(labels) else tokens.shape[2]
    return tokens[:, :, :most], bucket[:, :, :most]


sorted_blocks = Op(reference.sorted_blocks)


@sorted_blocks.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run on a compiled backend."""
    tokens, bucket, used = label_blocks.run(backend, *x)
    return tokens, bucket, used


@sorted_blocks.operator("labels", "buckets", "size")
def label_blocks(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate tokens, buckets and counts."""
    labels, buckets, size = x
    if buckets < 1 or size < 1:
        raise ValueError(f"by_bucket: {buckets} buckets and blocks of {size}, but there must be 1 of each at least")
    B, H, N = labels.shape
    blocks = ceil_div(N, size) + buckets
    return labels.new_empty(B, H, blocks, size), labels.new_empty(B, H, blocks), labels.new_empty(B, H)
