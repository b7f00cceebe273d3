"""What a run says beforehand of the time that it takes, to what shows its progress."""

from collections.abc import Sequence
from typing import Any


def expect(progress: Any, work: Sequence[float] = (), seconds: float | None = None) -> None:
    """Tell `progress` how much work each unit is, in proportion, or after how many seconds the run ends.

    A progress that is a plain function is not told.
    """
    listens = getattr(progress, "expect", None)
    if listens is not None:
        listens(work, seconds)
