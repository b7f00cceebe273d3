"""Files that users give us to read: regular ones, of a size that fits into memory.

Each way to fail is an InputError of one line, which names the file.
"""

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from subquad.core.errors import InputError

CHUNK = 2**20
SHARE = 4  # of the machine's memory, the largest file that is read whole: decoded and cut up, text takes more than that

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_folder(path: Path) -> bool:
    """True if a path that the user gave is a folder; InputError if it is neither that nor a regular file."""
    mode = _status(path).st_mode
    if stat.S_ISDIR(mode):
        return True
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise InputError(f"{path} is {kind}; give a regular file or a folder of them")
    return False


def exists(path: Path) -> bool:
    """True if there is something at a path that the user gave."""
    return _stat_or_none(path) is not None


def files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files below a folder with these endings, in the order of their paths; links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise InputError(_why_unreadable(Path(error.filename), error)) from None

    paths = (Path(root) / name for root, _, names in os.walk(folder, onerror=refuse) for name in names)
    return sorted(path for path in paths if path.name.lower().endswith(suffixes))


def read_bytes(path: Path) -> bytes:
    """The content of a regular file that is not too large for this machine."""
    return b"".join(chunks(path))


def chunks(path: Path) -> Iterator[bytes]:
    """`read_bytes`, part by part."""
    if is_folder(path):
        raise InputError(f"{path} is a folder; give a file")
    check_size(path)
    try:
        with path.open("rb") as file:
            while part := file.read(CHUNK):
                yield part
    except OSError as error:
        raise InputError(_why_unreadable(path, error)) from None


def check_size(path: Path) -> None:
    """InputError where a file is larger than what is read whole on this machine; names both figures."""
    size, most = _status(path).st_size, memory() / SHARE
    if size > most:
        raise InputError(
            f"{path} has {size / 2**30:,.1f} GiB, but files of at most {most / 2**30:,.1f} GiB are read on this "
            "machine; give a part of it"
        )


def memory() -> float:
    """Bytes of memory of this machine; infinite where Python does not tell, as on Windows."""
    if not hasattr(os, "sysconf"):
        return math.inf
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def read_json(path: Path) -> Any:
    """The content of a JSON file in UTF-8."""
    content = read_bytes(path)
    try:
        return parse_json(content.decode("utf-8-sig"))
    except ValueError as error:  # UnicodeDecodeError is one
        raise InputError(f"{path} is not JSON ({_reason(error)})") from None


def parse_json(text: str) -> Any:
    """`json.loads`, with a ValueError for everything that it cannot read, such as lists in lists without end."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start:,} is not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} in line {error.lineno:,}"
    return str(error).partition(";")[0]


def _status(path: Path) -> os.stat_result:
    status = _stat_or_none(path)
    if status is None and path.is_symlink():
        raise InputError(f"{path} is a link to {os.readlink(path)}, where there is nothing")
    if status is None:
        raise InputError(f"no file or folder at {path}")
    return status


def _stat_or_none(path: Path) -> os.stat_result | None:
    """The system's record of a path, None if nothing is there; it refuses names that are too long, for example."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InputError(_why_unreadable(path, error)) from None


def _why_unreadable(path: Path, error: OSError | ValueError) -> str:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"{path} cannot be read: {reason or error}"
