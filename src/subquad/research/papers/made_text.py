"""Some made text, where an experiment only shows that it runs."""

from pathlib import Path

import numpy as np

from subquad.core import files


def made_text(folder: Path) -> Path:
    """400 words of 50 kinds, in a file in the folder; the same each time."""
    draw = np.random.default_rng(0)
    words = ["".join(map(chr, draw.integers(97, 123, draw.integers(1, 7)))) for _ in range(50)]
    path = folder / "made.txt"
    return files.write(path, " ".join(words[i] for i in draw.integers(0, 50, 400)))
