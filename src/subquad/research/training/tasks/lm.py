"""Language modelling of text, byte by byte."""

import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from subquad.core.errors import InputError
from subquad.research.training.byte_tokenizer import byte_tokenizer
from subquad.research.training.corpora import CorpusParts, cut, hold_out, in_bytes, read_corpus
from subquad.research.training.tasks.next_symbol import NextSymbol
from subquad.research.training.tasks.ngrams import ngram_bits
from subquad.research.training.tasks.task import Batch, Metrics, Splits, several
from subquad.research.training.tasks.windows import DrawnWindows, Symbols, Windows, first, with_start

SPACE, LINE = 32, 10
LONGEST_GRAM = 5
COUNTED = 1 << 26  # bytes of training text that the baselines know, which bounds their memory
WORDS = "wikitext"  # corpora with words between spaces, and one more for the end of each line


@dataclass(frozen=True, kw_only=True)
class Lm(NextSymbol):
    """Predict the next byte of text; the metric is bits per byte of held-out text, in which each byte counts once.

    `files` names your own text: any text files, tables or folders. The last part of each document is held out, and its
    share of the document is `held_out`. The first half of this part is for validation, and the second half for the
    test. With ten documents or more, whole documents are held out instead, chosen by the seed. You may also give
    validation and test files.

    Without `files`, the text is the folder `corpus` of the data. Its files valid.txt and test.txt are the validation
    and the test text. If there is no train.txt, as in wikitext-2 here, valid.txt is divided: its last part,
    with the share `held_out`, is the validation text, and the rest is the training text.

    Each window starts with the last byte of the window before, so a model sees at least one byte and at most
    `length` − 1 bytes before the byte that it predicts. For a corpus of words, such as wikitext, the perplexity per
    word is 2^(bits of all bytes / words); each end of a line counts as one more word, and <unk> as five bytes.

    Attributes:
        corpus: folder of the data directory: wikitext-2, tinyshakespeare, gutenberg, …
        files: text files, .jsonl, .csv or .tsv, or folders, in place of a corpus.
        validation_files, test_files: files of the same kinds for validation and for the test figures.
        column: the column of tables with the text.
        length: number of tokens in a window.
        held_out: share of the text that is held out.
        examples: number of windows in the training set; they are sampled as they are read.
        limit: number of bytes of the validation text and of the test text that are used; 0 means all.
        seed: random seed of the sampled windows and of the documents that are held out.
    """

    name: ClassVar[str] = "lm"
    summary: ClassVar[str] = "the next byte of the text in task.corpus, or of your own in task.files; bits per byte"
    summary_of_files: ClassVar[str] = "the next byte of {files}; bits per byte"
    metric: ClassVar[str] = "bits_per_byte"
    needs: ClassVar[str | None] = "wikitext-2"
    pipeline: ClassVar[str | None] = "text-generation"
    symbols: ClassVar[int] = 256
    predicted: ClassVar[int] = 256
    start: ClassVar = {
        "model": {"layers": 4, "heads": 4, "width": 128},
        "training": {"steps": 2000, "batch": 16, "learning_rate": 1e-3, "schedule": "cosine", "warmup": 100},
    }

    corpus: str = "wikitext-2"
    files: tuple[str, ...] | str = ()
    validation_files: tuple[str, ...] | str = ()
    test_files: tuple[str, ...] | str = ()
    column: str = "text"
    held_out: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.held_out < 1.0:
            raise ValueError(f"held_out={self.held_out}, but it must be more than 0 and less than 1")
        if (self.validation_files or self.test_files) and not self.files:
            raise ValueError("validation_files and test_files go with files, the text to learn from; give those, too")

    def splits(self, data: Path | None = None) -> Splits:
        """Windows of the text; `data` is not read where `files` are given."""
        parts = self._parts() if self.files else self._corpus(data)
        return self.windows(*([_symbols(document, self.start_symbol) for document in part] for part in parts))

    @property
    def tokenizer(self) -> Any:
        """Gives the tokens that `encode` gives."""
        pad, start = ("<pad>", self.symbols + 1), ("<start>", self.start_symbol)
        return byte_tokenizer(0, self.length, pad=pad, start=start, padding_side="left")

    def encode(self, texts: Sequence[str]) -> Batch:
        """Texts as `model.generate(**self.encode(texts))` continues them: the start symbol, then bytes in UTF-8.

        Shorter ones are padded on the left.

        Raises:
            TypeError: a single text, not in a list.
        """
        sequences = [[self.start_symbol, *text.encode()] for text in several(texts)]
        longest = max(map(len, sequences), default=0)
        ids = [[self.symbols + 1] * (longest - len(sequence)) + sequence for sequence in sequences]
        mask = [[0] * (longest - len(sequence)) + [1] * len(sequence) for sequence in sequences]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    def decode(self, ids: Int[Tensor, "B N"]) -> list[str]:
        """The texts of what `model.generate` gives, without start symbol and padding; broken letters become �."""
        return [bytes(i for i in row if i < self.predicted).decode(errors="replace") for row in ids.tolist()]

    def score(self, outputs: Any, batch: Batch) -> Tensor:
        """The nats of the predicted bytes, their number, and how many words ended with one of them."""
        ids, labels = batch["input_ids"], batch["labels"]
        return torch.cat([super().score(outputs, batch), words_ended(ids, labels)[:, None]], dim=1)

    def metrics(self, scores: Tensor) -> Metrics:
        """Bits per byte, perplexity per byte, and per word where the corpus has words."""
        nats, count, words = scores.double().sum(0).tolist()
        return self._metrics_of(nats / math.log(2) / count, count, words)

    def baselines(self, splits: Splits, data: Path | None = None) -> dict[str, Metrics]:
        """The baselines are a uniform guess, n-grams of the training text, and lzma.

        For lzma, the test text is appended to the training text, and the bytes that this adds to the compressed file
        are counted. The baselines read at most the first 64 MiB of the training text.
        """
        assert isinstance(splits.train, DrawnWindows)
        assert isinstance(splits.test, Windows)
        train, test = first(splits.train.sequences, COUNTED), splits.test.sequences
        bits = {"uniform": math.log2(self.predicted)}
        counted = ngram_bits(train, test, self.predicted, LONGEST_GRAM - 1)
        bits |= {"unigram" if n == 1 else f"{n}-gram": value for n, value in enumerate(counted, 1)}
        bits["lzma, after the training text"] = _compressed(train, test)
        words = sum(int(words_ended(*_as_window(sequence))) for sequence in test)
        count = sum(len(sequence) - 1 for sequence in test)
        return {name: self._metrics_of(value, float(count), float(words)) for name, value in bits.items()}

    def _metrics_of(self, bits: float, count: float, words: float) -> Metrics:
        metrics = {"bits_per_byte": bits, "byte_perplexity": 2**bits}
        if self.corpus.startswith(WORDS) and not self.files and words:
            metrics["word_perplexity"] = 2 ** min(bits * count / words, 1000.0)
        return metrics

    def _corpus(self, data: Path | None) -> CorpusParts:
        if data is None:
            raise InputError(
                "the task 'lm' needs text: --set task.files=my.txt, or a corpus with --data-dir FOLDER or the "
                "environment variable SUBQUAD_DATA"
            )
        if not (data / self.corpus).is_dir():
            raise InputError(
                f"the task 'lm' needs the corpus {self.corpus!r}, but there is no folder {data / self.corpus}; "
                "--set task.files=my.txt reads text of your own"
            )
        return read_corpus(data / self.corpus, self.held_out, self.seed)

    def _parts(self) -> CorpusParts:
        """The user's text, with what is held out of it in place of files that are not given."""
        all_files = (self.files, self.validation_files, self.test_files)
        train, validation, test = (in_bytes(_paths(files), self.column) if files else [] for files in all_files)
        if not validation and not test:
            return cut(train, self.held_out, self.seed)
        if not validation:
            train, validation = hold_out(train, self.held_out, self.seed)
        if not test:
            train, test = hold_out(train, self.held_out, self.seed)
        return CorpusParts(train, validation, test)


