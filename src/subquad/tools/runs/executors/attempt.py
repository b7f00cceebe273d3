"""What a worker does with a piece of work: look whether it is where it should be, run it, and say how it ended."""

from __future__ import annotations

import os
import pickle
import platform
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from subquad.core.environment import hardware, versions
from subquad.core.errors import InputError
from subquad.methods.core.plugins import listed_modules
from subquad.tools.runs.imports import importing


@dataclass(frozen=True)
class Place:
    """What the machine of a worker must be like.

    Attributes:
        folder: the working folder of the process that started the work; relative paths are read from there.
        versions: of the packages that results depend on.
        threads: of torch.
        device: which the work computes on.
        hardware: what a work that measures time must run on; None where any will do.
        modules: which register methods of no installed package.
    """

    folder: str
    versions: dict[str, str]
    threads: int
    device: str
    hardware: dict[str, str] | None = None
    modules: tuple[str, ...] = ()

    @classmethod
    def like_here(cls, device: str, threads: int, timed: bool) -> Place:
        """A machine like this one, as far as that matters."""
        return cls(os.getcwd(), versions(), threads, device, hardware(device) if timed else None, listed_modules())

    def take(self) -> None:
        """Set the number of threads and the working folder. InputError where this machine differs."""
        torch.set_num_threads(self.threads)
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        _check_same("versions", self.versions, versions())
        if self.hardware is not None:
            _check_same("hardware", self.hardware, hardware(self.device))


@dataclass(frozen=True)
class Failed:
    """An error of a piece of work, as plain data: errors of libraries do not always survive pickling."""

    kind: str
    message: str
    traceback: str
    of_the_user: bool


def attempt(call: bytes, place: Place) -> Any:
    """The result of a pickled call that takes a progress, or how it failed."""
    try:
        place.take()
        with importing(place.modules):
            return pickle.loads(call)(_silent)
    except Exception as error:
        message = " ".join(str(error).split())
        return Failed(type(error).__name__, message, traceback.format_exc(), isinstance(error, InputError))


def _silent(what: str, done: int, total: int) -> None:
    """A progress that nobody watches: the process that started the work counts works."""


def _check_same(what: str, wanted: dict[str, str], found: dict[str, str]) -> None:
    """InputError names the first thing that is another on this machine."""
    for name, value in wanted.items():
        if found.get(name) != value:
            raise InputError(
                f"the worker on {platform.node()} has {name} {found.get(name, 'none')}, but the run began with "
                f"{value}: all machines of a run must have the same {what}"
            )
