"""The worth of positions past an encoder's own: retrieval of long documents, with exact attention.

A question is a sentence that was taken out of a document (the inverse cloze task: Lee et al., "Latent Retrieval for
Weakly Supervised Open Domain Question Answering", 2019). Documents are consecutive passages of novels and speeches, and
they are ranked by the cosine of their embedding to the question's:

    start          the first tokens of the document, as many as the encoder has positions
    mean of chunks mean of the embeddings of chunks of that length
    best chunk     the chunk that is nearest to the question
    interpolate    the whole document, its positions interpolated
    tile           the whole document, its positions repeated

Intervals are bootstrapped over documents. The encoder is that of the `demo` extra.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import sheet
import torch
import typer
from speeches import speeches
from torch import Tensor
from torch.nn.functional import normalize

from subquad import hf
from subquad.tools.models.pretrained import Pretrained, load

WORDS = 8, 40  # of a question
TIMES = 2000  # resamples of a bootstrap
WAYS = ("start", "mean of chunks", "best chunk", "interpolate", "tile")


@dataclass(frozen=True)
class LongDocument:
    """The tokens of a document without those of its questions, and the questions."""

    tokens: list[int]
    questions: list[str]


def texts(data: Path) -> list[str]:
    """Novels and speeches, each kind as one text."""
    novels = [path.read_text("utf-8", errors="replace") for path in sorted((data / "gutenberg").glob("*.txt"))]
    return [*novels, "\n\n".join(speeches(data))]


def documents_of(
    model: Pretrained, sources: Sequence[str], length: int, count: int, questions: int
) -> list[LongDocument]:
    """`count` documents of `length` tokens, special tokens included: as many of each source, evenly spaced in it."""
    content = length - len(model.wrap([], length))
    chosen = []
    for number, text in enumerate(sources):
        wanted = len(range(number, count, len(sources)))
        sentences = [" ".join(sentence.split()) for sentence in re.split(r"(?<=[.!?])\s+", text)]
        parts = list(_parts(model, sentences, content + 2 * WORDS[1] * questions))
        if len(parts) < wanted:
            raise SystemExit(
                f"a text makes {len(parts)} documents of {length:,} tokens, not {wanted}; give --documents"
            )
        chosen += [_document(parts[len(parts) * i // wanted], content, questions) for i in range(wanted)]
    return chosen


def _parts(model: Pretrained, sentences: Sequence[str], tokens: int) -> Iterator[list[tuple[str, list[int]]]]:
    """Consecutive sentences with their tokens, in parts of at least so many tokens."""
    part: list[tuple[str, list[int]]] = []
    for sentence in sentences:
        part.append((sentence, model.content_ids(sentence)))
        if sum(len(ids) for _, ids in part) >= tokens:
            yield part
            part = []


def _document(part: Sequence[tuple[str, list[int]]], content: int, questions: int) -> LongDocument:
    """A document of consecutive sentences, without some of them, evenly spaced, that are the questions."""
    able = [i for i, (sentence, _) in enumerate(part) if WORDS[0] <= len(sentence.split()) <= WORDS[1]]
    able = [i for i in able if sum(len(ids) for _, ids in part[: i + 1]) < content]
    asked = {able[(2 * n + 1) * len(able) // (2 * questions)] for n in range(questions)}
    tokens = [token for i, (_, ids) in enumerate(part) if i not in asked for token in ids]
    return LongDocument(tokens[:content], [part[i][0] for i in sorted(asked)])


def scores(model: Pretrained, chosen: Sequence[LongDocument], length: int, way: str, asked: Tensor) -> Tensor:
    """The score of every document for every question (Q,documents), of normalized embeddings of questions (Q,W)."""
    own = model.limit or length
    if way in ("interpolate", "tile"):
        longer = model.with_model(hf.extend_positions(copy.deepcopy(model.model), length, mode=way))
        return asked @ normalize(longer.embed_all([model.wrap(each.tokens, length) for each in chosen])).T
    size = own - len(model.wrap([], own))
    chunks = [[each.tokens[at : at + size] for at in range(0, len(each.tokens), size)] for each in chosen]
    chunks = [each[:1] for each in chunks] if way == "start" else chunks
    vectors = model.embed_all([model.wrap(chunk, own) for each in chunks for chunk in each])
    parts = normalize(vectors).split([len(each) for each in chunks])
    if way == "best chunk":
        return torch.stack([(asked @ part.T).amax(1) for part in parts], 1)
    return asked @ normalize(torch.stack([part.mean(0) for part in parts])).T


def ranks(matrix: Tensor, right: Tensor) -> Tensor:
    """The number of documents before the right one, for each question."""
    return (matrix > matrix.gather(1, right[:, None])).sum(1)


def interval(values: Tensor, right: Tensor) -> tuple[float, float]:
    """95 % of the means of values (Q,) when documents are drawn again, each with its questions."""
    generator = torch.Generator().manual_seed(0)
    count = int(right.max()) + 1
    sums = torch.zeros(count).index_add_(0, right, values.float())
    sizes = torch.bincount(right, minlength=count).float()
    drawn = torch.randint(count, (TIMES, count), generator=generator)
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def measure(model: Pretrained, chosen: Sequence[LongDocument], length: int) -> list[dict[str, Any]]:
    """Recall of every way to read the documents, and its difference from interpolated positions."""
    asked = [model.wrap(model.content_ids(question), 512) for each in chosen for question in each.questions]
    vectors = normalize(model.embed_all(asked))
    right = torch.tensor([n for n, each in enumerate(chosen) for _ in each.questions])
    found = {way: ranks(scores(model, chosen, length, way, vectors), right) for way in WAYS}
    rows = []
    for way, rank in found.items():
        differs = (rank == 0).float() - (found["interpolate"] == 0).float()
        rows.append(
            {
                "length": length,
                "way": way,
                "recall@1": float((rank == 0).float().mean()),
                "interval": interval((rank == 0).float(), right),
                "recall@10": float((rank < 10).float().mean()),
                "ndcg@10": float(((rank < 10) / (rank + 2).log2()).mean()),
                "difference": float(differs.mean()),
                "difference_interval": interval(differs, right),
            }
        )
    return rows


def short_cosines(model: Pretrained, chosen: Sequence[LongDocument], length: int) -> dict[str, float]:
    """The lowest cosine of a short text's embedding to the original model's, by mode."""
    items = [model.wrap(each.tokens[:size], size) for each in chosen for size in (16, 64, 512)]
    want = model.embed_all(items)
    modes = {}
    for mode in ("interpolate", "tile"):
        longer = model.with_model(hf.extend_positions(copy.deepcopy(model.model), length, mode=mode))
        modes[mode] = float(torch.cosine_similarity(longer.embed_all(items), want).min())
    return modes


HEAD = ("tokens", "document as", "recall@1", "95 %", "recall@10", "nDCG@10", "recall@1 less interpolated", "95 %")
ABOUT = """\
{count} documents of the length, {questions} questions of each, which are sentences that were taken out of it; exact \
attention throughout.
A document is ranked by the cosine of its embedding to the question's.
Intervals: bootstrapped over documents.

