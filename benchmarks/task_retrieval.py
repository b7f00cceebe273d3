"""Retrieval on long documents: which document is a sentence from?

A document is a part of a novel or of a speech, of exactly the length in tokens. Its queries are of two kinds: sentences
that it has, so that a short part of it answers the query; and sentences that were taken out of it before it was
embedded, so that only what it is about can lead to it.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from task_cells import BEST, CHUNKED, EXACT, FIRST, MEAN, Cell, Figures, attention, compared, interval
from torch import Tensor

from subquad.core.errors import InputError
from subquad.tools.data.documents import read_archive
from subquad.tools.data.texts import read_text
from subquad.tools.models.pretrained import Pretrained
from subquad.tools.runs.jobs import Progress

NOVELS = ("Great-Expectations_1400.txt", "Moby-Dick--Or-The-Whale_2701.txt")
WORDS = range(12, 41)  # of a query
MARGIN = 0.02  # of a novel at either end, its front matter and its end, is not read
TOP = 10
CHUNKS = "Chunks are equal parts of a text of at most 512 tokens, in the model's own positions."
KINDS = {"kept": "Sentences that the document has", "removed": "Sentences that were taken out of the document"}


@dataclass(frozen=True)
class Source:
    """A text as sentences, and the content tokens of each."""

    sentences: list[str]
    tokens: list[list[int]]


@dataclass(frozen=True)
class Document:
    """Content tokens of a document, and as many sentences that it has as were taken out of it."""

    tokens: list[int]
    kept: list[str]
    removed: list[str]


def sources(pretrained: Pretrained, data: Path) -> list[Source]:
    """The novels and the speeches."""
    novels = [_plain(read_text(data / "gutenberg" / name)) for name in NOVELS]
    inner = [novel[int(MARGIN * len(novel)) : int((1 - MARGIN) * len(novel))] for novel in novels]
    speeches = map(_plain, read_archive(data / "state_union" / "state_union.zip").values())
    return [source_of(pretrained, text) for text in (*inner, *speeches)]


def source_of(pretrained: Pretrained, text: str) -> Source:
    """The sentences of a text without line breaks."""
    sentences = [sentence for sentence in re.split(r"(?<=[.!?]) ", text) if sentence]
    return Source(sentences, pretrained.tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"])


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def documents(
    pretrained: Pretrained, texts: Sequence[Source], length: int, count: int, queries: int, seed: int
) -> list[Document]:
    """`count` documents of `length` tokens, special ones included, with `queries` sentences of each kind.

    Raises:
        InputError: the texts have fewer such documents.
    """
    content = length - len(pretrained.wrap([], length))
    draw = random.Random(f"{seed}/{length}")
    candidates = [document for text in texts for document in _cut(text, content, queries, draw)]
    if len(candidates) < count:
        raise InputError(
            f"the texts have {len(candidates):,} documents of {length:,} tokens with {2 * queries} sentences for "
            f"queries, and {count:,} are asked for; give fewer --documents or --queries, or shorter --lengths"
        )
    return draw.sample(candidates, count)


def _cut(text: Source, content: int, queries: int, draw: random.Random) -> Iterator[Document]:
    """The documents of one text, one after the other."""
    sentences, ids, start = text.sentences, text.tokens, 0
    while start < len(sentences):
        inside, size = start, 0  # sentences that the document has whole, even when none is taken out
        while inside < len(sentences) and size + len(ids[inside]) <= content:
            size += len(ids[inside])
            inside += 1
        candidates = [at for at in range(start, inside) if len(sentences[at].split()) in WORDS]
        end = max(inside, start + 1)
        if len(candidates) >= 2 * queries:
            chosen = draw.sample(candidates, 2 * queries)
            removed = set(chosen[queries:])
            size -= sum(len(ids[at]) for at in removed)
            while end < len(sentences) and size < content:
                size += len(ids[end])
                end += 1
            if size >= content:
                tokens = [token for at in range(start, end) if at not in removed for token in ids[at]]
                kept, removed_texts = ([sentences[at] for at in part] for part in (chosen[:queries], chosen[queries:]))
                yield Document(tokens[:content], kept, removed_texts)
        start = end


@dataclass(frozen=True)
class Retrieval:
    """The task at one length; queries and chunks go through the model with its own positions."""

    pretrained: Pretrained
    methods: Sequence[str]
    length: int
    documents: Sequence[Document]
    name: str = "retrieval"

    @property
    def rows(self) -> list[str]:
        """Exact attention, what needs no longer positions if documents are longer than the model's, the methods."""
        chunked = CHUNKED if self.length > model_length(self.pretrained) else ()
        return [EXACT, *chunked, *self.methods]

    def inputs(self) -> object:
        """The documents."""
        return [self.length, [[each.tokens, each.kept, each.removed] for each in self.documents]]

    def measure(self, row: str, progress: Progress) -> Cell:
        """The cosine of each query to each document, or to its best chunk."""
        scores = self._queries @ self._vectors(row, progress).flatten(0, 1).T
        best = scores.unflatten(1, (len(self.documents), -1)).amax(-1)
        return [[round(score, 6) for score in of_query] for of_query in best.tolist()]

    @cached_property
    def _queries(self) -> Tensor:
        """Unit vectors, document by document; of each, those of the sentences that it has are the first."""
        limit = model_length(self.pretrained)
        sentences = [sentence for each in self.documents for sentence in (*each.kept, *each.removed)]
        wrapped = [self.pretrained.wrap(self.pretrained.content_ids(sentence), limit) for sentence in sentences]
        return F.normalize(self.pretrained.embed_all(wrapped), dim=-1)

    def _vectors(self, row: str, progress: Progress) -> Tensor:
        """The unit vector of each document, or one for each chunk under `BEST`: (documents, chunks, width)."""
        if row in (MEAN, BEST):
            return self._chunks if row == BEST else F.normalize(self._chunks.mean(1, keepdim=True), dim=-1)
        length = model_length(self.pretrained) if row == FIRST else self.length
        stretched, vectors = self.pretrained.reaching(length), []
        with attention(stretched, EXACT if row == FIRST else row):
            for number, document in enumerate(self.documents):
                progress("documents", number, len(self.documents))
                vectors.append(stretched.embed([stretched.wrap(document.tokens, length)]))
        return F.normalize(torch.stack(vectors), dim=-1)

    @cached_property
    def _chunks(self) -> Tensor:
        return torch.stack([chunk_vectors(self.pretrained, document.tokens) for document in self.documents])

    def about(self) -> str:
        """Describe the documents and queries that were measured, one sentence a line."""
        count = len(self.documents)
        lines = [
            f"{count} documents of {self.length:,} tokens, parts of novels and speeches, and of each "
            f"{len(self.documents[0].kept)} sentences that it has and {len(self.documents[0].removed)} that were taken "
            f"out of it, of {WORDS[0]} to {WORDS[-1]} words.",
            "A query's own document alone is relevant; resamples take documents with all their queries.",
            *([CHUNKS] if self.length > model_length(self.pretrained) else []),
            "Same top 10: of the ten documents that exact attention ranks first, the share that the row has too.",
        ]
        return "\n".join(lines)

    def figures(self, cell: Cell, exact: Cell) -> dict[str, Figures]:
        """The metrics of each kind of query, and the share of the best documents that are exact attention's."""
        return {title: self._figures(kind, cell, exact) for kind, title in KINDS.items()}

    def _figures(self, kind: str, cell: Cell, exact: Cell) -> Figures:
        count, its, found = len(self.documents), self.metrics(exact, kind), {}
        for name, values in self.metrics(cell, kind).items():
            found |= compared(name, values, its[name], count)
        return found | {f"same top {TOP}": interval(self._shared(cell, exact, kind), count)}

    def metrics(self, scores: Cell, kind: str) -> Mapping[str, list[float]]:
        """Recall@1, recall@10 and nDCG@10 of each query of a kind; its document alone is relevant."""
        ranks = torch.tensor([self._rank(scores, query) for query in self._numbers(kind)])
        gains = torch.where(ranks <= TOP, 1 / (ranks + 1).log2(), 0.0)
        return {
            "recall@1": (ranks == 1).double().tolist(),
            f"recall@{TOP}": (ranks <= TOP).double().tolist(),
            f"nDCG@{TOP}": gains.double().tolist(),
        }

    def _rank(self, scores: Cell, query: int) -> int:
        """The rank of the query's own document, 1 for the best; ties count against it."""
        return sum(score >= scores[query][query // self._each] for score in scores[query])

    def _shared(self, scores: Cell, exact: Cell, kind: str) -> list[float]:
        """The share of each query's ten best documents that are among the ten of exact attention."""
        return [len(top(scores[at]) & top(exact[at])) / len(top(exact[at])) for at in self._numbers(kind)]

    @property
    def _each(self) -> int:
        return len(self.documents[0].kept) + len(self.documents[0].removed)

    def _numbers(self, kind: str) -> list[int]:
        """The numbers of the queries of a kind."""
        kept = len(self.documents[0].kept)
        total = self._each * len(self.documents)
        return [at for at in range(total) if (at % self._each < kept) == (kind == "kept")]


def top(scores: Sequence[float]) -> set[int]:
    """The numbers of the best ten documents."""
    return set(torch.tensor(scores).topk(min(TOP, len(scores))).indices.tolist())


def model_length(pretrained: Pretrained) -> int:
    """Tokens of an input in the model's own positions, at most 512."""
    return pretrained.length(None, "--lengths")


def chunk_vectors(pretrained: Pretrained, tokens: Sequence[int]) -> Tensor:
    """Unit vectors (chunks, width) of a whole text, cut into as few inputs of the model's own length as can hold it.

    They are equally long: a short one at the end would count as much as the others in their mean.
    """
    limit = model_length(pretrained)
    count = -(-len(tokens) // (limit - len(pretrained.wrap([], limit))))
    edges = [len(tokens) * number // count for number in range(count + 1)]
    chunks = [pretrained.wrap(tokens[start:end], limit) for start, end in pairwise(edges)]
    return F.normalize(pretrained.embed_all(chunks), dim=-1)
