"""Cut documents into what a model reads: passages, queries, and stretches of an exact length."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from subquad.core.errors import InputError
from subquad.tools.data.texts import STANDARD_LIBRARY
from subquad.tools.models.pretrained import Pretrained

SHORTEST = 16  # content tokens of a passage
FEWEST_PASSAGES = 5  # of a length to plan for: two for losses, and three to verify on


@dataclass(frozen=True)
class TokenizedText:
    """Token ids, special tokens included, of what is read."""

    passages: list[list[int]]
    queries: list[list[int]]
    tokens: list[int]  # the tokens of all documents in a row, without special tokens
    document_lengths: list[int]

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.document_lengths)

    def sequences(self, pretrained: Pretrained, length: int, count: int) -> list[list[int]]:
        """`count` items of exactly `length` tokens, evenly spread over the text (which repeats where it is short)."""
        content = length - len(pretrained.wrap([], length))
        tokens = self.tokens * (1 + content // len(self.tokens))
        last = len(tokens) - content
        starts = [last * i // max(count - 1, 1) for i in range(count)]
        return [pretrained.wrap(tokens[start : start + content], length) for start in starts]

    def batches(
        self, pretrained: Pretrained, length: int, count: int | None, size: int, seed: int
    ) -> list[list[list[int]]]:
        """`count` batches of `size` items of at most `length` tokens, with the lengths that the documents have.

        Documents are cut every `length` tokens, and the pieces are put into batches in an order drawn by the seed. A
        piece is used again only after all others. Without a count, there are as many batches as use no piece twice.

        Raises:
            InputError: there are fewer pieces than a batch has items.
        """
        pieces = self._pieces(pretrained, length)
        if len(pieces) < size:
            raise InputError(
                f"--batch {size} is more than the {len(pieces)} pieces of at most {length:,} tokens that the text makes"
            )
        draw, whole = random.Random(seed), len(pieces) // size
        count = whole if count is None else count
        orders = [draw.sample(pieces, len(pieces)) for _ in range(-(-count // whole))]
        drawn = [order[at : at + size] for order in orders for at in range(0, whole * size, size)]
        return [[pretrained.wrap(piece, length) for piece in batch] for batch in drawn[:count]]

    def fills(self, pretrained: Pretrained, length: int, size: int) -> bool:
        """True if a document is as long as `length` tokens, and batches of `size` items can be made of the pieces."""
        longest = max(self.document_lengths) + len(pretrained.wrap([], length))
        return longest >= length and len(self._pieces(pretrained, length)) >= size

    def _pieces(self, pretrained: Pretrained, length: int) -> list[list[int]]:
        ends = list(accumulate(self.document_lengths))
        documents = [self.tokens[end - n : end] for n, end in zip(self.document_lengths, ends, strict=True)]
        return _pieces(documents, length - len(pretrained.wrap([], length)))

    def metadata(self, paths: Sequence[Path]) -> dict[str, Any]:
        """The description of the text in reports: from these paths, or from the standard library."""
        return {
            "source": ", ".join(map(str, paths)) or STANDARD_LIBRARY,
            "documents": self.documents,
            "passages": len(self.passages),
            "queries": len(self.queries),
            "tokens": len(self.tokens),
            "tokens_a_passage": sum(map(len, self.passages)) / len(self.passages),
        }


def read(pretrained: Pretrained, documents: Sequence[str], length: int, passages: int, seed: int) -> TokenizedText:
    """Cut each document into passages of at most `length` tokens and keep `passages` of them, drawn by the seed.

    The queries, two a passage where it has as many sentences, are sentences of the passages of six words or more.
    """
    content = length - len(pretrained.wrap([], length))
    if content < SHORTEST:
        room = "1 token" if content == 1 else f"{max(content, 0)} tokens"
        raise InputError(
            f"a length of {length} leaves {room} besides the special ones; passages have {SHORTEST} or more"
        )
    ids = [pretrained.content_ids(document) for document in documents]
    chunks = _pieces(ids, content)
    if not chunks:
        longest = max(map(len, ids), default=0)
        raise InputError(
            f"the text is too short: a passage has at least {SHORTEST} tokens, but the longest document has {longest}"
        )
    draw = random.Random(seed)
    chosen = draw.sample(chunks, min(passages, len(chunks)))
    queries = [query for chunk in chosen for query in _queries(pretrained, chunk, draw)]
    return TokenizedText(
        passages=[pretrained.wrap(chunk, length) for chunk in chosen],
        queries=[pretrained.wrap(query, length) for query in queries],
        tokens=[token for doc in ids for token in doc],
        document_lengths=[len(doc) for doc in ids],
    )


def _pieces(documents: Sequence[list[int]], content: int) -> list[list[int]]:
    """Documents cut every `content` tokens, without pieces that are too short."""
    pieces = [doc[at : at + content] for doc in documents for at in range(0, len(doc), content)]
    return [piece for piece in pieces if len(piece) >= SHORTEST]


def _queries(pretrained: Pretrained, chunk: list[int], draw: random.Random) -> list[list[int]]:
    text = pretrained.tokenizer.decode(chunk)
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", text) if 6 <= len(s.split()) <= 40]
    if not sentences:
        return [chunk[: max(1, len(chunk) // 4)]]
    return [pretrained.content_ids(s) for s in draw.sample(sentences, min(2, len(sentences)))]
