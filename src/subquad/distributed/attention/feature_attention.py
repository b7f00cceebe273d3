"""Attention by features to the keys of all ranks, by the sums that the keys of each leave behind (`key_sums`)."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from subquad.distributed.attention.merging import merging_rows
from subquad.distributed.rows import combine_together, of_earlier
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.attention.features.key_sums import attend_sums, left_behind, of_no_keys
from subquad.kernels.attention.features.visible import attend_features, hide_keys
from subquad.kernels.attention.partial_rows import merged
from subquad.kernels.attention.softmax import merge_partials
from subquad.masks import Mask

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]


def attend_features_of_ranks(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M C"],
    value: Float[Tensor, "B G M E"],
    mask: Mask,
    *,
    split: TokenSplit,
    key_bias: Float[Tensor, "B #G M"] | None = None,
    **maps: Any,
) -> Partial:
    """`attend_features` to the keys of all ranks; under a causal mask to this rank's, merged with those before."""
    valid = mask.key_padding(key.shape[2])
    bias = key_bias if valid is None else hide_keys(key_bias, valid, key)
    partial = attend_ranks(query, key, value, split, before=mask.is_causal, key_bias=bias, **maps)
    if not mask.is_causal:
        return partial
    return merge_partials([attend_features(query, key, value, mask, key_bias=key_bias, **maps), partial])


def attend_ranks(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M C"],
    value: Float[Tensor, "B G M E"],
    split: TokenSplit,
    *,
    before: bool,
    key_bias: Float[Tensor, "B #G M"] | None,
    of_key: Tensor | None = None,
    **maps: Any,
) -> Partial:
    """Attention of this rank's queries to the keys of all ranks, or to those `before` it.

    A rank reads its keys once, for the G·R·(E + 1) numbers of each item that they leave behind, which ranks combine.
    """
    sums = left_behind(key, value, of_key, key_bias)
    rows = of_earlier(sums, lambda a, b: merged([a, b]), of_no_keys) if before else merging_rows(sums)
    (state,) = combine_together([rows], split.group)
    return attend_sums(query, [state], **maps)
