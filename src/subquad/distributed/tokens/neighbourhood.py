"""Blocks of real tokens that cross ranks: what a rank sees of the tokens near its own, and what it leaves to others.

Blocks count the real tokens of an item on all ranks. A rank's *line* holds the blocks of its own tokens, the block
before them and the block behind:

    ranks           rank 0           |      rank 1      |        rank 2
    real tokens     0 1 2 3 4 5 6 7 8|9 10 11 12 13 14  |15 16 17 18 …
    blocks of 4     0 0 0 0 1 1 1 1 2 2  2  2  3  3  3   3  4  4  4
    line of rank 1          [ block 1 | block 2 | block 3 | block 4 ]       begin = 4, end = 20

Tokens before and after a line are represented by sums, which each rank makes for each other one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.distributed.collectives import exchange
from subquad.distributed.token_split import TokenSplit
from subquad.distributed.tokens.global_index import GlobalIndex
from subquad.kernels.tokens.positions import front_first
from subquad.kernels.tokens.slots import rows_at

_NOTHING = (None, None, None)


@dataclass(frozen=True)
class Neighbourhood:
    """The lines of all ranks.

    Attributes:
        side: the tokens of this rank.
        split: the split of the tokens over the ranks.
        block: tokens of a block, of each item; `most`: of any.
    """

    side: GlobalIndex
    split: TokenSplit
    block: Int64[Tensor, "B"]
    most: int

    @property
    def near(self) -> int:
        """The largest number of other ranks' tokens that a line has on each side."""
        return 2 * self.most - 1

    @property
    def first(self) -> Int64[Tensor, "_R B"]:
        """The number of each rank's first token."""
        return self.side.counts.cumsum(0) - self.side.counts

    @property
    def begin(self) -> Int64[Tensor, "_R B"]:
        """The first token of each rank's line; below 0 where there is no block before its own."""
        return (self.first // self.block - 1) * self.block

    @property
    def end(self) -> Int64[Tensor, "_R B"]:
        """The first number behind each rank's line."""
        return ((self.first + self.side.counts - 1) // self.block + 2) * self.block

    @property
    def length(self) -> int:
        """Tokens that this rank's line has room for."""
        return (-(-(self.split.lengths[self.split.rank] + self.most - 1) // self.most) + 2) * self.most

    def edge(self, behind: bool) -> Int64[Tensor, "B W"]:
        """The last real tokens of this rank, or the first, which others may need; N where there are not as many."""
        token_counts, N = self.side.counts[self.split.rank][:, None], self.side.valid.shape[1]
        number = torch.arange(self.near, device=token_counts.device)
        number = number if behind else token_counts - self.near + number
        present = (number >= 0) & (number < token_counts)
        return torch.where(
            present, front_first(self.side.valid).gather(1, number.clamp(0, N - 1).expand_as(present)), N
        )

    def numbers_of_edge(self, rank: int, behind: bool) -> tuple[Int64[Tensor, "B W"], Bool[Tensor, "B W"]]:
        """The item's tokens at the edge of a rank, and a bool that marks the places that are filled."""
        token_counts, first = self.side.counts[rank][:, None], self.first[rank][:, None]
        number = torch.arange(self.near, device=token_counts.device)
        number = number if behind else token_counts - self.near + number
        return first + number, (number >= 0) & (number < token_counts)

    def slots(self) -> Int64[Tensor, "B L"]:
        """For each place of this rank's line the token: its own, 0 to N − 1, then the edges of all ranks by turns."""
        rank, B = self.split.rank, len(self.block)
        begin, end = self.begin[rank][:, None], self.end[rank][:, None]
        numbers, present = [self.side.index.expand(B, -1)], [self.side.valid]
        for other in range(self.split.ranks):
            number, filled = self.numbers_of_edge(other, behind=other > rank)
            numbers.append(number)
            present.append(filled & (number >= begin) & (number < end) & (other != rank))
        number, filled = torch.cat(numbers, dim=1), torch.cat(present, dim=1)
        slot = torch.where(filled, number - begin, self.length)
        token = torch.arange(number.shape[1], device=number.device).expand_as(number)
        table = torch.full((B, self.length + 1), number.shape[1], device=number.device)
        return table.scatter(1, slot, token)[:, : self.length]

    def line_positions(self) -> Int64[Tensor, "B N"]:
        """The positions of this rank's tokens in its line; 0 for padding."""
        position = self.side.index - self.begin[self.split.rank][:, None]
        return torch.where(self.side.valid, position, 0)

    def numbers(self) -> Int64[Tensor, "B L"]:
        """The item's token at each place of this rank's line."""
        return self.begin[self.split.rank][:, None] + torch.arange(self.length, device=self.block.device)

    def sums_for_others(
        self,
        key: Float[Tensor, "B G N D"],
        value: Float[Tensor, "B G N E"],
        summed: Callable[[Tensor, Tensor, Tensor], Tensor],
        merged: Callable[[list[Tensor]], Tensor],
        is_causal: bool,
        valid: Bool[Tensor, "B N"] | None = None,
    ) -> list[Tensor | None]:
        """For each rank the sums of this rank's tokens that are not in its line; None where it may not see them.

        `summed` makes sums of the keys and values that a bool shows; `merged` makes one of several.
        `valid` marks the tokens in sums; without it, all real tokens are.
        """
        valid = self.side.valid if valid is None else valid
        rank, counted = self.split.rank, self.side.counts[self.split.rank][:, None]
        number = self.side.index.expand(len(counted), -1)
        local = number - self.first[rank][:, None]
        sums_of: list[Tensor | None] = []
        bulk: dict[bool, Tensor] = {}
        for other in range(self.split.ranks):
            behind = other > rank  # the other rank is behind this one: it sees what is before its line
            if other == rank or (is_causal and not behind):
                sums_of.append(None)
                continue
            if behind not in bulk:  # whatever the other rank's line, these are not in it
                inner = local < counted - self.near if behind else local >= self.near
                bulk[behind] = summed(key, value, valid & inner)
            tokens = self.edge(not behind)
            numbers, filled = self.numbers_of_edge(rank, behind=not behind)
            outside = numbers < self.begin[other][:, None] if behind else numbers >= self.end[other][:, None]
            summed_up = summed(
                rows_at(key, tokens), rows_at(value, tokens), filled & outside & F.pad(valid, (0, 1)).gather(1, tokens)
            )
            sums_of.append(merged([bulk[behind], summed_up]))
        return sums_of

    def exchange(
        self,
        rows: Float[Tensor, "B G N F"],
        ends: Float[Tensor, "B G S F"],
        sums: list[Tensor | None],
        none: Float[Tensor, "B G R X"],
        is_causal: bool,
    ) -> tuple[list[Tensor], Float[Tensor, "B G S F"], list[Tensor | None]]:
        """The edges of each rank, the sum of all ranks' ends, and the sums from each rank; by one exchange.

        `none`, sums of no token, is what a rank has from itself. So every rank's result is a part of the exchange, and
        its backward pass runs on all of them.
        """
        split = self.split
        edges = {behind: rows_at(rows, self.edge(behind)) for behind in (False, True)}
        nothing = torch.zeros_like(edges[True])
        shapes = [tuple(nothing.shape), tuple(ends.shape), tuple(none.shape)]
        sizes = [torch.Size(shape).numel() for shape in shapes]

        def part(other: int) -> Tensor:
            if other == split.rank:
                return torch.cat([x.reshape(-1) for x in (nothing, ends, none)])
            local = sums[other]
            return (
                rows.new_zeros(0)
                if local is None
                else torch.cat([x.reshape(-1) for x in (edges[other < split.rank], ends, local)])
            )

        comes = [not is_causal or other <= split.rank for other in range(split.ranks)]
        received = exchange(
            [part(other) for other in range(split.ranks)], [(sum(sizes) * here,) for here in comes], split.group
        )
        results: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        for each, here in zip(received, comes, strict=True):
            edge, end, left = (x.view(s) for x, s in zip(each.split(sizes), shapes, strict=True)) if here else _NOTHING
            results.append((nothing if edge is None else edge, end, left))
        total = torch.stack([each[1] for each in results if each[1] is not None]).sum(0)
        return [each[0] for each in results], total, [each[2] for each in results]


def are_sinks(number: Int64[Tensor, "#B M"], side: GlobalIndex, sinks: int, causal: bool) -> Bool[Tensor, "B M"]:
    """A bool that marks the numbers of an item's first tokens, and without a causal mask those of its last ones."""
    tokens = side.tokens[:, None]
    first = (number < sinks) & (number >= 0)
    return first.expand(len(tokens), -1) if causal else first | ((number >= tokens - sinks) & (number < tokens))


def ends_present(side: GlobalIndex, sinks: int) -> Bool[Tensor, "B S"]:
    """A bool that marks the tokens of `GlobalIndex.ends` that an item has, each once."""
    number, tokens = torch.arange(sinks, device=side.valid.device), side.tokens[:, None]
    return torch.cat([number < tokens, tokens - sinks + number >= sinks], dim=1)
