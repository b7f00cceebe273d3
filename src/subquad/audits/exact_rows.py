"""Exact attention of a few sampled queries: O(rows·M·D), whatever N is."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.kernels.attention.softmax import visible_softmax
from subquad.kernels.precision import upcast
from subquad.masks import Mask
from subquad.methods.core.call import Call

Rows = tuple[Int64[Tensor, "rows"], Int64[Tensor, "rows"], Int64[Tensor, "rows"]]  # item, head and query, on a CPU


def sampled(query: Tensor, mask: Mask, valid: Tensor | None, rows: int, generator: torch.Generator) -> Rows | None:
    """`rows` rows, each uniformly at random among all heads and real queries, with replacement; None without any.

    With replacement, so that how many have some property is binomial. `valid` (B,N) marks real queries, in addition
    to the mask.
    """
    B, H, N, _ = query.shape
    padding = mask.query_padding(N)
    valid = padding if valid is None else valid if padding is None else valid & padding
    tokens = B * N if valid is None else int(valid.sum())
    if tokens * H == 0:
        return None
    drawn = torch.randint(tokens, (rows,), generator=generator, device="cpu")
    head = torch.randint(H, (rows,), generator=generator, device="cpu")
    chosen = drawn if valid is None else valid.cpu().flatten().nonzero()[:, 0][drawn]
    return chosen // N, head, chosen % N


def exact_rows(query: Tensor, key: Tensor, value: Tensor, call: Call, chosen: Rows) -> Float[Tensor, "rows E"]:
    """softmax(scale · q_i Kᵀ + bias_i) V of the chosen rows, in fp32 or better, under the call's mask and kept tokens.

    Padding must be finite. A query that sees no key has 0.
    """
    query, key, value = query.detach(), key.detach(), value.detach()
    group = query.shape[1] // key.shape[1]
    (out,) = upcast(value.new_empty(len(chosen[0]), value.shape[3]))
    together: dict[tuple[int, int], list[int]] = {}  # rows that meet the same keys
    for at, (item, head) in enumerate(zip(chosen[0].tolist(), chosen[1].tolist(), strict=True)):
        together.setdefault((item, head // group), []).append(at)
    item, head, row = (index.to(query.device) for index in chosen)
    for (b, g), members in together.items():
        chosen_rows = torch.tensor(members, device=query.device)
        heads, rows = head[chosen_rows], row[chosen_rows]
        queries, keys, values = upcast(query[b, heads, rows], key[b, g], value[b, g])
        logits = queries @ keys.T * call.scale
        if call.bias is not None:
            logits = logits + _of_item(call.bias.detach(), b, heads, rows)
        out[chosen_rows] = (
            visible_softmax(logits, _allowed_pairs(call, b, heads, rows, query.shape[2], key.shape[2])) @ values
        )
    return out


def relative_errors(out: Float[Tensor, "rows E"], exact: Float[Tensor, "rows E"]) -> Float[Tensor, "rows"]:
    """e_i = ‖out_i − exact_i‖/‖exact_i‖ in fp64: 0 where both are 0, and NaN where the exact row is not finite."""
    out, exact = out.detach().double(), exact.double()
    error, size = (out - exact).norm(dim=-1), exact.norm(dim=-1)
    relative = torch.where(size > 0, error / size, torch.where(error == 0, 0.0, torch.inf))
    return torch.where(out.isfinite().all(-1), relative, torch.inf).masked_fill(~exact.isfinite().all(-1), torch.nan)


def _allowed_pairs(call: Call, b: int, heads: Tensor, rows: Tensor, N: int, M: int) -> Tensor | None:
    """The keys that these queries of one item see, (rows, M); None: all."""
    mask, keys = call.mask, torch.arange(M, device=rows.device)
    valid = mask.key_padding(M)
    if mask.only_padding:
        return None if valid is None else valid[b].expand(len(rows), M)
    pattern = _pattern(mask, b, rows, keys)
    if call.kept is not None and mask.span is not None:  # a window does not restrict kept tokens
        kept = call.kept.among(N)[b]
        pattern = pattern | (_pattern(replace(mask, span=None), b, rows, keys) & (kept[rows][:, None] | kept))
    for allowed in mask.allowed:
        pattern = pattern & _of_item(allowed, b, heads, rows)
    return pattern if valid is None else pattern & valid[b]


def _pattern(mask: Mask, b: int, rows: Tensor, keys: Tensor) -> Tensor:
    """The keys that causality, the window and the segments let these queries see."""
    if isinstance(mask.offset, Tensor) and mask.offset.numel() > 1:
        mask = replace(mask, offset=mask.offset[b])
    allowed = mask.sees(rows[:, None], keys)
    for ids in mask.ids:
        allowed = allowed & (ids[b, rows][:, None] == ids[b])
    return allowed


def _of_item(x: Tensor, b: int, heads: Tensor, rows: Tensor) -> Tensor:
    """The rows of an (B|1, H|1, N, M) that belong to these heads and queries of one item."""
    item = x[b if x.shape[0] > 1 else 0]
    return item[heads if item.shape[0] > 1 else torch.zeros_like(heads), rows]
