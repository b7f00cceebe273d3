"""Which implementations of the ops there are, and which one runs.

`reference` is plain PyTorch, on any device: the truth. Compiled backends (`cpu`, `triton`) must equal it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from subquad.ops import native

# name -> says why it cannot run here, or None when it can
_REFUSALS: dict[str, Callable[[], str | None]] = {
    "reference": lambda: None,
    "cpu": native.refusal,
    "triton": lambda: "this version of subquad has no Triton kernels",
}
_FASTEST_FIRST = ("triton", "cpu")
_forced: ContextVar[str | None] = ContextVar("subquad_backend", default=None)
_open_blocks: list[str] = []  # of `use_backend`, in all threads: what torch.compile can read


def backends() -> dict[str, str]:
    """Every backend with "available", or the reason why it cannot run here.

    >>> backends()["reference"]
    'available'
    """
    return {name: refusal() or "available" for name, refusal in _REFUSALS.items()}


def choose(**refusals: str | None) -> str:
    """The backend for one call: the fastest that runs here and takes it, "reference" if none does.

    Args:
        refusals: For each compiled backend that has the op, why it cannot take this call, or None when it can.

    Raises:
        ValueError: the backend forced by `use_backend` cannot take this call (with the reason).

    >>> choose(cpu="the tensors are on cuda:0")
    'reference'
    """
    forced = _forced_now()
    if forced is None:
        return next((name for name in _FASTEST_FIRST if _takes(name, refusals)), "reference")
    if forced != "reference":
        reason = refusals.get(forced, "it does not have this op")
        if reason is not None:
            raise ValueError(f"backend {forced!r} cannot run this call: {reason}")
    return forced


def chosen_backend() -> str:
    """The backend that ops run on now: the one forced, else the fastest available."""
    return choose(triton=None, cpu=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force one backend inside the block, in this thread or task only.

    A function compiled by `torch.compile` follows blocks too, but those of all threads: it takes the block opened last.

    Raises:
        ValueError: there is no such backend, or it cannot run here (with the reason).
    """
    if name not in _REFUSALS:
        raise ValueError(f"no backend {name!r}; there are {', '.join(_REFUSALS)}")
    reason = _REFUSALS[name]()
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot run here: {reason}")
    token = _forced.set(name)
    _open_blocks.append(name)
    try:
        yield
    finally:
        _open_blocks.remove(name)
        _forced.reset(token)


def _forced_now() -> str | None:
    if torch.compiler.is_compiling():  # Dynamo cannot read a ContextVar; of a global, it compiles again after a change
        return _open_blocks[-1] if _open_blocks else None
    return _forced.get()


def _takes(name: str, refusals: dict[str, str | None]) -> bool:
    return name in refusals and refusals[name] is None and _REFUSALS[name]() is None
