"""The installation and subquad's requirements, the processor's abilities, and commands that fix what is wrong."""

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
from subquad.kernels import native, triton
from subquad.tools.doctor import remedies
from subquad.tools.models.dtypes import has_products

_MAPS, _QUOTA = Path("/proc/self/maps"), Path("/sys/fs/cgroup/cpu.max")
_EXTRAS = {"transformers": "hf", "triton": "test"}  # which extra has the floor of a package; the others need none
_SMALLER = "; without a GPU, the CPU build that pytorch.org offers is smaller than the one that this installs"


class Problem(NamedTuple):
    """Something that is wrong here, or slower than it could be, and the command for a shell that fixes it."""

    problem: str
    command: str | None


def required() -> dict[str, str]:
    """For packages with a floor, which versions subquad needs and which it was tested with; none without metadata."""
    needed = {}
    for package in ("torch", "transformers", "triton"):
        least, limit = _floor(package), untested().get(package)
        if least is not None:
            needed[package] = f"needs {least} or later" + (f", tested before {limit}" if limit else "")
    return needed


def described() -> dict[str, str]:
    """Descriptions of the bf16 products of the processor and of the threads of PyTorch and of the kernels."""
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
        command = remedies.install_extra("hf", floors("hf"))
        results.append(Problem("transformers is not installed, which sq.hf and most commands need", command))
    for package, version in installed.items():
        least, limit = _floor(package), untested().get(package)
        tested = ",".join([f">={least}"] * (least is not None) + [f"<{limit}"] * (limit is not None))
        if is_older(version, least):
            problem = f"{package} {version} is older than {least}, the lowest version that works"
        elif is_untested(version, limit):
            problem = f"{package} {version} is newer than the versions that were tested; if something fails, replace it"
        else:
            continue
        results.append(Problem(problem + _about_build(package), remedies.install(package + tested)))
    if torch.cuda.is_available() and platform.system() == "Linux" and not triton.usable():
        command = remedies.install(f"triton=={triton.wanted_version()}")
        results.append(Problem("there is a GPU but no Triton, so that methods run in plain PyTorch on it", command))
    return results


def _about_build(package: str) -> str:
    """The remark on the build of torch that pip installs on Linux by default."""
    by_default = package == "torch" and platform.system() == "Linux" and remedies.clone() is None
    return _SMALLER if by_default and not torch.cuda.is_available() else ""


def _of_kernels() -> list[Problem]:
    """The compiled kernels: missing, or on one thread."""
    in_clone = "" if remedies.clone() else "; in a clone of subquad, build them"
    cause = native.cause()
    if cause is not None:
        problem = Problem(f"{cause}, so that methods run in plain PyTorch{in_clone}", remedies.build_again())
        if native.compiler() is not None:
            return [problem]
        command = remedies.install_compiler()
        by_hand = "; install GCC or Clang first" * (command is None)
        return [Problem(f"there is no C++ compiler, which building the kernels needs{by_hand}", command), problem]
    if platform.system() == "Linux" and not native.has_threads() and cores() > 1:  # elsewhere they never have it
        about = f"the compiled kernels were built without OpenMP and run on one thread{in_clone}"
        return [Problem(about, f"CXX=g++ {remedies.build_again()}")]
    return []


def _of_threads() -> list[Problem]:
    """More threads than cores, fewer than half as many, or two runtimes that start them."""
    results, threads, usable = [], torch.get_num_threads(), cores()
    command = remedies.set_variable("OMP_NUM_THREADS", usable)
    if threads > usable:
        results.append(Problem(f"{threads} threads share {_count(usable, 'core')}", command))
    elif 2 * threads < usable:  # torch takes one a physical core, which may be half of them
        results.append(Problem(f"{_count(threads, 'thread')} of {usable} cores in use", command))
    return [*results, *_of_runtimes()]


def _of_runtimes() -> list[Problem]:
    """Several OpenMP runtimes in this process, unless their waiting threads sleep."""
    runtimes = openmp_runtimes()
    if len(runtimes) < 2 or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return []
    problem = f"{len(runtimes)} OpenMP runtimes are loaded ({', '.join(runtimes)})"
    preloaded = {Path(path).name for path in re.split("[: ]", os.environ.get("LD_PRELOAD", ""))}
    if any(Path(path).name in preloaded for path in runtimes):
        return [Problem(f"{problem}, one of them by LD_PRELOAD", "unset LD_PRELOAD")]
    problem += ", and threads of one that wait keep the cores from those of the other; let them sleep"
    return [Problem(problem, remedies.set_variable("OMP_WAIT_POLICY", "passive"))]


def _products() -> str:
    """A phrase that tells whether this processor has products of bf16, and what follows."""
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
