"""One run at a time in a folder."""

import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from subquad.core import files
from subquad.core.errors import InputError
from subquad.core.reading import exists

LOCK, HOLDER, BEGUN = ".subquad.lock", ".subquad.run", ".subquad.begun"  # `BEGUN`: its settings, until it is finished
RUNNING = (LOCK, HOLDER, BEGUN)  # what a run has in its folder while it runs


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """In the block, no other run of subquad works in this folder, which is made if need be.

    The operating system holds the lock and lets it go when the process ends, however it ends. Files that a killed run
    was writing are removed.

    Raises:
        InputError: another run works there; the message names it. Or the folder is a file, or cannot be written to.
    """
    if exists(folder) and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    files.make_folder(folder)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(f"{folder} is in use by {_holder(folder)}; wait for its end, or give another folder") from None
    except OSError as error:  # not writable, or a file system without locks
        raise files.CannotWrite(folder, error) from error
    try:
        files.remove_parts(folder)
        files.write(folder / HOLDER, json.dumps(_mine()))
        yield
    finally:
        with suppress(OSError):
            for name in (HOLDER, LOCK):  # while the lock is held: a process that comes later makes a new one
                (folder / name).unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # as soon as one is not empty
            for path in made:
                path.rmdir()


def _mine() -> dict[str, str | int]:
    return {
        "process": os.getpid(),
        "computer": platform.node(),
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
        "command": " ".join(["subquad", *sys.argv[1:2]]),
    }


def _holder(folder: Path) -> str:
    """The process that has the lock, if known."""
    try:
        holder = json.loads((folder / HOLDER).read_text())
        return f"{holder['command']}, process {holder['process']} on {holder['computer']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it begins or ends at this moment
        return "another run"
