"""Whole documents out of archives, one file each."""

import zipfile
from pathlib import Path

from subquad.errors import InputError


def read_archive(archive: Path, suffix: str = ".txt") -> dict[str, str]:
    """The files with this suffix in a zip archive, by their names, in the order of these; UTF-8, or else Latin-1.

    Raises:
        InputError: no archive, or none with such files.
    """
    try:
        with zipfile.ZipFile(archive) as files:
            found = {name: _decoded(files.read(name)) for name in sorted(files.namelist()) if name.endswith(suffix)}
    except FileNotFoundError:
        raise InputError(f"no archive at {archive}") from None
    except zipfile.BadZipFile:
        raise InputError(f"{archive} is not a zip archive") from None
    if not found:
        raise InputError(f"{archive} holds no {suffix} file")
    return found


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")
