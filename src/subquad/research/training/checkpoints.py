"""Checkpoints that are known to be whole: which one a run resumes from.

A checkpoint gets a seal, the sizes and checksums of its files, once all of them are written. One without a seal was cut
off while it was written, and is passed over. One whose files differ from its seal is damaged, which is reported.
"""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from subquad.core import checksums as seals
from subquad.core import files
from subquad.core.errors import InputError

CHECKSUMS = "seal.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def write_checksums(checkpoint: Path) -> None:
    """Say that all files of a checkpoint, or of another folder, are written."""
    with files.cannot_write(checkpoint):
        files.sync_tree(checkpoint)
    files.write(checkpoint / CHECKSUMS, seals.sealed_json({"files": _contents(checkpoint)}))


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is sealed; None where there is none, InputError where it is damaged."""
    sealed = _all_sealed(folder)
    if not sealed:
        return None
    if damaged := _damage(sealed[-1]):
        before = f"to resume from {sealed[-2].name}" if len(sealed) > 1 else "to start from the beginning"
        raise InputError(f"{sealed[-1]} is damaged ({damaged}); remove that folder {before}")
    return sealed[-1]


def check(checkpoint: Path) -> None:
    """InputError if the best checkpoint differs from its seal; the message states the difference."""
    if damaged := _damage(checkpoint):
        raise InputError(
            f"{checkpoint}, which has the best weights so far, is damaged ({damaged}); remove it and the later ones to "
            "resume from before it, or start in another folder"
        )


def newest_step(folder: Path) -> int:
    """The step of the newest sealed checkpoint, damaged or not; 0 where there is none."""
    sealed = _all_sealed(folder)
    return step_of(sealed[-1]) if sealed else 0


def check_sealed(folder: Path, remedy: str) -> Path:
    """A folder that was sealed; Damaged, with the remedy at the message's end, where it is not as it was then."""
    if damaged := _damage(folder):
        raise seals.Damaged(folder, damaged, remedy)
    return folder


def discard_unsealed(folder: Path) -> None:
    """Remove checkpoints that were cut off while they were written, or while they were removed."""
    for path in unsealed(folder):
        shutil.rmtree(path)


def unsealed(folder: Path) -> list[Path]:
    """The checkpoints without a seal."""
    return [path for path in _checkpoints(folder) if not (path / CHECKSUMS).exists()]


def discard_all(folder: Path) -> None:
    """Remove all checkpoints of a run that is finished; one that is cut off meanwhile is not sealed any more."""
    for path in _checkpoints(folder):
        (path / CHECKSUMS).unlink(missing_ok=True)
        shutil.rmtree(path)


def has_any(folder: Path) -> bool:
    """Tell whether there are checkpoints, sealed or not."""
    return bool(_checkpoints(folder))


def checkpoint_at(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return folder / f"checkpoint-{step}"


def step_of(checkpoint: Path) -> int:
    """The number of updates that a checkpoint's weights have had."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def _checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]


def _all_sealed(folder: Path) -> list[Path]:
    """The sealed checkpoints, damaged or not, in the order of their steps."""
    return sorted((path for path in _checkpoints(folder) if (path / CHECKSUMS).exists()), key=step_of)


def _sealed(path: Path) -> dict[str, Any] | None:
    """The contents of a seal, `_contents` when it was made; None if it is damaged."""
    try:
        recorded = seals.parsed(path, "")
        if "files" not in recorded:  # as before seals had a digest of their own: each file has one in it
            return {name: (int(size), str(checksum)) for name, (size, checksum) in recorded.items()}
        return seals.opened(recorded, path, "")["files"]
    except (ValueError, TypeError):
        return None


def _contents(checkpoint: Path) -> dict[str, list[int | str]]:
    """{file: [bytes, checksum]}."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and CHECKSUMS not in path.name)
    return {str(path.relative_to(checkpoint)): [path.stat().st_size, _checksum(path)] for path in files}


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _damage(checkpoint: Path) -> str:
    """The damage of a checkpoint in words; "" if there is none."""
    if not (checkpoint / CHECKSUMS).exists():
        return f"{CHECKSUMS} is missing"
    sealed = _sealed(checkpoint / CHECKSUMS)
    if not sealed:
        return f"{CHECKSUMS} is not what was written"
    for name, (size, checksum) in sealed.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _checksum(path) != checksum:
            return f"{name} is not what was written"
    return ""
