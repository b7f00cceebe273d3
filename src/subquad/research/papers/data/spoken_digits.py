"""The Free Spoken Digit Dataset: recordings of single digits, as filter banks."""

import io
import re
import wave
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from subquad.core.errors import InputError
from subquad.core.reading import exists
from subquad.research.papers.data.filter_banks import filter_banks
from subquad.tools.data.documents import members

ARCHIVE = Path("fsdd") / "recordings.zip"
RATE = 8000  # samples per second
_NAME = re.compile(r"(\d)_([a-z]+)_(\d+)\.wav", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Recording:
    """One spoken digit."""

    digit: int
    speaker: str
    take: int
    features: Float[ndarray, "frames bands"]


@lru_cache(maxsize=2)
def read_spoken_digits(folder: Path) -> tuple[Recording, ...]:
    """All recordings of `fsdd/recordings.zip` in a data folder, by digit, speaker and take; kept in memory.

    The archive contains files `{digit}_{speaker}_{take}.wav`: mono, 16 bits, 8,000 samples per second.

    Raises:
        InputError: the archive is missing, or is not a zip file, or a file of it has another name or format; named.
    """
    path = folder / ARCHIVE
    if not exists(path):
        raise InputError(
            f"no recordings at {path}: put the Free Spoken Digit Dataset's there, as one zip of .wav files"
        )
    recordings = [_read(path, name, content) for name, content in members(path, ".wav")]
    if not recordings:
        raise InputError(
            f"{path} contains no .wav file; expected {{digit}}_{{speaker}}_{{take}}.wav, such as 7_theo_0.wav"
        )
    return tuple(sorted(recordings, key=lambda r: (r.digit, r.speaker, r.take)))


def _read(path: Path, name: str, content: bytes) -> Recording:
    match = _NAME.fullmatch(PurePosixPath(name).name)
    if match is None:
        raise InputError(f"{path}: {name!r} is not named {{digit}}_{{speaker}}_{{take}}.wav, such as 7_theo_0.wav")
    features = filter_banks(_samples(path, name, content), RATE)
    return Recording(int(match[1]), match[2].lower(), int(match[3]), features)


def _samples(path: Path, name: str, content: bytes) -> Float[ndarray, " samples"]:
    """From −1 to 1."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            form = (file.getnchannels(), 8 * file.getsampwidth(), file.getframerate())
            samples = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise InputError(f"{path}: {name!r} is no .wav file ({error or 'cut short'})") from None
    if form != (1, 16, RATE):
        described = "{} channels, {} bits, {} samples per second".format(*form)
        raise InputError(f"{path}: {name!r} has {described}, but 1 channel, 16 bits and {RATE} are read")
    if not samples:
        raise InputError(f"{path}: {name!r} contains no samples")
    return np.frombuffer(samples, "<i2") / 32768.0
