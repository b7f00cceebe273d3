"""Whole documents out of archives, one file each; an archive that is missing or damaged is an InputError."""

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from subquad.core.errors import InputError
from subquad.core.reading import exists, is_folder


def read_archive(archive: Path, suffix: str = ".txt") -> dict[str, str]:
    """The files with this suffix in a zip archive, by their names, in the order of these; UTF-8, or else Latin-1."""
    contents = {name: _decoded(content) for name, content in sorted(members(archive, suffix))}
    if not contents:
        raise InputError(f"{archive} contains no {suffix} file")
    return contents


def members(archive: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each file with this suffix in a zip archive."""
    if not exists(archive):
        raise InputError(f"no archive at {archive}")
    if is_folder(archive):
        raise InputError(f"{archive} is a folder; give a zip archive")
    try:
        with zipfile.ZipFile(archive) as files:
            yield from ((name, files.read(name)) for name in files.namelist() if name.endswith(suffix))
    except zipfile.BadZipFile as error:
        raise InputError(f"{archive} is not a zip archive, or not a whole one ({error})") from None
    except (RuntimeError, ValueError, EOFError, zlib.error) as error:  # encrypted, an unknown compression, cut short
        raise InputError(f"{archive} cannot be unpacked: {error}") from None


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")
