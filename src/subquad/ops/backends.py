"""Which implementations of the ops there are, and which one runs.

`reference` is plain PyTorch, on any device: the truth. Compiled backends (`cpu`, `triton`) must equal it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# name -> why it cannot run here, or None when it can
_REFUSALS: dict[str, str | None] = {
    "reference": None,
    "cpu": "this version of subquad has no compiled CPU kernels",
    "triton": "this version of subquad has no Triton kernels",
}
_forced: ContextVar[str | None] = ContextVar("subquad_backend", default=None)


def backends() -> dict[str, str]:
    """Every backend with "available", or the reason why it cannot run here.

    >>> backends()["reference"]
    'available'
    """
    return {name: reason or "available" for name, reason in _REFUSALS.items()}


def chosen_backend() -> str:
    """The backend that ops run on now: the one forced, else the fastest available."""
    available = [name for name in ("triton", "cpu", "reference") if _REFUSALS[name] is None]
    return _forced.get() or available[0]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force one backend inside the block, in this thread or task only.

    Raises:
        ValueError: there is no such backend, or it cannot run here (with the reason).
    """
    if name not in _REFUSALS:
        raise ValueError(f"no backend {name!r}; there are {', '.join(_REFUSALS)}")
    reason = _REFUSALS[name]
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot run here: {reason}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
