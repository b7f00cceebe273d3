"""The steps of a worker with a job: check that it is on the right machine, run it, and report how it ended."""

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
from subquad.tools.runs.jobs import silent


@dataclass(frozen=True)
class WorkerEnvironment:
    """The requirements of a worker's machine, and how the worker sets itself up.

    Attributes:
        folder: the working folder of the process that started the job; relative paths are read from there.
        versions: versions of the packages that results depend on.
        threads: number of torch's threads.
        device: the device that the job computes on.
        hardware: the hardware that a job which measures time must run on; None if any will do.
        modules: modules that register methods of no installed package.
    """

    folder: str
    versions: dict[str, str]
    threads: int
    device: str
    hardware: dict[str, str] | None = None
    modules: tuple[str, ...] = ()

    @classmethod
    def current(cls, device: str, threads: int, timed: bool) -> WorkerEnvironment:
        """The requirements that this machine and this process meet."""
        return cls(os.getcwd(), versions(), threads, device, hardware(device) if timed else None, listed_modules())

    def apply(self) -> None:
        """Set the number of threads and the working folder. InputError where this machine differs."""
        torch.set_num_threads(self.threads)
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        _check_same("versions", self.versions, versions())
        if self.hardware is not None:
            _check_same("hardware", self.hardware, hardware(self.device))


@dataclass(frozen=True)
class JobFailure:
    """An error of a job, as plain data: errors of libraries do not always survive pickling."""

    kind: str
    message: str
    traceback: str
    is_input_error: bool


def attempt(call: bytes, environment: WorkerEnvironment) -> Any:
    """The result of a pickled call that takes a progress, or how it failed."""
    try:
        environment.apply()
        with importing(environment.modules):
            return pickle.loads(call)(silent)
    except Exception as error:
        message = " ".join(str(error).split())
        return JobFailure(type(error).__name__, message, traceback.format_exc(), isinstance(error, InputError))


def _check_same(what: str, wanted: dict[str, str], actual: dict[str, str]) -> None:
    """InputError names the first thing that is another on this machine."""
    for name, value in wanted.items():
        if actual.get(name) != value:
            raise InputError(
                f"the worker on {platform.node()} has {name} {actual.get(name, 'none')}, but the run began with "
                f"{value}: all machines of a run must have the same {what}"
            )
