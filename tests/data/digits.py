"""Recordings of digits that are none: noise of the digit's own length and tone."""

import io
import wave
import zipfile
from pathlib import Path

import numpy as np

from subquad.data.spoken_digits import ARCHIVE


def wav(samples: int, *, rate: int = 8000, channels: int = 1, tone: float = 440.0) -> bytes:
    """A file with a tone."""
    sound = (8000 * np.sin(2 * np.pi * tone * np.arange(samples * channels) / rate)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(sound.tobytes())
    return file.getvalue()


def archive(folder: Path, files: dict[str, bytes]) -> Path:
    """A data folder with these files in its archive."""
    path = folder / ARCHIVE
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as zipped:
        for name, content in files.items():
            zipped.writestr(name, content)
    return folder


def corpus(folder: Path, *, speakers: tuple[str, ...] = ("anna", "bert", "george"), takes: int = 12) -> Path:
    """A data folder with all digits by these speakers: each digit a tone of its own, each take a length of its own."""
    return archive(
        folder,
        {
            f"{digit}_{speaker}_{take}.wav": wav(800 + 40 * take + 400 * number, tone=200.0 + 300.0 * digit)
            for number, speaker in enumerate(speakers)
            for digit in range(10)
            for take in range(takes)
        },
    )
