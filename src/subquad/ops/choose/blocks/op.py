"""The op `by_bucket`."""

from jaxtyping import Int64
from torch import Tensor

from subquad.ops.backends import Op, Operator
from subquad.ops.choose.blocks import reference
from subquad.ops.transforms import shapes_may_follow_data

BLOCK = 32  # slots of a block


def by_bucket(
    labels: Int64[Tensor, "B H N"], buckets: int, size: int = BLOCK
) -> tuple[Int64[Tensor, "B H T S"], Int64[Tensor, "B H T"]]:
    """Sort tokens by bucket into blocks of `size` slots: (the tokens, the bucket of each block).

    A label of `buckets` is in none. Where reading a number from the tensors does not wait for a device, the blocks that
    nobody uses are cut off.
    """
    tokens, bucket, used = sorted_blocks(labels, buckets, size)
    most = int(used.max()) if shapes_may_follow_data(labels) else tokens.shape[2]
    return tokens[:, :, :most], bucket[:, :, :most]


@Op
def sorted_blocks(
    labels: Int64[Tensor, "B H N"], buckets: int, size: int
) -> tuple[Int64[Tensor, "B H T S"], Int64[Tensor, "B H T"], Int64[Tensor, "B H"]]:
    """All blocks of `by_bucket`, ⌈N/size⌉ + buckets, and how many of them each head uses."""
    return reference.sorted_blocks(labels, buckets, size)


@sorted_blocks.compiled
def _(backend: str, labels: Tensor, buckets: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    return label_blocks(backend, labels, buckets, size)


@Operator
def label_blocks(labels: Tensor, buckets: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate tokens, buckets and counts."""
    if buckets < 1 or size < 1:
        raise ValueError(f"by_bucket: {buckets} buckets and blocks of {size}, but there must be 1 of each at least")
    B, H, N = labels.shape
    blocks = -(-N // size) + buckets
    return labels.new_empty(B, H, blocks, size), labels.new_empty(B, H, blocks), labels.new_empty(B, H)
