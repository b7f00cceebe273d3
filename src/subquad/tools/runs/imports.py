"""Modules that register methods which no installed package declares: `--import`, for a command and its workers."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from subquad.core.errors import as_input_error
from subquad.methods.core.plugins import IMPORTED, import_modules, listed_modules


@contextmanager
def importing(modules: Sequence[str]) -> Iterator[None]:
    """Import modules, from the working folder too; processes that start in the block import them as well.

    Raises:
        InputError: one of them cannot be imported; names it.
    """
    before = os.environ.get(IMPORTED)
    wanted = tuple(dict.fromkeys([*listed_modules(), *modules]))
    if wanted:
        os.environ[IMPORTED] = ",".join(wanted)
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    try:
        with as_input_error():
            import_modules(wanted)
        yield
    finally:
        if before is not None:
            os.environ[IMPORTED] = before
        elif wanted:
            del os.environ[IMPORTED]


def as_options() -> list[str]:
    """The words of a command line that imports the same modules."""
    return [word for module in listed_modules() for word in ("--import", module)]
