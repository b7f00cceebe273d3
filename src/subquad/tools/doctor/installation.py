"""What is installed against what subquad needs, what the processor can do, and the command that fixes what is wrong."""

import math
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from subquad.core.environment import versions
from subquad.core.requirements import floors, is_older, is_untested, untested
from subquad.kernels import native
from subquad.tools.models.dtypes import has_products

_MAPS, _QUOTA = Path("/proc/self/maps"), Path("/sys/fs/cgroup/cpu.max")
_EXTRAS = {"transformers": "hf", "triton": "test"}  # which extra has the floor of a package; the others need none
_IN_CLONE = "pip install -c constraints.txt"


class Problem(NamedTuple):
    """Something that is wrong here, or slower than it could be, and one command that fixes it."""

    problem: str
    command: str


def required() -> dict[str, str]:
    """For packages with a floor, which versions subquad needs and which it was tested with; none without metadata."""
    needed = {}
    for package in ("torch", "transformers", "triton"):
        least, limit = _floor(package), untested().get(package)
        if least is not None:
            needed[package] = f"needs {least} or later" + (f", tested before {limit}" if limit else "")
    return needed


def described() -> dict[str, str]:
    """What the processor multiplies, and the threads of PyTorch and of the kernels."""
    return {"bf16": _products(), "openmp": _threads()}


def problems(installed: Mapping[str, str] | None = None) -> list[Problem]:
    """Everything that is wrong here; of the packages that are installed, by default."""
    installed = versions() if installed is None else installed
    return [*_of_packages(installed), *_of_kernels(), *_of_threads()]


def _floor(package: str) -> str | None:
    return floors(_EXTRAS.get(package, "")).get(package)


def _of_packages(installed: Mapping[str, str]) -> list[Problem]:
    """Packages that are missing, too old or newer than the tested ones."""
    results = []
    if "transformers" not in installed:
        command = f"{_IN_CLONE} '.[hf]'"
        results.append(Problem("transformers is not installed, which sq.hf and most commands need", command))
    for package, version in installed.items():
        least, limit = _floor(package), untested().get(package)
        if is_older(version, least):
            command = f"pip install '{package}>={least}'"
            results.append(
                Problem(f"{package} {version} is older than {least}, the lowest version that works", command)
            )
        elif is_untested(version, limit):
            command = f"pip install '{package}<{limit}', if something fails"
            results.append(Problem(f"{package} {version} is newer than the versions that were tested", command))
    return results


def _of_kernels() -> list[Problem]:
    """The compiled kernels: missing, or on one thread."""
    reason = native.refusal()
    if reason is not None:
        cause, _, command = reason.partition(": ")
        return [Problem(f"{cause}, so that methods run in plain PyTorch", command)]
    if not native.has_threads() and cores() > 1:
        command = "CXX=g++ pip install -v --force-reinstall --no-deps ."
        return [Problem("the compiled kernels were built without OpenMP and run on one thread", command)]
    return []


def _of_threads() -> list[Problem]:
    """More threads than cores, fewer than half as many, or two runtimes that start them."""
    results, threads, usable = [], torch.get_num_threads(), cores()
    if threads > usable:
        results.append(Problem(f"{threads} threads share {_count(usable, 'core')}", f"export OMP_NUM_THREADS={usable}"))
    elif 2 * threads < usable:  # torch takes one a physical core, which may be half of them
        results.append(
            Problem(f"{_count(threads, 'thread')} of {usable} cores in use", f"export OMP_NUM_THREADS={usable}")
        )
    runtimes = openmp_runtimes()
    if len(runtimes) > 1:
        problem = f"{len(runtimes)} OpenMP runtimes are loaded, whose threads share the cores: {', '.join(runtimes)}"
        results.append(Problem(problem, "pip install -v --force-reinstall --no-deps . (in subquad's folder)"))
    return results


def _products() -> str:
    """Whether this processor multiplies bf16, and what follows."""
    if has_products("cpu", "bf16"):
        return "this processor has products of bf16"
    return "this processor has no products of bf16, which is slower than fp32 here: use fp32"


def _threads() -> str:
    """OpenMP's threads against cores."""
    setting = os.environ.get("OMP_NUM_THREADS")
    from_user = f", OMP_NUM_THREADS={setting}" if setting else ""
    return f"{_count(torch.get_num_threads(), 'thread')} for {_count(cores(), 'core')}{from_user}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def cores() -> int:
    """The cores that this process may use: of the machine, those it is bound to, and a container's share of them."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, min(bound, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return bound


def openmp_runtimes() -> list[str]:
    """The files of the OpenMP runtimes in this process, on Linux; nothing elsewhere."""
    if platform.system() != "Linux":
        return []
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return []
    paths = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if re.match(r"lib(gomp|omp|iomp5)\b", Path(path).name))
