"""What a run says beside its progress: the time that it takes, the files that it reads, what a user should know."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.data.texts import folder_lines


def expect(progress: Any, work: Sequence[float] = (), seconds: float | None = None) -> None:
    """Tell `progress` how much work each unit is, in proportion, or after how many seconds the run ends.

    A progress that is a plain function is not told.
    """
    listens = getattr(progress, "expect", None)
    if listens is not None:
        listens(work, seconds)


def remark(progress: Any, line: str) -> None:
    """Tell `progress` a line for the user; one that is a plain function is not told."""
    listens = getattr(progress, "remark", None)
    if listens is not None:
        listens(line)


def remark_folders(progress: Any, paths: Sequence[Path]) -> None:
    """Tell `progress` which files of the folders among some paths are read, and which are not."""
    for line in folder_lines(paths):
        remark(progress, line)
