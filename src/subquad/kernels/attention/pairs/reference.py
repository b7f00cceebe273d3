"""Attention inside buckets in plain PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.attention.softmax import logsumexp, merge_partials, visible_softmax
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.slots import Buckets, members, vectors_at
from subquad.masks import Mask


def attend_pairs(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    buckets: Buckets | tuple[Buckets, ...],
    mask: Mask,
    *,
    scale: float,
    key_bias: Float[Tensor, "B H M"] | None = None,
    of_distance: Float[Tensor, "#B H #N P"] | None = None,
    hidden: Bool[Tensor, "B H R M"] | None = None,
    shown: tuple[Bool[Tensor, "B H _ _ _"], ...] | None = None,
    by_features: bool = False,
    union: bool = False,
    other_keys_only: bool = False,
    dropout_p: float = 0.0,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Each query's attention over the keys that it meets, as a partial: (out, lse), both in fp32 or better.

        out_i = Σ_j m_ij e^{s_ij} v_j / Σ_j m_ij e^{s_ij},   lse_i = ln Σ_j m_ij e^{s_ij},   s_ij = scale·q_i·k_j + b_j

    m_ij is how many buckets query i shares with key j, over all sets of buckets: merging buckets by log-sum-exp is one
    softmax in which a shared key counts that often. A query that meets no key has out = 0 and lse = −inf.

    Args:
        buckets: one set of buckets, or several.
        mask: its causal part and its window are applied; padding must be left out of the buckets already.
        key_bias: b, added to the logits of each key.
        of_distance: added to the logits too, by how far the key stands from the query: row i holds its terms for the
            distances −w, …, w in tokens ahead, or −w, …, 0 under a causal mask; one row is for all queries. The window
            w is that of the mask and the buckets together, which must have one. At a term of −∞ a query sees no key.
        hidden: query number i does not see the keys j at which row i mod R holds True.
        shown: for each set which pairs of its blocks count at all, such as those of `first_meetings`; None: all.
        by_features: s_ij = ln Σ_r e^{q_ir + k_jr} instead of scale·q_i·k_j, for queries and keys that are logarithms of
            features.
        union: a key counts once in each set, however many of its buckets it shares with the query.
        other_keys_only: a query does not see the key of its own number.

    The gradient flows through out and lse to query, key, value, key_bias and of_distance.

    Raises:
        ValueError: `of_distance` does not hold the distances of the window.
    """
    sets = (buckets,) if isinstance(buckets, Buckets) else buckets
    query, key, value = upcast(query, key, value)
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    narrowed = [each.narrowed(mask) for each in sets]
    if of_distance is not None:
        check_distances(of_distance.shape[3], narrowed)
        of_distance = of_distance.expand(*query.shape[:3], -1)
    pairs = [None] * len(sets) if shown is None else shown
    options: dict[str, Any] = {"scale": scale, "key_bias": key_bias, "of_distance": of_distance, "hidden": hidden}
    options |= {"by_features": by_features, "union": union, "other_keys_only": other_keys_only, "dropout_p": dropout_p}
    parts = [
        attend_set(query, key, value, each, window, shown=counting, **options)
        for number, (each, window, counting) in enumerate(zip(sets, narrowed, pairs, strict=True))
        if number == 0 or each.queries.shape[2] > 0
    ]
    return parts[0] if len(parts) == 1 else merge_partials(parts)


def check_distances(inputs: int, masks: list[Mask]) -> None:
    """Raise ValueError where the terms are not those of the distances inside the window."""
    for mask in masks:
        if mask.span is None:
            raise ValueError("`of_distance` needs a window: its terms are those of the distances inside it")
        wanted = mask.span + 1 if mask.is_causal else 2 * mask.span + 1
        if inputs != wanted:
            raise ValueError(f"`of_distance` contains {inputs} distances, but a window of {mask.span} has {wanted}")


