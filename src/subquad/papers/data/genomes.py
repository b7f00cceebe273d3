"""Genomes: FASTA files to bases."""

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from subquad.data.files import files_in, is_folder, read_bytes
from subquad.errors import InputError

BASES = "ACGTN"  # the number of a base is its place here; N: not known
SUFFIXES = (".fa", ".fasta", ".fna", ".fa.gz", ".fasta.gz", ".fna.gz")
_AMBIGUOUS = "RYSWKMBDHV"  # IUPAC's codes for two or three possible bases, read as N


@dataclass(frozen=True)
class Genome:
    """One sequence of a FASTA file: its name, the first word after ">", and its bases as numbers in `BASES`."""

    name: str
    bases: NDArray[np.uint8]


def read_fasta(path: Path) -> list[Genome]:
    """All sequences of a FASTA file, or of a gzipped one. Lower case counts as upper case, U as T.

    Raises:
        InputError: no such file, or a file that is not in FASTA format; names the line.
    """
    genomes: list[Genome] = []
    name, parts = "", list[NDArray[np.uint8]]()
    for number, line in enumerate(_content(path).splitlines(), 1):
        text = line.strip()
        if text.startswith(b">"):
            genomes += _genome(path, name, parts)
            name, parts = (text[1:].split() or [b"?"])[0].decode("utf-8", "replace"), []
        elif text:
            if not name:
                raise InputError(f"{path} is not FASTA: line {number} stands before the first line with '>'")
            bases = _CODES[np.frombuffer(text, dtype=np.uint8)]
            if (bases == _UNKNOWN).any():
                wrong = chr(text[int(np.argmax(bases == _UNKNOWN))])
                raise InputError(f"{path}, line {number}: {wrong!r} is not the code of a base")
            parts.append(bases)
    genomes += _genome(path, name, parts)
    if not genomes:
        raise InputError(f"{path} holds no sequence")
    return genomes


def read_genomes(paths: Sequence[Path]) -> list[Genome]:
    """All sequences of files, and of the FASTA files in folders; InputError where there are none."""
    files = []
    for path in paths:
        found = files_in(path, SUFFIXES) if is_folder(path) else [path]
        if not found:
            raise InputError(f"no genome in the folder {path}: it holds no {', '.join(SUFFIXES)} file")
        files += found
    return [genome for file in files for genome in read_fasta(file)]


def _content(path: Path) -> bytes:
    try:
        content = read_bytes(path)
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def _genome(path: Path, name: str, parts: list[NDArray[np.uint8]]) -> list[Genome]:
    """The sequence that has just ended, if any has begun."""
    if name and not parts:
        raise InputError(f"{path}: the sequence {name!r} has no bases")
    return [Genome(name, np.concatenate(parts))] if name else []


_UNKNOWN = 255


def _codes() -> NDArray[np.uint8]:
    """The number of each byte's base."""
    codes = np.full(256, _UNKNOWN, dtype=np.uint8)
    for symbols, base in [*zip(BASES, BASES, strict=True), ("U", "T"), (_AMBIGUOUS, "N")]:
        for symbol in symbols + symbols.lower():
            codes[ord(symbol)] = BASES.index(base)
    return codes


_CODES = _codes()
