"""Attention inside buckets, merged by log-sum-exp over the buckets that a query is in."""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from subquad.masks import Mask
from subquad.ops.backends import choose
from subquad.ops.bucket_attention import cpu, reference
from subquad.ops.buckets import Buckets
from subquad.ops.softmax import merge_partials

SLOTS = 1 << 18  # of a head, that one compiled call takes in several sets


def bucket_attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    buckets: Buckets,
    mask: Mask,
    *,
    scale: float,
    key_bias: Float[Tensor, "B H M"] | None = None,
    of_distance: Float[Tensor, "B H N P"] | None = None,
    hidden: Bool[Tensor, "B H R M"] | None = None,
    union: bool = False,
    other_keys_only: bool = False,
    dropout_p: float = 0.0,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Each query's attention over the keys that it meets, as a partial: (out, lse).

        out_i = Σ_j m_ij e^{s_ij} v_j / Σ_j m_ij e^{s_ij},   lse_i = ln Σ_j m_ij e^{s_ij},   s_ij = scale·q_i·k_j + b_j

    m_ij is how many buckets query i shares with key j: merging buckets by log-sum-exp is one softmax in which a shared
    key counts that often. A query that meets no key has out = 0 and lse = −inf.

    Args:
        mask: its causal part and its window are applied; padding must be left out of the buckets already.
        key_bias: b, added to the logits of each key.
        of_distance: added to the logits too, by how far the key stands from the query: row i holds its terms for the
            distances −w, …, w in tokens ahead, or −w, …, 0 under a causal mask. The window w is that of the mask and
            the buckets together, which must have one.
        hidden: query number i does not see the keys j at which row i mod R holds True.
        union: a key counts once, however many buckets it shares with the query.
        other_keys_only: a query does not see the key of its own number.

    Inputs are fp32 or fp64. The gradient flows through out and lse to query, key, value, key_bias and of_distance.

    Raises:
        ValueError: `of_distance` does not hold the distances of the window.
    """
    return attend_buckets(
        query,
        key,
        value,
        (buckets,),
        mask,
        scale=scale,
        key_bias=key_bias,
        of_distance=of_distance,
        hidden=hidden,
        union=union,
        other_keys_only=other_keys_only,
        dropout_p=dropout_p,
    )


def attend_buckets(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    buckets: tuple[Buckets, ...],
    mask: Mask,
    *,
    scale: float,
    key_bias: Float[Tensor, "B H M"] | None = None,
    of_distance: Float[Tensor, "B H N P"] | None = None,
    hidden: Bool[Tensor, "B H R M"] | None = None,
    union: bool = False,
    other_keys_only: bool = False,
    dropout_p: float = 0.0,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """`bucket_attention` over several sets of buckets, merged. Options as there; `union` is that of each set."""
    buckets = buckets[:1] + tuple(more for more in buckets[1:] if more.queries.shape[2] > 0)
    options: dict[str, Any] = {
        "scale": scale,
        "key_bias": key_bias,
        "hidden": hidden,
        "other_keys_only": other_keys_only,
    }
    if choose(cpu=cpu.refusal(query, of_distance, union, dropout_p)) == "cpu":
        parts = [cpu.attend_buckets(query, key, value, some, mask, **options) for some in _portions(buckets)]
    else:
        options |= {"of_distance": of_distance, "union": union, "dropout_p": dropout_p}
        narrowed = [each.narrowed(mask) for each in buckets]
        if of_distance is not None:
            _check_distances(of_distance.shape[3], narrowed)
        parts = [
            reference.bucket_attention(query, key, value, each, window, **options)
            for each, window in zip(buckets, narrowed, strict=True)
        ]
    return parts[0] if len(parts) == 1 else merge_partials(parts)


def _portions(buckets: tuple[Buckets, ...]) -> list[tuple[Buckets, ...]]:
    """The sets in portions for one compiled call each, whose memory grows with the slots."""
    portions: list[tuple[Buckets, ...]] = []
    slots = 0
    for each in buckets:
        size = each.queries.shape[2] * each.queries.shape[3] + each.keys.shape[2] * each.keys.shape[3]
        if not portions or slots + size > SLOTS:
            portions, slots = [*portions, ()], 0
        portions[-1], slots = (*portions[-1], each), slots + size
    return portions


def _check_distances(given: int, masks: list[Mask]) -> None:
    for mask in masks:
        if mask.span is None:
            raise ValueError("`of_distance` needs a window: its terms are those of the distances inside it")
        wanted = mask.span + 1 if mask.is_causal else 2 * mask.span + 1
        if given != wanted:
            raise ValueError(f"`of_distance` holds {given} distances, but a window of {mask.span} has {wanted}")
