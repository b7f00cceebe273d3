"""Measured crossovers: from how many tokens on methods are faster than exact attention on this machine.

`subquad doctor --measure` writes them into a file of the cache folder, and `by-length` reads them there. Each crossover
is stored with everything that decides about it, and holds only where all of that is equal.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from subquad.core import checksums, files
from subquad.core.environment import hardware, versions
from subquad.core.errors import InputError
from subquad.core.reading import exists
from subquad.core.spelling import listed
from subquad.kernels import native

FILE = "crossovers.json"
NOT_REACHED = "not reached"
_MEASURE = "subquad doctor --measure"
_REMEDY = f"`{_MEASURE}` measures again and replaces it"


_TYPES: dict[str, tuple[type, ...]] = {  # of the values in the file
    "machine": (dict,),
    **dict.fromkeys(("method", "dtype", "state"), (str,)),
    **dict.fromkeys(("heads", "head_dim", "shortest", "longest"), (int,)),
    "causal": (bool,),
    "tokens": (int, float, type(None)),
}


@dataclass(frozen=True)
class MeasuredCrossover:
    """From how many tokens on one method is faster than the fastest exact attention, forward."""

    machine: dict[str, str]  # the result of `machine`
    method: str  # its canonical text
    dtype: str
    heads: int
    head_dim: int
    causal: bool
    state: str  # as in a report of `subquad bench`: "at", "at or below", "below the shortest", "not reached"
    tokens: float | None
    shortest: int  # the shortest of the measured lengths
    longest: int

    @property
    def start(self) -> int | None:
        """The number of tokens from which on the method is faster; None if that was not reached."""
        if self.state == NOT_REACHED:
            return None
        return self.shortest if self.tokens is None else math.ceil(self.tokens)

    @property
    def conditions(self) -> str:
        """The dtype, the heads and the mask, in words."""
        causal = ", causal" if self.causal else ""
        return f"{self.dtype}{causal}, {self.heads} heads of {self.head_dim}"


def machine(device: str = "cpu") -> dict[str, str]:
    """Everything on this machine that decides about a crossover on a device."""
    have, installed = hardware(device), versions()
    return {
        "processor": have["processor"],
        "instructions": "none: no compiled kernels" if native.refusal() else native.variant(),
        "threads": have["threads"],
        "torch": installed["torch"],
        "subquad": installed.get("subquad", "not installed"),
        "device": have.get("gpu", torch.device(device).type),
    }


def path() -> Path:
    """The file of all measured crossovers."""
    return files.cache_folder() / FILE


def read_all() -> list[MeasuredCrossover]:
    """The crossovers in the file, of all machines; none if there is no file.

    Raises:
        Damaged: the file is not what `store` wrote, or another version of subquad wrote it.
    """
    file = path()
    if not exists(file):
        return []
    content = checksums.read_json(file, _REMEDY)
    try:
        return [_crossover(entry) for entry in content["crossovers"]]
    except (KeyError, TypeError):
        raise checksums.Damaged(file, "it does not contain crossovers of this version of subquad", _REMEDY) from None


def _crossover(entry: Mapping[str, Any]) -> MeasuredCrossover:
    """A crossover from plain data; TypeError where a value is not of its type."""
    crossover = MeasuredCrossover(**entry)
    for name, kinds in _TYPES.items():
        if type(entry[name]) not in kinds:
            raise TypeError(name)
    if not all(isinstance(text, str) for text in crossover.machine.values()):
        raise TypeError("machine")
    if crossover.tokens is not None and not math.isfinite(crossover.tokens):
        raise TypeError("tokens")
    return crossover


def read_local() -> list[MeasuredCrossover]:
    """The crossovers in the file that hold on this machine, on its processor and its GPU. Raises like `read_all`."""
    machines = _machines()
    return [crossover for crossover in read_all() if crossover.machine in machines]


def store(measured: Sequence[MeasuredCrossover]) -> Path:
    """Add crossovers to the file, in place of all earlier ones of the same methods on the same machine.

    A damaged file is replaced.

    Raises:
        CannotWrite: the disk is full, for example.
    """
    try:
        earlier = read_all()
    except checksums.Damaged:
        earlier = []
    replaced = [(crossover.machine, crossover.method) for crossover in measured]
    kept = [crossover for crossover in earlier if (crossover.machine, crossover.method) not in replaced]
    content = {"crossovers": [asdict(crossover) for crossover in (*kept, *measured)]}
    return files.write(path(), checksums.sealed_json(content))


def measured_start(method: str) -> int:
    """The number of keys from which on a method is faster than exact attention on this machine.

    This is the largest of its crossovers here: a call may have any of the dtypes and masks that were measured.

    Raises:
        InputError: the method was not measured on this machine, was not faster at the longest length, or the file is
            damaged. The message names the command that measures it.
    """
    command = f"{_MEASURE} --methods {shlex.quote(method)}"
    machines, of_method = _machines(), [each for each in read_all() if each.method == method]
    local = [crossover for crossover in of_method if crossover.machine in machines]
    if not local:
        differs = f" ({_difference(of_method[-1].machine, machines[0])})" if of_method else ""
        raise InputError(f"no crossover of {method!r} was measured on this machine{differs}; run `{command}`")
    starts = [crossover.start for crossover in local if crossover.start is not None]
    if len(starts) < len(local):
        slow = next(crossover for crossover in local if crossover.start is None)
        raise InputError(
            f"{method!r} was not faster than exact attention on this machine up to {slow.longest:,} tokens "
            f"({slow.conditions}); give a number of keys, or measure only what you run with `{command}` and its options"
        )
    return max(starts)


def _machines() -> list[dict[str, str]]:
    """This machine, on each of its devices."""
    return [machine(device) for device in ("cpu", *["cuda"] * torch.cuda.is_available())]


def _difference(measured: dict[str, str], here: dict[str, str]) -> str:
    """The differences between the machine of a measurement and this one."""
    names = [name for name in here if measured.get(name) != here[name]]
    earlier = listed([f"{name} {measured.get(name)}" for name in names])
    return f"it was with {earlier}; here: {listed([f'{name} {here[name]}' for name in names])}"
