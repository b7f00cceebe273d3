"""Connected digits: several spoken digits in a row; write which ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.core.errors import InputError
from subquad.research.papers.data.filter_banks import BANDS, normalised, silence
from subquad.research.papers.data.spoken_digits import Recording, read_spoken_digits
from subquad.research.training.model_settings import ModelSettings
from subquad.research.training.models.ctc_encoder import PADDING, CTCEncoder, SpeechConfig, greedy
from subquad.research.training.tasks.task import Batch, Item, Metrics, Splits, Task

TEST, VALIDATION = range(0, 5), range(5, 10)  # takes; the data set's own test split, and ours out of its training split
DIGITS = 10


@dataclass(frozen=True, kw_only=True)
class Speech(Task):
    """Transcribe the digits of an utterance, made of single recordings of the Free Spoken Digit Dataset (`fsdd`).

    The filter banks (`data/filter_banks.py`) of each recording (8 kHz) are computed once. An utterance joins the filter
    banks of its digits, with a few frames of digital silence before, between and after them, and is then normalised to
    mean 0 and variance 1 in each band.

    For all speakers but one, recordings 0 to 4 of each digit are for the test, recordings 5 to 9 for validation and the
    others for training.
    The recordings of the held-out speaker are the second half of the test examples, which is reported separately.

    Attributes:
        fewest, most: smallest and largest number of digits that are drawn for an utterance; those that do not fit into
            `longest` frames are left out.
        longest: number of frames (of 10 ms) of the longest utterance. The longest of Vyas et al. (2020) has 2,500.
        fewest_gap, most_gap: smallest and largest number of frames of silence.
        one_speaker: whether all digits of an utterance are spoken by one speaker.
        held_out: the speaker whose recordings are not used for training.
        subsample: number of frames per token; Vyas et al. (2020) use 1.
        examples: number of training examples, which are made as they are read.
        validation_examples, test_examples: number of validation and test examples; half of the test examples are spoken
            by the held-out speaker.
        seed: random seed of the examples.
    """

    name: ClassVar[str] = "speech"
    summary: ClassVar[str] = "connected spoken digits, filter banks to digits by CTC; errors per digit"
    metric: ClassVar[str] = "digit_error_rate"
    greater_is_better: ClassVar[bool] = False
    needs: ClassVar[str | None] = "fsdd"
    start: ClassVar = {
        "model": {"layers": 4, "heads": 4, "width": 128, "feed_forward": 512, "positions": "sinusoidal"},
        "training": {"steps": 2000, "batch": 16, "learning_rate": 1e-3, "schedule": "cosine", "warmup": 100},
    }

    fewest: int = 10
    most: int = 40
    longest: int = 2500
    fewest_gap: int = 0
    most_gap: int = 10
    one_speaker: bool = True
    held_out: str = "george"
    subsample: int = 1
    examples: int = 1_000_000
    validation_examples: int = 64
    test_examples: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for low, high in (("fewest", "most"), ("fewest_gap", "most_gap")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)} is more than {high}={getattr(self, high)}")
        least = {"fewest": 1, "fewest_gap": 0, "longest": 1, "subsample": 1, "examples": 1, "validation_examples": 1}
        for name, minimum in (least | {"test_examples": 2}).items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}={getattr(self, name)}, but it must be at least {minimum}")

    def splits(self, data: Path | None) -> Splits:
        """Utterances drawn from the seed, the split and their number."""
        if data is None:
            raise InputError("the task 'speech' needs the data in fsdd: --data-dir FOLDER, or SUBQUAD_DATA")
        recordings = read_spoken_digits(data)
        speakers = sorted({r.speaker for r in recordings})
        if self.held_out not in speakers or len(speakers) < 2:
            raise InputError(
                f"task.held_out={self.held_out!r} is not a speaker next to others in the recordings: "
                f"{', '.join(speakers)}"
            )
        heard = [r for r in recordings if r.speaker != self.held_out]
        held = [r for r in recordings if r.speaker == self.held_out]
        test = [r for r in heard if r.take in TEST]
        validation = [r for r in heard if r.take in VALIDATION]
        train = [r for r in heard if r.take not in TEST and r.take not in VALIDATION]
        others = [speaker for speaker in speakers if speaker != self.held_out]
        return Splits(
            Utterances(self, 0, self.examples, [(train, others)]),
            Utterances(self, 1, self.validation_examples, [(validation, others)]),
            Utterances(self, 2, self.test_examples, [(test, others), (held, [self.held_out])]),
        )

    def model(self, settings: ModelSettings) -> CTCEncoder:
        """An encoder that writes the ten digits; symbol d + 1 is digit d."""
        longest = -(-self.longest // self.subsample)
        more = {"bands": BANDS, "symbols": DIGITS + 1, "subsample": self.subsample}
        return CTCEncoder(settings.config(SpeechConfig, longest=longest, **more))

    def collate(self, items: Sequence[Item]) -> Batch:
        """Frames and labels padded to the longest."""
        frames = max(len(item["features"]) for item in items)
        digits = max(len(item["labels"]) for item in items)
        batch = {
            "features": torch.zeros(len(items), frames, BANDS),
            "attention_mask": torch.zeros(len(items), frames, dtype=torch.long),
            "labels": torch.full((len(items), digits), PADDING),
            "held_out": torch.tensor([int(item["held_out"]) for item in items]),
        }
        for i, item in enumerate(items):
            length = len(item["features"])
            batch["features"][i, :length] = torch.from_numpy(item["features"])
            batch["attention_mask"][i, :length] = 1
            batch["labels"][i, : len(item["labels"])] = torch.from_numpy(item["labels"])
        return batch

    def score(self, outputs: Any, batch: Batch) -> Tensor:
        """Edits, digits, and whether the speaker is the held-out one."""
        rows = []
        written = greedy(outputs.logits, outputs.lengths)
        for hypothesis, labels, held in zip(written, batch["labels"].tolist(), batch["held_out"].tolist(), strict=True):
            target = [label for label in labels if label != PADDING]
            rows.append([edit_distance(hypothesis, target), len(target), held])
        return torch.tensor(rows, dtype=torch.float32, device=outputs.logits.device)

    def metrics(self, scores: Tensor) -> Metrics:
        """Edits (substitutions, deletions, insertions) a digit, of known speakers and, where it is there, the other."""
        values = {}
        for name, part in (("digit_error_rate", 0), ("held_out_digit_error_rate", 1)):
            rows = scores[scores[:, 2] == part].double()
            if len(rows):
                values[name] = float(rows[:, 0].sum() / rows[:, 1].sum())
        return values

    def baselines(self, splits: Splits, data: Path | None) -> dict[str, Metrics]:
        """The baselines ignore the sound: one writes nothing, the other the right number of random digits."""
        draw = np.random.default_rng(self.seed)
        targets = [splits.test[i] for i in range(self.test_examples)]
        rows: dict[str, list[list[float]]] = {"nothing": [], "random digits of the right number": []}
        for item in targets:
            target, held = item["labels"].tolist(), float(item["held_out"])
            guess = draw.integers(1, DIGITS + 1, len(target)).tolist()
            for name, hypothesis in zip(rows, ([], guess), strict=True):
                rows[name].append([edit_distance(hypothesis, target), len(target), held])
        return {name: self.metrics(torch.tensor(scores)) for name, scores in rows.items()}


class Utterances(Dataset[Item]):
    """Utterance i of a split, made from the seed, the split and i; an equal share from each pool, in their order."""

    def __init__(
        self, task: Speech, split: int, count: int, pools: Sequence[tuple[Sequence[Recording], Sequence[str]]]
    ):
        self.task, self.split, self.count = task, split, count
        self.pools = [_by_speaker(pool, names) for pool, names in pools]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        task = self.task
        draw = np.random.default_rng((task.seed, self.split, index))
        number = index * len(self.pools) // self.count
        chosen = self._draw(draw, self.pools[number])
        gap = silence(int(draw.integers(task.fewest_gap, task.most_gap + 1)))
        parts, frames = [gap], len(gap)
        digits: list[int] = []
        for recording in chosen:
            gap = silence(int(draw.integers(task.fewest_gap, task.most_gap + 1)))
            frames += len(recording.features) + len(gap)
            if digits and frames > task.longest:
                break
            parts += [recording.features, gap]
            digits.append(recording.digit + 1)
        features = normalised(np.concatenate(parts)[: task.longest])
        return {"features": features, "labels": np.array(digits), "held_out": number == 1}

    def _draw(self, draw: np.random.Generator, pool: dict[str, list[list[Recording]]]) -> list[Recording]:
        """Digits drawn evenly, each of a speaker's recordings of it too."""
        speakers = list(pool)
        speaker = speakers[draw.integers(len(speakers))]
        chosen = []
        for digit in draw.integers(0, DIGITS, draw.integers(self.task.fewest, self.task.most + 1)):
            if not self.task.one_speaker:
                speaker = speakers[draw.integers(len(speakers))]
            takes = pool[speaker][digit]
            chosen.append(takes[draw.integers(len(takes))])
        return chosen


def _by_speaker(recordings: Sequence[Recording], speakers: Sequence[str]) -> dict[str, list[list[Recording]]]:
    """{speaker: his recordings of each digit}.

    Raises:
        InputError: a split without a recording of some digit by one of its speakers.
    """
    pool: dict[str, list[list[Recording]]] = {speaker: [[] for _ in range(DIGITS)] for speaker in speakers}
    for recording in recordings:
        pool[recording.speaker][recording.digit].append(recording)
    for speaker, digits in pool.items():
        for digit, takes in enumerate(digits):
            if not takes:
                raise InputError(f"no recording of digit {digit} by {speaker!r} is left for one of the splits")
    return pool


def edit_distance(hypothesis: Sequence[int], target: Sequence[int]) -> int:
    """The fewest substitutions, deletions and insertions that turn one sequence into the other (Levenshtein 1966)."""
    row = list(range(len(target) + 1))
    for i, symbol in enumerate(hypothesis, 1):
        above, row[0] = row[0], i
        for j, wanted in enumerate(target, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (symbol != wanted))
    return row[-1]