A text of 16, 64 or 512 tokens in the extended model: cosine to the original model at least {short}."""


def table_rows(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            f"{row['length']:,}",
            row["way"],
            f"{row['recall@1']:.3f}",
            "{:.3f} to {:.3f}".format(*row["interval"]),
            f"{row['recall@10']:.3f}",
            f"{row['ndcg@10']:.3f}",
            f"{row['difference']:+.3f}",
            "{:+.3f} to {:+.3f}".format(*row["difference_interval"]),
        ]
        for row in rows
    ]


def main(
    folder: Annotated[Path, typer.Argument()] = sheet.DATA,
    lengths: tuple[int, ...] = (2048,),
    documents: Annotated[int, typer.Option(help="at each length")] = 100,
    questions: int = 3,
    out: Path | None = None,
) -> None:
    """Measure, and print or write the table."""
    model, rows, lowest = load(None), [], 1.0
    for length in lengths:
        chosen = documents_of(model, texts(folder), length, documents, questions)
        rows += measure(model, chosen, length)
        lowest = min(lowest, *short_cosines(model, chosen[:10], length).values())
    about = ABOUT.format(count=documents, questions=questions, short=f"{lowest:.6f}")
    sheet.publish("Positions past an encoder's own", [about, sheet.table(HEAD, table_rows(rows))], out)


if __name__ == "__main__":
    sheet.run(main)
