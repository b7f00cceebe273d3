"""Keep: tokens named by their rank, such as sinks and global tokens, which every query sees and which see every key.

    K      = the item's real tokens of rank 0 to first − 1, the last `last`, and those of rank 0, every, 2·every, …
    out_i  = softmax attention of query i to all keys                  for i in K, with sides="both"
    out_i  = softmax attention of query i to the keys in K             for other i

By itself it is attention through global tokens; in a sum ("local:window=32+keep:first") it adds them to other methods,
which then see a sequence from which K is missing, as if it were padding: no key counts twice. `keep=` of `sq.attention`
does the same for tokens that the caller names.

Sinks are those of Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks"; symmetric global tokens
are those of Beltagy et al. 2020, "Longformer", without projections of their own.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from subquad.core.rounding import ceil_div
from subquad.kernels.tokens.positions import ValidIndex, ValidPositions
from subquad.kernels.tokens.slots import Buckets, valid_slots
from subquad.masks import Mask
from subquad.methods.core.bucketed import Bucketed, StepByPosition
from subquad.methods.core.call import PrepareStep
from subquad.methods.core.method import Call, Traits, choice, whole

BLOCK = 16  # queries of a block; all blocks meet the same keys


@dataclass(frozen=True)
class KeptPositions:
    """The kept tokens of a call as keys and, where their rows are kept too, as queries; empty slots hold M and N."""

    keys: Int64[Tensor, "B S"]
    queries: Int64[Tensor, "B S"] | None
    line: ValidPositions

    def others(self) -> tuple[Bool[Tensor, "B M"], Bool[Tensor, "B N"] | None]:
        """The keys and the queries that are not kept."""
        return tuple(_absent(x, n) for x, n in ((self.keys, self.line.M), (self.queries, self.line.N)))  # type: ignore

    def left_out(self) -> Mask:
        """The mask of the call, in which the kept tokens are padding."""
        keys, queries = self.others()
        return self.line.mask & Mask.padding(keys=keys, queries=queries)

    def meetings(self, heads: int) -> tuple[Buckets, ...]:
        """The columns of the kept tokens and their rows."""
        line = self.line
        queries = torch.arange(ceil_div(line.N, BLOCK) * BLOCK, device=line.device).clamp(max=line.N)
        queries = queries.view(1, 1, -1, BLOCK).expand(line.B, 1, -1, -1)
        queries = valid_slots(valid_slots(queries, line.valid_queries), self.others()[1])
        sets = [Buckets(queries, self.keys[:, None, None], queries.new_zeros(queries.shape[:3]))]
        if self.queries is not None:
            every = torch.arange(line.M, device=line.device).expand(line.B, 1, 1, -1)
            sets.append(Buckets(self.queries[:, None, None], valid_slots(every, line.valid_keys)))
        return tuple(_of_heads(each, heads) for each in sets)


def _of_heads(buckets: Buckets, heads: int) -> Buckets:
    """The buckets of one head for all heads."""
    queries, keys = (x.expand(-1, heads, -1, -1) for x in (buckets.queries, buckets.keys))
    bucket = None if buckets.bucket is None else buckets.bucket.expand(-1, heads, -1)
    return Buckets(queries, keys, bucket)


def _absent(tokens: Int64[Tensor, "B S"] | None, count: int) -> Bool[Tensor, "B count"] | None:
    """The tokens, among `count`, that are not listed."""
    if tokens is None:
        return None
    every = torch.ones(len(tokens), count + 1, dtype=torch.bool, device=tokens.device)
    return every.scatter(1, tokens, False)[:, :count]


@dataclass(frozen=True)
class Keep(Bucketed):
    """Attention to and from some tokens of each item, by their valid index: sinks or global tokens.

    Args:
        first: tokens at the start of each item.
        last: tokens at its end.
        every: also each token whose rank is a multiple of this. 0: none.
        sides: "both": the kept tokens see all keys, too; "columns": they see what other queries see.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 300, 4)
    >>> sq.attention(q, k, v, method="local:window=20+keep:first").shape
    torch.Size([1, 2, 300, 4])
    """

    first: int = whole(1, clamped=True, flag=True)
    last: int = whole(0, clamped=True, flag=True)
    every: int = whole(0)
    sides: str = choice("both", "columns")

    name: ClassVar[str] = "keep"
    pairs_once: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        family="window",
        causal="strict",
        cross=False,
        cached=True,
        window=True,
        order_free=False,
        positional=True,
        from_start=True,
        exact_limit={"first": "N"},
        example={"first": 2, "last": 1},
        complexity="O((N + M)·S·D) time and O(N + S) memory with S kept tokens",
        source="Xiao et al. 2024 (sinks); Beltagy et al. 2020 (global tokens)",
        zeroes_padding=True,  # it is in no block
        skips_padding=True,
    )

    def check(self) -> None:
        """Raise ValueError if no token is kept."""
        if self.first == self.last == self.every == 0:
            raise ValueError(f"{self.name!r}: first=0, last=0 and every=0 keep no token; give one")

    def describe(self) -> Traits:
        """The traits: `last` excludes strict causality, and `every` makes the time quadratic."""
        traits = replace(type(self).traits, subquadratic=self.every == 0)
        return replace(traits, causal="values-only") if self.last > 0 else traits

    def kept(self, line: ValidPositions) -> KeptPositions:
        """The kept tokens of a call."""
        ranks = ValidIndex.from_mask(line.valid_keys, line.B, line.M, line.device)
        kept_slots = ranks.ends(self.first, self.last, 1)
        if self.every > 0:
            multiples = torch.arange(0, line.M, self.every, device=line.device).expand(line.B, 1, -1)
            kept_slots = kept_slots | ranks.at(multiples)
        keys = kept_slots.tokens[:, 0]
        return KeptPositions(keys, _as_queries(keys, line) if self.sides == "both" else None, line)

    @property
    def prepare_step(self) -> PrepareStep | None:
        """The preparation of exact attention to the kept tokens, or to all keys if the query is one of them."""
        return StepByPosition(self)

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet."""
        return self.kept(ValidPositions.from_mask(call.mask, query, key)).meetings(query.shape[1])


def _as_queries(keys: Int64[Tensor, "B S"], line: ValidPositions) -> Int64[Tensor, "B S"]:
    """The queries at the positions of these keys; an empty slot if there is none, or it is padding."""
    start = line.mask.positions(torch.zeros(1, 1, dtype=torch.int64, device=line.device))
    number = keys - start
    present = (keys < line.M) & (number >= 0) & (number < line.N)
    return valid_slots(torch.where(present, number, line.N)[:, None, None], line.valid_queries)[:, 0, 0]
