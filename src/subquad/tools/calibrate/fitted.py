"""Calibrate on the way: what `compare --calibrate TEXT` and `plan --calibrate TEXT` fit first."""

import re
from collections.abc import Sequence
from pathlib import Path

from subquad import hf
from subquad.core.errors import InputError, NothingToLearn
from subquad.methods import Method
from subquad.methods.core.plugins import all_methods
from subquad.tools.calibrate.run import fit, mark_of_documents, save
from subquad.tools.calibrate.settings import CalibrateSettings
from subquad.tools.data.texts import read_documents, report_folders
from subquad.tools.models.compare_rows import CompareRow, row_of_adapter
from subquad.tools.models.pretrained import Pretrained
from subquad.tools.runs.cache import clear
from subquad.tools.runs.jobs import Progress

IN_COMMON = 0.1  # the share of a text's letters that may be in documents that are fitted on: rows of tables repeat
_WHY_APART = "a method would be measured on what it was fitted on"


def calibrated(
    text: Sequence[Path],
    apart_from: Sequence[Path],
    column: str,
    methods: Sequence[Method],
    pretrained: Pretrained,
    length: int,
    out: Path,
    progress: Progress,
) -> tuple[dict[Method, CompareRow], dict[Method, str]]:
    """Fit every method that has a fit on this text; nothing where there is no text.

    Returns:
        The rows of those that were fitted, and the reason of each that was not: no layer of the model can run it, or it
        is exact on passages of `length` tokens.

    The adapters are kept under `out/adapters`, and those of an earlier run are used again where they are for the same
    method, model and text.

    Raises:
        InputError: none of the methods has something to fit, or the text has files, or a tenth of its letters, in
            common with `apart_from`.
    """
    if not text:
        return {}, {}
    documents = _apart(text, apart_from, column)
    report_folders(progress, text)
    wanted = [method for method in methods if method.traits.fit is not None]
    if not wanted:
        have = ", ".join(name for name, method in all_methods().items() if method.traits.fit is not None)
        raise InputError(f"--calibrate: none of the methods has learned parameters to fit; those of {have} can be")
    rows, reasons = {}, {}
    for method in wanted:
        refused = hf.refusals(pretrained.model, method)
        if len(refused) == len(hf.find_layers(pretrained.model)):
            reasons[method] = refused[min(refused)]
            continue
        folder = out / "adapters" / re.sub(r"[^a-z0-9.]+", "-", str(method))
        settings = CalibrateSettings(method=str(method), text=tuple(text), max_length=length)
        try:
            if not _is_for(folder, method, pretrained, documents, length):
                save(fit(settings, method, pretrained, documents, folder, progress), folder)
                clear(folder)
        except NothingToLearn as error:
            reasons[method] = str(error)
            continue
        rows[method] = row_of_adapter(pretrained, folder)
    return rows, reasons


def _apart(text: Sequence[Path], apart_from: Sequence[Path], column: str) -> list[str]:
    """The documents to fit on. InputError where figures are measured on them too."""
    for mine in text:
        for its in apart_from:
            if mine.resolve() == its.resolve() or mine.resolve() in its.resolve().parents:
                raise InputError(f"--calibrate {mine} contains the text of --text, {its}: {_WHY_APART}")
            if its.resolve() in mine.resolve().parents:
                raise InputError(f"--calibrate {mine} is part of the text of --text, {its}: {_WHY_APART}")
    documents = read_documents(text, column)
    measured = read_documents(apart_from, column) if apart_from else []
    known = set(documents)
    common = sum(len(document) for document in measured if document in known)
    if common > IN_COMMON * (letters := sum(map(len, measured))):
        raise InputError(
            f"--calibrate {', '.join(map(str, text))} has the documents of {common / letters:.0%} of --text "
            f"{', '.join(map(str, apart_from))}: {_WHY_APART}"
        )
    return documents


def _is_for(folder: Path, method: Method, pretrained: Pretrained, documents: Sequence[str], length: int) -> bool:
    """True if this adapter is what calibrating would make."""
    if not folder.exists():
        return False
    try:
        adapter = hf.read_adapter(folder)
    except ValueError:  # a run that was cut off: its checkpoint is there, the adapter is not
        return False
    same_text = adapter.record["text"].get("fingerprint") == mark_of_documents(documents)
    same_model = adapter.model["weights"] == hf.weights_mark(pretrained.model)
    same_method = set(adapter.methods.values()) == {method} and adapter.record["passages"]["tokens"] == length
    return same_text and same_model and same_method
