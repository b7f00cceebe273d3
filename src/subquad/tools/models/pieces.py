"""A stream of passages out of documents of any size, tokenised one by one; some are held out."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from subquad.core.errors import InputError
from subquad.tools.models.passages import SHORTEST
from subquad.tools.models.pretrained import Pretrained

CHARACTERS = 6  # of a piece, for each token of a passage: more than most tokens have


@dataclass(frozen=True)
class Pieces:
    """Spans of documents, (document, first character, one past the last), in the order in which they are read."""

    documents: Sequence[str]
    train: list[tuple[int, int, int]]
    held_out: list[tuple[int, int, int]]

    def passage(self, pretrained: Pretrained, span: tuple[int, int, int], length: int) -> list[int]:
        """The tokens of a span, special ones included, at most `length`."""
        document, start, end = span
        return pretrained.wrap(pretrained.content_ids(self.documents[document][start:end]), length)

    def order(self, step: int, batch: int, seed: int) -> list[tuple[int, int, int]]:
        """The spans that step number `step` reads: each round over the pieces is in an order of its own."""
        chosen = []
        for at in range(step * batch, (step + 1) * batch):
            lap, index = divmod(at, len(self.train))
            chosen.append(self.train[_shuffled(len(self.train), seed + lap)[index]])
        return chosen


def cut(documents: Sequence[str], length: int, held_out: int, seed: int) -> Pieces:
    """Cut documents into spans of some `length` tokens each, and keep `held_out` of them apart, drawn by the seed.

    At most a quarter is held out.

    Raises:
        InputError: there are fewer than four spans that are long enough.
    """
    if length < SHORTEST:
        raise InputError(f"max-length {length} is too short: passages have {SHORTEST} tokens or more")
    size, least = CHARACTERS * length, CHARACTERS * SHORTEST
    spans = [
        (number, start, min(start + size, len(document)))
        for number, document in enumerate(documents)
        for start in range(0, len(document), size)
        if min(size, len(document) - start) >= least
    ]
    if len(spans) < 4:
        raise InputError(
            f"the text is too short: it makes {len(spans)} passages of at most {length} tokens; fitting needs 4 or more"
        )
    mixed = [spans[i] for i in _shuffled(len(spans), seed)]
    apart = min(held_out, len(spans) // 4)
    return Pieces(documents, mixed[apart:], mixed[:apart])


def _shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
