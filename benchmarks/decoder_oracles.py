"""Causal by halves beside oracles that know which keys are best, in a decoder: perplexity and next tokens.

    python benchmarks/decoder_oracles.py [--data FOLDER] [--lengths "4096 16384"] [--passages 2] [--out FILE.md]

FOLDER holds gutenberg/; the default is the environment variable SUBQUAD_DATA. The oracles are written plainly: they
compute all logits, a chunk of queries at a time, keep some, and drop the others.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import decoder_passages
import sheet
import torch
from decoder_passages import HEAD, LAYERS, MODEL, error_texts, next_token_texts
from decoder_rules import ClusteredByRule
from torch import Tensor

from subquad.kernels.tokens.heads import repeat_heads
from subquad.methods import ClusteredTail, Full, Method
from subquad.methods.clustered_tail import OF_RECTANGLE, by_length
from subquad.methods.core.halves import LAST, default_block
from subquad.methods.core.method import Call, Partial, whole
from subquad.tools.models.pretrained import load

LENGTHS = (4096, 8192, 16384)
BLOCK = default_block(torch.float32)
CHUNK = 256  # queries at a time, whole groups of them
GROUP = 64  # queries that share their blocks, and keys of a block

ABOUT = """\
SmolLM2-135M-Instruct, every layer, beside exact attention; mean over {passages} of each length, and beyond 8,192 \
tokens with YaRN.
KL is that of next-token distributions, exact ‖ method, in nats.
Clusters are those of the n queries of a block, and top keys those of a rectangle of m keys.
A window holds the query itself and the 511 keys before it; the best keys and blocks of an oracle lie before the window.
The best blocks of 64 keys are those with the most weight of 64 queries together."""

ERRORS = """\
Error ‖out − exact‖ / ‖exact‖ of the attention in layers {layers}, mean of {passages}, and mean of layers.
The oracle of equal exact keys has the same blocks on the diagonal and the same exact last rows as `clustered-tail`, \
and of the earlier keys each query's own best ones, as many as `clustered-tail` has top keys for it in all rectangles \
together. It drops the others."""


