"""Calibrate on the way: what `compare --calibrate TEXT` fits before it compares."""

import re
from collections.abc import Sequence
from pathlib import Path

from subquad import hf
from subquad.data.files import is_folder
from subquad.data.texts import read_documents
from subquad.errors import InputError, NothingToLearn
from subquad.methods import METHODS, Method
from subquad.workflows.calibrate import fit, save
from subquad.workflows.pretrained import Pretrained
from subquad.workflows.rows import CompareRow, row_of_adapter
from subquad.workflows.settings import CalibrateSettings
from subquad.workflows.store import Progress


def calibrated(
    text: Sequence[Path],
    apart_from: Sequence[Path],
    methods: Sequence[Method],
    pretrained: Pretrained,
    length: int,
    out: Path,
    progress: Progress,
) -> dict[Method, CompareRow]:
    """Fit every method that has a fit on this text and return their rows; nothing where there is no text.

    The adapters are kept under `out/adapters`, and those of an earlier run are used again where they are for the same
    method, model and text.

    Raises:
        InputError: none of the methods has something to fit, or the text is, or shares files with, `apart_from`.
    """
    if not text:
        return {}
    for path in (*text, *apart_from):
        is_folder(path)  # refuses what cannot be read
    for mine in text:
        for its in apart_from:
            if mine.resolve() == its.resolve() or mine.resolve() in its.resolve().parents:
                raise InputError(f"--calibrate {mine} holds the text that is compared on, {its}: figures would flatter")
            if its.resolve() in mine.resolve().parents:
                raise InputError(f"--calibrate {mine} is part of the text that is compared on, {its}")
    wanted = [method for method in methods if method.traits.fit is not None]
    if not wanted:
        have = ", ".join(name for name, method in METHODS.items() if method.traits.fit is not None)
        raise InputError(f"--calibrate: none of the methods has learned parameters to fit; those of {have} can be")
    documents = read_documents(text)
    rows = {}
    for method in wanted:
        folder = out / "adapters" / re.sub(r"[^a-z0-9.]+", "-", str(method))
        settings = CalibrateSettings(method=str(method), text=tuple(text), max_length=length)
        try:
            if not _is_for(folder, method, pretrained, text, length):
                save(fit(settings, method, pretrained, documents, folder, progress), folder)
        except NothingToLearn:
            continue  # the row says that it is not calibrated, and is exact
        rows[method] = row_of_adapter(pretrained, folder)
    return rows


def _is_for(folder: Path, method: Method, pretrained: Pretrained, text: Sequence[Path], length: int) -> bool:
    """Whether this adapter is what calibrating would make."""
    if not folder.exists():
        return False
    try:
        adapter = hf.read_adapter(folder)
    except ValueError:  # a run that was cut off: its checkpoint is there, the adapter is not
        return False
    same_text = adapter.record["text"]["source"] == [str(path) for path in text]
    same_model = adapter.model["weights"] == hf.weights_mark(pretrained.model)
    same_method = set(adapter.methods.values()) == {method} and adapter.record["passages"]["tokens"] == length
    return same_text and same_model and same_method
