"""Passes that an audit makes itself: the layers run their methods or exact attention, and nothing is counted."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

_here = threading.local()  # services call one model from several threads


def uncounted() -> Literal["method", "exact"] | None:
    """The attention that the layers run in the current pass of an audit in this thread; None outside of such a pass."""
    return getattr(_here, "mode", None)


@contextmanager
def running_method() -> Iterator[None]:
    """Layers run their methods, and nothing is counted."""
    with _pass("method"):
        yield


@contextmanager
def running_exactly() -> Iterator[None]:
    """Layers run exact attention, and nothing is counted."""
    with _pass("exact"):
        yield


@contextmanager
def _pass(mode: Literal["method", "exact"]) -> Iterator[None]:
    _here.mode = mode
    try:
        yield
    finally:
        _here.mode = None