def _paths(files: tuple[str, ...] | str) -> list[Path]:
    """A single file needs no brackets."""
    return [Path(file).expanduser() for file in ([files] if isinstance(files, str) else files)]


def _symbols(document: bytes, start: int) -> Symbols:
    return with_start(np.frombuffer(document, dtype=np.uint8), start)


def _as_window(sequence: Symbols) -> tuple[Tensor, Tensor]:
    """A sequence as input and labels of one item."""
    ids = torch.from_numpy(sequence.astype(np.int64))[None]
    return ids, torch.where(ids < Lm.predicted, ids, -100)


def words_ended(ids: Tensor, labels: Tensor) -> Tensor:
    """The number of words that end in each item: spaces and ends of lines after another byte, and all ends of lines."""
    before, after = ids[:, :-1], labels[:, 1:]
    inside = (before != SPACE) & (before != LINE) & (before < Lm.predicted)
    line = after == LINE
    return (inside & (line | (after == SPACE))).sum(1) + line.sum(1)


def _compressed(train: Sequence[Symbols], test: Sequence[Symbols]) -> float:
    """Bits a byte of the test text: how much longer a compressed file becomes when it is appended to the training's."""
    before, after = (b"".join(sequence[1:].astype(np.uint8).tobytes() for sequence in part) for part in (train, test))
    known = max(1 << 12, min(COUNTED, len(before + after)))  # bytes
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": known}]
    sizes = [len(lzma.compress(text, lzma.FORMAT_RAW, filters=filters)) for text in (before, before + after)]
    return 8 * (sizes[1] - sizes[0]) / len(after)
