"""Messages of a run other than its progress: its duration, and lines for the user."""

from collections.abc import Sequence
from typing import Any


def expect(progress: Any, amounts: Sequence[float] = (), seconds: float | None = None) -> None:
    """Tell `progress` how much work each unit is, in proportion, or after how many seconds the run ends.

    A progress that is a plain function is not told.
    """
    listens = getattr(progress, "expect", None)
    if listens is not None:
        listens(amounts, seconds)


def note(progress: Any, line: str) -> None:
    """Tell `progress` a line for the user; one that is a plain function is not told."""
    listens = getattr(progress, "note", None)
    if listens is not None:
        listens(line)
