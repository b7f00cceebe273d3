"""Mistakes in what a user asks for, as opposed to mistakes of ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class InputError(ValueError):
    """Something the user gave does not work; the message is one line with the remedy. Exit code 2."""


class Ended(InputError):
    """Training ended early in the process that raises this; its checkpoints are kept."""


class NothingToLearn(InputError):
    """Calibration of a method that is exact on what it is to be calibrated on."""


@contextmanager
def as_input_error(prefix: str = "") -> Iterator[None]:
    """Turn the ValueErrors and TypeErrors of a checked call on the user's input into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise InputError(prefix + " ".join(str(error).split())) from error


def is_out_of_memory(error: Exception) -> bool:
    """True if Python, NumPy, torch's CPU allocator or a GPU ran out of memory."""
    marks = ("can't allocate memory", "out of memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(mark in str(error) for mark in marks)


def not_installed(package: str, extra: str) -> str:
    """The message about a package that an extra brings."""
    return (
        f"{package} is not installed: pip install -c constraints.txt {_clone(extra)} in a clone of subquad, or "
        f"pip install 'subquad-….whl[{extra}]'"
    )


def too_old(package: str, installed: str, least: str, extra: str) -> str:
    """The message about a package that is installed in a version that is too old; "" if no extra brings it."""
    return (
        f"{package} {installed} is installed, but subquad needs {least} or later: pip install -c constraints.txt "
        f"{_clone(extra)} in a clone of subquad"
    )


def _clone(extra: str) -> str:
    """The argument of `pip install` that installs an extra in a clone."""
    return f"'.[{extra}]'" if extra else "."


def check_least(settings: object, **least: int) -> None:
    """ValueError where a setting is less than the least that it may be, each given by its name."""
    for name, minimum in least.items():
        if getattr(settings, name) < minimum:
            raise ValueError(f"{name}={getattr(settings, name)}, but it must be at least {minimum}")


def check_device(device: str) -> None:
    """InputError where nothing can be put on this device."""
    try:
        torch.zeros(1, device=device).item()  # a meta tensor has no value
    except (RuntimeError, AssertionError) as error:  # torch raises either, by how the device is missing
        raise InputError(f"no device {device!r} here: {str(error).splitlines()[0]}") from None
