"""`Controlled`: attention that checks each head on sampled rows and recomputes the heads that fail."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.audits.argument_checks import check_share, check_tolerance, check_whole
from subquad.audits.exact_rows import exact_rows, relative_errors
from subquad.kernels.tokens.padding import cleared_inputs
from subquad.masks import Mask
from subquad.methods import ClusteredTail, Full, Method, resolve
from subquad.methods.clustered_tail import OF_ITEM, by_length
from subquad.methods.core.call import Call


@dataclass(frozen=True)
class Spent:
    """The methods that one call of `Controlled` used, by head.

    `stages` are the methods that were tried in order, and `stage` (B,H) is the number of the one that computed each
    head. `largest` is the largest relative error of each head's sampled rows there, NaN for an exact head. A head that
    is not exact has at most the share `share_bound` of its rows above the tolerance, for each head at the chosen
    confidence.
    """

    stages: tuple[str, ...]
    stage: Int64[Tensor, "B H"]
    largest: Float[Tensor, "B H"]
    share_bound: float

    def __str__(self) -> str:
        heads = [int((self.stage == at).sum()) for at in range(len(self.stages))]
        return ", ".join(f"{count} heads by {name}" for count, name in zip(heads, self.stages, strict=True) if count)


@dataclass(frozen=True)
class Controlled:
    """Attention with an error-controlled choice of method for each head, in one call.

        stage(head) = the first at which no sampled row i of the head has ‖out_i − exact_i‖ > tolerance·‖exact_i‖

    The stages are the method; where it is "clustered-tail", the same with twice the clusters and cells and four times
    the top keys; and "full", for the heads that are left.

    With r rows and S stages before "full", more than the share 1 − (δ/S)^{1/r} of a head's rows pass unseen with
    probability at most δ (Clopper-Pearson for none of r, and a union bound over the stages). Rows are drawn with
    replacement from the head's real queries, by a generator of this call.

    Args:
        method: the cheapest stage; not one with learned parameters.
        tolerance: the relative error of a row that is accepted.
        rows: how many rows of each head are compared at each stage.
        confidence: 1 − δ, for each head.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 4, 300, 16)
    >>> out, spent = sq.Controlled(tolerance=0.2)(q, k, v)
    >>> out.shape, spent.stages[-1], round(spent.share_bound, 3)
    (torch.Size([1, 4, 300, 16]), 'full', 0.109)
    """

    method: str | Method = "clustered-tail"
    tolerance: float = 0.02
    rows: int = 32
    confidence: float = 0.95

    def __post_init__(self) -> None:
        method = resolve(self.method)
        if method.traits.learned:
            raise ValueError(
                f"{method.name!r} has learned parameters, which exist only in a layer; controlled attention takes "
                "methods without them, such as 'clustered-tail'"
            )
        check_whole(rows=self.rows)
        check_tolerance(self.tolerance)
        check_share(confidence=self.confidence)

    def __call__(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B G M D"],
        value: Float[Tensor, "B G M E"],
        *,
        mask: Mask | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        seed: int | None = None,
    ) -> tuple[Float[Tensor, "B H N E"], Spent]:
        """Return the attention and the methods used for it; arguments, shapes and errors as in `subquad.attention`.

        A row whose exact result is not finite fails every stage, so that its head is exact. Reads the device once for
        each stage.
        """
        method = resolve(self.method)
        options: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "bias": bias, "scale": scale, "seed": seed}
        query, key, value, call = method.prepare(query, key, value, enable_gqa=enable_gqa, **options)
        query, key, value = cleared_inputs(query, key, value, call.mask)  # exact rows take no NaN in padding
        stages = stages_of(method, query.shape[2], key.shape[2])
        delta = (1 - self.confidence) / max(len(stages) - 1, 1)
        H = query.shape[1]
        rows = self._rows(query, call)
        with torch.autocast(query.device.type, enabled=False):
            exact = exact_rows(query, key, value, call, rows)
        # Each head as an item of its own: later stages run on some of them.
        heads = _Heads(query, key, value, call)
        out, failed = None, torch.arange(heads.count, device="cpu")
        stage = torch.full((heads.count,), len(stages) - 1, device="cpu")
        largest = torch.full((heads.count,), math.nan, dtype=torch.float64, device="cpu")
        pair = rows[0] * H + rows[1]
        for at, each in enumerate(stages):
            if len(failed) == 0:
                break
            if out is None:
                out = each.run(query, key, value, call).flatten(0, 1)
            else:
                out = out.index_copy(0, failed.to(out.device), each.run(*heads.some(failed))[:, 0])
            if isinstance(each, Full):
                break
            errors = relative_errors(out[pair.to(out.device), rows[2].to(out.device)], exact).cpu()
            worst = torch.zeros(heads.count, dtype=torch.float64, device="cpu").scatter_reduce(
                0, pair, errors.nan_to_num(nan=math.inf), "amax"
            )
            passed = failed[worst[failed] <= self.tolerance]
            stage[passed], largest[passed] = at, worst[passed]
            failed = failed[worst[failed] > self.tolerance]
        assert out is not None, "there is at least one stage"
        shape = query.shape[:2]
        bound = 1 - delta ** (1 / self.rows)
        names = tuple(str(each) for each in stages)
        return out.unflatten(0, shape), Spent(names, stage.view(shape), largest.view(shape), bound)

    def _rows(self, query: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """`rows` queries of each head of each item, among the real ones; none of an item that has none."""
        B, H, N, _ = query.shape
        generator, valid = torch.Generator("cpu").manual_seed(call.seed), call.mask.query_padding(N)
        chosen = []
        for item in range(B):
            tokens = torch.arange(N, device="cpu") if valid is None else valid[item].cpu().nonzero()[:, 0]
            if len(tokens):
                drawn = tokens[torch.randint(len(tokens), (H, self.rows), generator=generator, device="cpu")]
                chosen += [(item * H + head, drawn[head]) for head in range(H)]
        pair = torch.tensor([each for each, _ in chosen], dtype=torch.long, device="cpu").repeat_interleave(self.rows)
        row = torch.cat([tokens for _, tokens in chosen]) if chosen else pair
        return pair // H, pair % H, row


class _Heads:
    """The inputs of a call with each head as a batch item of its own, so that some of them can be computed."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, call: Call):
        self._inputs, self._call = (query, key, value), call
        self.count = query.shape[0] * query.shape[1]

    def some(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Call]:
        """Query (P,1,N,D), key, value and the call of these heads, numbered item by item."""
        query, key, value = self._inputs
        chosen = chosen.to(query.device)
        item, head = chosen // query.shape[1], chosen % query.shape[1]
        group = query.shape[1] // key.shape[1]
        mask, bias = self._call.mask, self._call.bias
        mask = replace(
            mask,
            offset=mask.offset[item] if isinstance(mask.offset, Tensor) and mask.offset.numel() > 1 else mask.offset,
            both=tuple(x[item] for x in mask.both),
            keys=tuple(x[item] for x in mask.keys),
            queries=tuple(x[item] for x in mask.queries),
            ids=tuple(x[item] for x in mask.ids),
            allowed=tuple(_of_heads(x, item, head) for x in mask.allowed),
        )
        call = replace(self._call, mask=mask, bias=None if bias is None else _of_heads(bias, item, head))
        key, value = (x[item, head // group][:, None] for x in (key, value))
        return query[item, head][:, None], key, value, call


def stages_of(method: Method, N: int, M: int) -> list[Method]:
    """The methods in the order in which they are tried; the last is exact."""
    if isinstance(method, Full):
        return [method]
    if isinstance(method, ClusteredTail):
        clusters, topk = (
            by_length(method.clusters, OF_ITEM.clusters, N, None)[0],
            by_length(method.topk, OF_ITEM.topk, M, None)[0],
        )
        if 2 * clusters < N and 4 * topk < M:  # beyond, it is exact attention, made dearer
            return [method, replace(method, clusters=2 * clusters, topk=4 * topk, cells=2 * method.cells), Full()]
    return [method, Full()]


def _of_heads(x: Tensor, item: Tensor, head: Tensor) -> Tensor:
    """The (P,1,N,M) of an (B|1, H|1, N, M) for these heads of these items."""
    item = item if x.shape[0] > 1 else torch.zeros_like(item)
    return x[item, head if x.shape[1] > 1 else torch.zeros_like(head)][:, None]
