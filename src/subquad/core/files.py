"""Write files that are whole or absent, whatever interrupts the writing.

Data goes to a temporary name in the same folder, from there to the disk, and only then to its own name: after a power
loss, a kill or a full disk there is the earlier file or the new one, and never a part of one. Everything that subquad
writes goes through here, other than what libraries write as they go (Trainer's checkpoints, curves for TensorBoard).
What cannot be written, on a full disk for example, raises CannotWrite, and what was there before is still there.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from subquad.core.errors import InputError

PART = ".subquad-part"  # the end of a temporary file's name
EARLIER = ".earlier"  # before it, in the name of a folder that another one is about to replace
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_WRITING = (*FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


class CannotWrite(InputError, OSError):
    """The operating system did not let us write; the message names the file and what to do."""

    def __init__(self, path: Path, error: OSError):
        remedy = "free some space there" if error.errno in FULL else "make it writable"
        what = "to the folder " if path.is_dir() else ""
        super().__init__(
            f"cannot write {what}{path}: {error.strerror or error}; {remedy}, or choose another folder (earlier files "
            "are as they were)"
        )
        self.errno = error.errno


def write(path: str | Path, data: bytes | str) -> Path:
    """Write a file, in the place of an earlier one if there is one; its folder is made if need be."""
    path = Path(path)
    return write_all({path.name: data}, path.parent)[0]


def write_all(contents: Mapping[str, bytes | str], folder: Path) -> list[Path]:
    """Write several files into a folder; none of them gets its name before all of them are on the disk."""
    make_folder(folder)
    parts = {name: _part(folder / name) for name in contents}
    name = ""
    try:
        for name, data in contents.items():
            _to_disk(parts[name], data.encode() if isinstance(data, str) else data)
        for name, part in parts.items():
            os.replace(part, folder / name)
        sync(folder)
    except OSError as error:
        raise CannotWrite(folder / name, error) from error
    finally:
        for part in parts.values():
            with suppress(OSError):
                part.unlink(missing_ok=True)
    return [folder / name for name in contents]


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, where they are not there; InputError where a file is in the way."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise InputError(f"cannot write to the folder {folder}: a file is in its place; give another one") from None
        raise CannotWrite(folder, error) from error


def check_writable(path: Path) -> None:
    """Find out whether a file or a folder can be written at a path, by making a folder next to it and removing it.

    Raises:
        InputError: a file is in the way, the operating system refuses it, or what is there cannot be replaced: a mount
            point, or a link to nothing.
    """
    if path.is_mount():
        raise InputError(f"cannot replace the folder {path}: it is a mount point; give a folder inside of it")
    if path.is_symlink() and not path.exists():
        raise InputError(f"cannot write {path}: it is a link to {os.readlink(path)}, where there is nothing")
    made = [parent for parent in path.parents if not parent.exists()]
    make_folder(path.parent)
    part = _part(path)
    try:
        part.mkdir()
    except OSError as error:
        raise CannotWrite(path, error) from error
    finally:
        with suppress(OSError):
            for each in (part, *made):
                each.rmdir()


def cache_folder() -> Path:
    """The folder for what can be made again: $SUBQUAD_CACHE, or the folder `subquad` of the user's cache.

    Raises:
        InputError: the user has no home folder.
    """
    if folder := os.environ.get("SUBQUAD_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "subquad"
    except RuntimeError:
        raise InputError("the user has no home folder; set SUBQUAD_CACHE to a folder for caches") from None


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, for libraries that write files by themselves; it then takes the folder's place."""
    make_folder(folder.parent)
    part, old = _part(folder), _part(folder, EARLIER)
    try:
        with cannot_write(folder):
            part.mkdir()
            yield part
            sync_tree(part)
            if folder.exists():
                os.replace(folder, old)
            os.replace(part, folder)
            sync(folder.parent)
    finally:
        _put_back(old, folder)
        for one in (part, old) if folder.exists() else (part,):
            shutil.rmtree(one, ignore_errors=True)


@contextmanager
def cannot_write(path: Path) -> Iterator[None]:
    """Turn what libraries raise where they cannot write into CannotWrite: torch and safetensors have their own."""
    try:
        yield
    except CannotWrite:
        raise
    except Exception as error:
        if (reason := _reason(error)) is None:
            raise
        raise CannotWrite(Path(reason.filename or path), reason) from error


def remove_parts(folder: Path) -> None:
    """Remove the temporary files that a process left in a folder when it was killed while it wrote.

    A folder that was to be replaced, and has lost its name, gets it back.
    """
    for path in folder.glob(f".*{PART}"):
        if path.name.endswith(EARLIER + PART):
            _put_back(path, folder / path.name.removeprefix(".").removesuffix(EARLIER + PART).rpartition(".")[0])
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _put_back(old: Path, folder: Path) -> None:
    """Give a folder that was to be replaced its name back where nothing has it."""
    with suppress(OSError):
        if old.exists() and not folder.exists():
            os.replace(old, folder)


def is_part(path: Path) -> bool:
    """True if this is a temporary file of ours."""
    return path.name.startswith(".") and path.name.endswith(PART)


def sync_tree(folder: Path) -> None:
    """Have all files under a folder, and the folders, on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Have a file, or a folder's list of names, on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows opens no folders
        return
    number = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def empty_but_for(folder: Path, names: Iterable[str] = ()) -> bool:
    """True if a folder contains nothing other than these names and temporary files of ours, or does not exist."""
    return not folder.is_dir() or all(is_part(path) or path.name in set(names) for path in folder.iterdir())


def _part(path: Path, suffix: str = "") -> Path:
    """A name that no other process writes to at the same time."""
    name = os.fsencode(path.name)[:200].decode(errors="ignore")  # file systems count bytes
    return path.with_name(f".{name}.{secrets.token_hex(4)}{suffix}{PART}")


def _to_disk(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _reason(error: Exception) -> OSError | None:
    """The operating system's reason behind an error, its own or a library's, where that is one of writing."""
    if isinstance(error, OSError):
        return error if error.errno in _OF_WRITING else None
    text = str(error)
    for number in FULL:
        if os.strerror(number) in text or f"os error {number}" in text:
            return OSError(number, os.strerror(number))
    if "PytorchStreamWriter" in text or "inline_container" in text:  # it does not tell why
        return OSError(errno.ENOSPC, "it could not be written to the end (is the disk full?)")
    return None
