"""Mistakes in what a user asks for, as opposed to mistakes of ours."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Something the user gave does not work; the message is one line with the remedy. Exit code 2."""


@contextmanager
def as_input_error(prefix: str = "") -> Iterator[None]:
    """Turn the ValueErrors and TypeErrors of a checked call on the user's input into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise InputError(prefix + " ".join(str(error).split())) from error
