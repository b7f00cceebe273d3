"""Language modelling of genomes, base by base, with long contexts."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor

from subquad.errors import InputError
from subquad.papers.data.genomes import BASES, Genome, read_genomes
from subquad.training.tasks.base import Figures, Splits
from subquad.training.tasks.next_symbol import NextSymbol
from subquad.training.tasks.ngrams import ngram_bits
from subquad.training.tasks.windows import DrawnWindows, Symbols, Windows, with_start

ORDERS = (0, 1, 2, 3, 4, 6)  # of the Markov models


@dataclass(frozen=True, kw_only=True)
class NextBase(NextSymbol):
    """Predict the next base (A, C, G or T) of genomes; the metric is bits per base of held-out parts.

    Each sequence is split by position, without overlap: its first part is for training, the next one for validation
    and the last one for the test, in which each base counts once. N, an unknown base, is read but never predicted.

    Attributes:
        files: FASTA files (also gzipped) or folders; without them, the folder genomes of the data (phage lambda,
            SARS-CoV-2).
        length: number of bases in a window.
        held_out: share of each sequence that is for validation, and share that is for the test.
        examples: number of windows in the training set; they are sampled as they are read.
        limit: number of bases of the validation part and of the test part that are used; 0 means all.
        seed: random seed of the sampled windows.
    """

    name: ClassVar[str] = "genome"
    summary: ClassVar[str] = "the next base of genomes (or task.files: your own FASTA); bits per base"
    summary_of_files: ClassVar[str] = "the next base of {files}; bits per base"
    metric: ClassVar[str] = "bits_per_base"
    needs: ClassVar[str | None] = "genomes"
    symbols: ClassVar[int] = len(BASES)
    said: ClassVar[int] = len(BASES) - 1
    start: ClassVar = {
        "model": {"layers": 4, "heads": 4, "width": 128, "method": "linear"},
        "training": {"steps": 1000, "batch": 8, "schedule": "cosine", "warmup": 100, "every": 100},
    }

    length: int = 2048
    files: tuple[str, ...] | str = ()
    held_out: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.held_out < 0.5:
            raise ValueError(f"held_out={self.held_out}, but it must be more than 0 and less than 0.5")

    def splits(self, data: Path | None = None) -> Splits:
        """Windows of the parts of each sequence; `data` is not read where `files` are given."""
        parts = [self._parts(genome) for genome in read_genomes(self._paths(data))]
        return self.windows(*([part[i] for part in parts] for i in range(3)))

    def figures(self, scores: Tensor) -> Figures:
        """Bits per base, and perplexity."""
        nats, count = scores.double().sum(0).tolist()
        return _said(nats / math.log(2) / count)

    def baselines(self, splits: Splits, data: Path | None = None) -> dict[str, Figures]:
        """The baselines are a uniform guess and interpolated Markov models of several orders."""
        train, test = splits.train, splits.test
        assert isinstance(train, DrawnWindows)
        assert isinstance(test, Windows)
        bits = ngram_bits(train.sequences, test.sequences, self.said, max(ORDERS))
        found = {"uniform": _said(math.log2(self.said))}
        return found | {f"Markov, order {order}": _said(bits[order]) for order in ORDERS}

    def _paths(self, data: Path | None) -> list[Path]:
        files = [self.files] if isinstance(self.files, str) else self.files
        if files:
            return [Path(file).expanduser() for file in files]
        if data is None:
            raise InputError(
                "the task 'genome' needs genomes: files=['my.fasta'], or --data-dir FOLDER or the environment variable "
                "SUBQUAD_DATA"
            )
        if not (data / "genomes").is_dir():
            raise InputError(f"the task 'genome' needs the folder {data / 'genomes'}, which is not there")
        return [data / "genomes"]

    def _parts(self, genome: Genome) -> list[Symbols]:
        """What to learn from, to choose by, to report on: in this order along the sequence."""
        length = len(genome.bases)
        held = int(self.held_out * length)
        if held < 1:
            raise InputError(f"{genome.name!r} has {length} bases, too few to hold out {self.held_out:g} of them")
        ends = [length - 2 * held, length - held]
        return [with_start(part, self.start_symbol) for part in np.split(genome.bases, ends)]


def _said(bits: float) -> Figures:
    return {"bits_per_base": bits, "base_perplexity": 2**bits}