@dataclass(frozen=True)
class Oracle(Method):
    """Attention to the keys that `chosen` names, from all logits of some queries at a time; for whole prompts."""

    name: ClassVar[str] = "oracle"
    traits: ClassVar = replace(Full.traits, exact_limit="an oracle of the benchmarks", lse=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
        position, out = torch.arange(query.shape[2]), torch.empty_like(query)
        for rows in position.split(CHUNK):
            keys = position[: int(rows[-1]) + 1]
            logits = query[:, :, rows] @ key[:, :, keys].mT * call.scale
            logits = logits.masked_fill(keys > rows[:, None], -torch.inf)
            allowed = self.chosen(logits, rows[:, None], keys)
            out[:, :, rows] = logits.masked_fill_(~allowed, -torch.inf).softmax(-1) @ value[:, :, keys]
        return out, None

    def chosen(self, logits: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        """The keys of each query: bools, up to expansion as `logits` (B,H,n,m), which are −∞ for later keys."""
        raise NotImplementedError


@dataclass(frozen=True)
class WindowAndFirst(Oracle):
    """A window and the first token."""

    window: int = whole(512)

    name: ClassVar[str] = "window-and-first"

    def chosen(self, logits: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        return (keys > rows - self.window) | (keys == 0)


@dataclass(frozen=True)
class WindowAndBest(Oracle):
    """A window, and each query's own best keys before it."""

    window: int = whole(512)
    best: int = whole(256)

    name: ClassVar[str] = "window-and-best"

    def chosen(self, logits: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        near = keys > rows - self.window
        return near | best_of(logits.masked_fill(near, -torch.inf), self.best)


@dataclass(frozen=True)
class WindowAndBlocks(Oracle):
    """A window, and for each group of queries the blocks of keys before it that have most of their weight."""

    window: int = whole(512)
    best: int = whole(16)

    name: ClassVar[str] = "window-and-blocks"

    def chosen(self, logits: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        near = keys > rows - self.window
        weights = logits.softmax(-1).masked_fill(near, 0.0)
        pad = -len(keys) % GROUP
        weights = torch.nn.functional.pad(weights, (0, pad, 0, -len(rows) % GROUP))
        mass = weights.unflatten(3, (-1, GROUP)).unflatten(2, (-1, GROUP)).sum((3, 5))
        blocks = best_of(mass.masked_fill(mass == 0, -torch.inf), self.best)
        every = blocks.repeat_interleave(GROUP, 2).repeat_interleave(GROUP, 3)
        return near | every[:, :, : len(rows), : len(keys)]


@dataclass(frozen=True)
class EqualKeys(Oracle):
    """The exact keys of `clustered-tail` by halves, as many of them, but each query's own best ones."""

    name: ClassVar[str] = "equal-keys"

    def chosen(self, logits: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        near = keys >= rows // BLOCK * BLOCK
        outside = logits.masked_fill(near, -torch.inf)
        chosen = torch.zeros_like(logits, dtype=torch.bool)
        for block in (rows[:, 0] // BLOCK).unique().tolist():
            mine = (rows[:, 0] // BLOCK) == block
            chosen[:, :, mine] = best_of(outside[:, :, mine], top_keys_of(block))
        return near | chosen

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        out, _ = super().attend(query, key, value, call)
        exact, _ = Full().attend(query, key, value, call)
        out[:, :, -LAST:] = exact[:, :, -LAST:]
        return out, None


def best_of(logits: Tensor, count: int) -> Tensor:
    """True for the `count` largest of each row; −∞ is none of them."""
    top = logits.topk(min(count, logits.shape[-1]), dim=-1, sorted=False)
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, top.indices, top.values > -torch.inf)


def top_keys_of(block: int) -> int:
    """The top keys that the default `clustered-tail` has for the queries of a block, in all of its rectangles."""
    lengths = (2**level * BLOCK for level in range(block.bit_length()) if block >> level & 1)
    return sum(by_length(0, OF_RECTANGLE.topk, keys, None)[0] for keys in lengths)


METHODS: dict[str, Method] = {
    "clustered-tail, n^¾/√32 clusters, m^¾ keys, 32 cells (default)": ClusteredTail(),
    "i-clustered by halves, 2√n, 4√m": ClusteredByRule(),
    "window 512 and the first token": WindowAndFirst(),
    "oracle: window 512 and each query's own 256 best keys": WindowAndBest(best=256),
    "oracle: window 512 and the 16 best blocks of 64 keys": WindowAndBlocks(),
    "oracle of equal exact keys": EqualKeys(),
}


def main(
    lengths: tuple[int, ...] = LENGTHS, data: Path = sheet.DATA, passages: int = 2, out: Path | None = None
) -> None:
    """Print the tables, and write them to a file where one is named."""
    number = decoder_passages.count_of(passages)
    parts = [ABOUT.format(passages=number)]
    of_errors = ["## Error", ERRORS.format(layers=LAYERS, passages=number)]
    for length in lengths:
        pretrained = load(MODEL).reaching(length)
        chosen = decoder_passages.passages(pretrained, data, length, passages)
        tokens = [decoder_passages.next_tokens(pretrained, passage, METHODS) for passage in chosen]
        rows = [[name, *next_token_texts([each[name] for each in tokens])] for name in tokens[0]]
        parts += [f"## {length:,} tokens", sheet.table(["method", *HEAD], rows)]
        errors = [decoder_passages.errors(pretrained, passage, METHODS) for passage in chosen]
        rows = [[name, *error_texts([each[name] for each in errors])] for name in METHODS]
        head = ["method", *(f"layer {layer}" for layer in LAYERS), "mean"]
        of_errors += [f"### {length:,} tokens", sheet.table(head, rows)]
    sheet.publish("Causal by halves and oracles", [*parts, *of_errors], out)


if __name__ == "__main__":
    sheet.run(main)
