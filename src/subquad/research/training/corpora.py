"""Texts for language models, in three parts: to learn from, to choose by, to report on."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from subquad.core.errors import InputError
from subquad.core.reading import exists, is_folder
from subquad.tools.data.texts import read_documents, read_text

MANY = 10  # documents from which on whole ones are held out


class CorpusParts(NamedTuple):
    """Documents as bytes."""

    train: list[bytes]
    validation: list[bytes]
    test: list[bytes]


def read_corpus(folder: Path, held_out: float, seed: int) -> CorpusParts:
    """The texts of a folder.

    With valid.txt and test.txt these are the parts; train.txt is what to learn from. If it is missing, valid.txt is
    learned from, and its last `held_out` are what to choose by. Any other folder is cut by `cut`.
    """
    if not (exists(folder) and is_folder(folder)):
        raise InputError(f"no folder {folder}")
    train, validation, test = (folder / f"{name}.txt" for name in ("train", "valid", "test"))
    if not (exists(validation) and exists(test)):
        return cut(in_bytes([folder]), held_out, seed)
    report = [read_text(test).encode()]
    if exists(train):
        return CorpusParts([read_text(train).encode()], [read_text(validation).encode()], report)
    learn, choose = hold_out([read_text(validation).encode()], held_out, seed)
    return CorpusParts(learn, choose, report)


def in_bytes(paths: Sequence[Path], column: str = "text") -> list[bytes]:
    """The documents of files and folders, as `read_documents` reads them."""
    return [document.encode() for document in read_documents(paths, column)]


def cut(documents: Sequence[bytes], held_out: float, seed: int) -> CorpusParts:
    """Hold out a share: half of it to choose by, the other half to report on."""
    if len(documents) >= MANY:
        train, held = hold_out(documents, max(held_out, 2 / len(documents)), seed)
        return CorpusParts(train, held[::2], held[1::2])
    train, held = hold_out(documents, held_out, seed)
    return CorpusParts(train, *hold_out(held, 0.5, seed))


def hold_out(documents: Sequence[bytes], share: float, seed: int) -> tuple[list[bytes], list[bytes]]:
    """Split documents into what stays and a share that is held out.

    Of fewer than ten documents it is the end of each one, which must leave bytes on both sides; of more it is whole
    ones, drawn from the seed.
    """
    count = len(documents)
    if count >= MANY:
        held = set(np.random.default_rng(seed).permutation(count)[: max(1, round(share * count))].tolist())
        stays = [document for i, document in enumerate(documents) if i not in held]
        return stays, [document for i, document in enumerate(documents) if i in held]
    ends = [len(document) - round(share * len(document)) for document in documents]
    before = [document[:end] for document, end in zip(documents, ends, strict=True) if end > 0]
    after = [document[end:] for document, end in zip(documents, ends, strict=True) if end < len(document)]
    if not before or not after:
        total = sum(map(len, documents))
        raise InputError(f"{total} bytes of text are too few to hold out {share:g} of them; give more text")
    return before, after