def attend_set(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    buckets: Buckets,
    mask: Mask,
    *,
    scale: float,
    key_bias: Tensor | None,
    of_distance: Tensor | None,
    hidden: Tensor | None,
    shown: Tensor | None,
    by_features: bool,
    union: bool,
    other_keys_only: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """The op on one set of buckets, whose span the mask holds; query, key and value have the same heads."""
    N, M = query.shape[2], key.shape[2]
    queries, keys = buckets.queries, buckets.keys_of_block()
    of_query, of_key = vectors_at(query, queries), vectors_at(key, keys)
    logits = log_products(of_query, of_key) if by_features else of_query @ of_key.transpose(-1, -2) * scale
    if key_bias is not None:
        logits = logits + vectors_at(key_bias[..., None], keys).transpose(-1, -2)
    allowed = visible(queries, keys, N, M, mask, other_keys_only)
    if of_distance is not None:
        terms = of_pairs(of_distance, queries, keys, mask)
        logits, allowed = logits + terms, allowed & ~terms.isneginf()
    if union:
        logits = logits - shared_buckets(buckets, N, M).to(logits.dtype).log()
    if hidden is not None:
        allowed = allowed & ~hidden_pairs(hidden, queries, keys)
    if shown is not None:
        allowed = allowed & shown
    weights = F.dropout(visible_softmax(logits, allowed), dropout_p)
    lse = logsumexp(logits.masked_fill(~allowed, -torch.inf))
    values = vectors_at(value, keys)
    out = weights @ values if hidden is None else mean_of_visible(weights, values, allowed)
    out = out.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return merge_blocks(out, lse, queries, N)


def mean_of_visible(
    weights: Float[Tensor, "B H T S K"], values: Float[Tensor, "B H T K E"], allowed: Bool[Tensor, "#B #H T #S K"]
) -> Float[Tensor, "B H T S E"]:
    """weights @ values, NaN where a value that is allowed is not finite, whatever the others hold."""
    finite = values.isfinite()
    spoilt = allowed.to(values.dtype) @ (~finite).to(values.dtype) > 0
    values = values.clone()
    with torch.no_grad():  # the gradient of a value is its weight, whatever it holds
        values.masked_fill_(~finite, 0.0)
    return weights @ values * torch.where(spoilt, torch.nan, values.new_ones(()))  # gradients are NaN too


def log_products(x: Float[Tensor, "B H T S R"], y: Float[Tensor, "B H T K R"]) -> Float[Tensor, "B H T S K"]:
    """ln Σ_r e^{x_sr + y_kr}."""
    most = [z.detach().amax(-1, keepdim=True) for z in (x, y)]
    products = (x - most[0]).exp() @ (y - most[1]).exp().mT
    return products.clamp(min=torch.finfo(x.dtype).tiny).log() + most[0] + most[1].mT


def visible(
    queries: Int64[Tensor, "B H T S"],
    keys: Int64[Tensor, "B H T K"],
    N: int,
    M: int,
    mask: Mask,
    other_keys_only: bool,
) -> Bool[Tensor, "B H T S K"]:
    """The key slots that each query slot sees: filled ones, as the mask's pattern lets it."""
    query, key = queries[..., :, None], keys[..., None, :]
    allowed = (query < N) & (key < M) & mask.sees(query, key)
    return allowed & (query != key) if other_keys_only else allowed


def hidden_pairs(
    hidden: Bool[Tensor, "B H R M"], queries: Int64[Tensor, "B H T S"], keys: Int64[Tensor, "B H T K"]
) -> Bool[Tensor, "B H T S K"]:
    """For each pair of a block whether `hidden` parts it."""
    R, M = hidden.shape[2:]
    row = queries.remainder(queries.new_full((), R))  # of a tensor: ONNX has no remainder of a symbolic number
    pair = (row * M)[..., :, None] + keys.clamp(max=M - 1)[..., None, :]
    return hidden.flatten(2).gather(2, pair.flatten(2)).view(pair.shape)


def of_pairs(
    of_distance: Float[Tensor, "B H N P"], queries: Int64[Tensor, "B H T S"], keys: Int64[Tensor, "B H T K"], mask: Mask
) -> Float[Tensor, "B H T S K"]:
    """For each pair of a block its query's term at their distance; that of pairs outside the window is not read."""
    assert mask.span is not None
    ahead = keys[..., None, :] - mask.positions(queries[..., :, None])
    return vectors_at(of_distance, queries).gather(4, (ahead + mask.span).clamp(0, of_distance.shape[3] - 1))


def shared_buckets(buckets: Buckets, N: int, M: int) -> Float[Tensor, "B H T S K"]:
    """For each pair that meets in a block, how many blocks it meets in; at least 1."""
    keys = buckets.keys_of_block()
    query_in, key_in = vectors_at(members(buckets.queries, N), buckets.queries), vectors_at(members(keys, M), keys)
    return (query_in @ key_in.transpose(-1, -2)).clamp(min=1)


def merge_blocks(
    outs: Float[Tensor, "B H T S E"], lses: Float[Tensor, "B H T S"], queries: Int64[Tensor, "B H T S"], N: int
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Merge what each query got in its blocks: out = Σ_b e^{lse_b} out_b / Σ_b e^{lse_b}.

    A block with lse = −inf is skipped. If all have −inf, out is 0, or NaN where it is NaN in one of them:
    there the query saw keys, but with logits of −inf alone.
    """
    B, H, _, _, E = outs.shape
    slot = queries.flatten(2)
    lses, outs = lses.flatten(2), outs.flatten(2, 3)
    largest = lses.detach().new_full((B, H, N + 1), -torch.inf).scatter_reduce(2, slot, lses.detach(), "amax")
    largest = torch.where(torch.isneginf(largest), 0.0, largest)
    none = torch.isneginf(lses)
    weights = torch.where(none, 0.0, (lses - largest.gather(2, slot)).exp())
    totals = weights.new_zeros(B, H, N + 1).scatter_add(2, slot, weights)
    reached = totals != 0  # NaN is seen
    safe = torch.where(reached, totals, 1.0)
    # Divided first: the sum of what is not divided yet might overflow.
    parts = torch.where(none[..., None], 0.0, (weights / safe.gather(2, slot))[..., None] * outs)
    out = outs.new_zeros(B, H, N + 1, E).scatter_add(2, slot[..., None].expand_as(outs), parts)
    lost = (none & outs.isnan().any(-1)).to(weights.dtype)
    lost = (torch.zeros_like(largest).scatter_add(2, slot, lost) > 0) & ~reached
    # From sums of its own: the gradient of `out` in its own sums, whose parts cancel each other, may be so large that
    # the log-sum-exp's disappears in rounding.
    apart = torch.where(none, 0.0, (lses - largest.gather(2, slot)).exp())
    apart = apart.new_zeros(B, H, N + 1).scatter_add(2, slot, apart)
    lse = torch.where(reached, torch.where(reached, apart, 1.0).log() + largest, -torch.inf)
    return out.masked_fill(lost[..., None], torch.nan)[:, :, :N], lse[..., :N]
