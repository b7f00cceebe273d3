"""The parts of causal attention by halves: blocks on the diagonal, and equal rectangles below it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from subquad.kernels.tokens.token_windows import TokenWindows


@dataclass(frozen=True)
class Rectangles:
    """Equal rectangles of queries and keys, each `step` tokens behind the one before."""

    query: int  # the first of the first rectangle
    key: int
    queries: int  # number of queries of each
    keys: int
    step: int = 1
    count: int = 1
    diagonal: bool = False
    key_step: int | None = None  # the step of their keys, if it is another one

    def offsets(self, start: int, device: torch.device) -> int | Int64[Tensor, " R"]:
        """The distance of each rectangle's first query behind its first key, if the first query is at key `start`."""
        first = start + self.query - self.key
        if self.key_step is None or self.key_step == self.step:
            return first
        return first + (self.step - self.key_step) * torch.arange(self.count, device=device)

    def of_queries(self, x: Tensor) -> Tensor:
        """A view of (B,H,N,D) or (B,N) of the queries: (B,H,R,n,D) or (B,R,n) for R rectangles."""
        return self.query_windows.view(x)

    def of_keys(self, x: Tensor) -> Tensor:
        """A view of (B,G,M,D) or (B,M) of the keys: (B,G,R,m,D) or (B,R,m)."""
        return TokenWindows(
            self.key, self.keys, self.step if self.key_step is None else self.key_step, self.count
        ).view(x)

    def in_blocks(self, block: int) -> list[Rectangles]:
        """These pairs in rectangles of at most `block` queries, which begin where the blocks do."""
        if self.diagonal or self.queries <= block:
            return [self]
        blocks, remaining = self.queries // block, self.queries % block
        parts = []
        for number in range(self.count):
            query, key = self.query + number * self.step, self.key + number * self.step
            parts.append(Rectangles(query, key, block, self.keys, block, blocks, key_step=0))
            if remaining:
                parts.append(Rectangles(query + blocks * block, key, remaining, self.keys))
        return parts

    @property
    def query_windows(self) -> TokenWindows:
        """The queries of each."""
        return TokenWindows(self.query, self.queries, self.step, self.count)


def rectangles_of(N: int, start: int, block: int) -> Iterator[list[Rectangles]]:
    """The parts of the attention, as rectangles, in groups: the queries of a group are in one part of it at most.

    Query i has the position of key start + i. The groups are the diagonal, the levels, and the keys before `start`.
    """
    whole_blocks, remaining = N // block, N % block  # torch.compile knows no divmod of symbolic lengths
    diagonal = [Rectangles(0, start, block, block, block, whole_blocks, diagonal=True)] if whole_blocks else []
    if remaining:
        at = N - remaining
        diagonal.append(Rectangles(at, start + at, remaining, remaining, diagonal=True))
    yield diagonal
    size = block
    while size < N:
        pairs, remaining = N // (2 * size), N % (2 * size)
        level = [Rectangles(size, start, size, size, 2 * size, pairs)] if pairs else []
        if remaining > size:
            at = N - remaining
            level.append(Rectangles(at + size, start + at, remaining - size, size))
        yield level
        size *= 2
    if start:
        yield [Rectangles(0, 0, N, start)]
