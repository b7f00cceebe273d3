"""Tones in place of spoken digits, in the same archive: to see that what reads them runs, without any data."""

import io
import wave
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from subquad.core.files import write
from subquad.research.papers.data.spoken_digits import ARCHIVE, RATE


def tones(folder: Path, *, speakers: Sequence[str] = ("anna", "bert", "george"), takes: int = 12) -> Path:
    """Make a data folder with all digits by these speakers: each digit a tone, each speaker and take of a length."""
    return archive(
        folder,
        {
            f"{digit}_{speaker}_{take}.wav": wav(800 + 40 * take + 400 * number, hertz=200.0 + 300.0 * digit)
            for number, speaker in enumerate(speakers)
            for digit in range(10)
            for take in range(takes)
        },
    )


def archive(folder: Path, files: Mapping[str, bytes]) -> Path:
    """A data folder with these files in its archive of recordings."""
    path = folder / ARCHIVE
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as zipped:
        for name, content in files.items():
            zipped.writestr(name, content)
    write(path, packed.getvalue())
    return folder


def wav(samples: int, *, rate: int = RATE, channels: int = 1, hertz: float = 440.0) -> bytes:
    """A .wav file of 16 bits with a tone."""
    sound = (8000 * np.sin(2 * np.pi * hertz * np.arange(samples * channels) / rate)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(sound.tobytes())
    return file.getvalue()
