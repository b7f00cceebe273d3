"""The sequence of calls that are not given one: `with sq.parallel.use(of):`."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from subquad.parallel.sequence import Sequence

_current: ContextVar[Sequence | None] = ContextVar("subquad_sequence", default=None)


@contextmanager
def use(of: Sequence | None) -> Iterator[None]:
    """Take `parallel=of` for every call of attention inside the block that is not given its own.

        with sq.parallel.use(of):
            model(of.shard(input_ids), …)

    Blocks may be nested, and the innermost one counts; `use(None)` inside one means that tokens are not split.
    """
    token = _current.set(of)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Sequence | None:
    """The sequence of the innermost block; None outside of all."""
    return _current.get()
