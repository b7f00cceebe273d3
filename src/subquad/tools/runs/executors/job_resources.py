"""The resources that a job takes of a machine of a cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from subquad.core.errors import InputError
from subquad.core.spelling import instead

SMALLEST = 0.0001  # part of a core or of a GPU
BYTES_PER_SUFFIX = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class JobResources:
    """Cores, GPUs (parts of one too), and bytes of memory of a job."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0

    @property
    def wanted(self) -> dict[str, float]:
        """By Ray's names of what a machine has, without what is not needed."""
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory)}
        return {name: count for name, count in named.items() if count}

    @property
    def options(self) -> dict[str, float]:
        """By Ray's names of what a task asks for."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus} | ({"memory": self.memory} if self.memory else {})

    @classmethod
    def of_machine(cls, has: Mapping[str, float]) -> JobResources:
        """The resources of a machine, as Ray reports them."""
        return cls(has.get("CPU", 0.0), has.get("GPU", 0.0), int(has.get("memory", 0)))

    def __str__(self) -> str:
        parts = [f"cpus={self.cpus:g}"] + ([f"gpus={self.gpus:g}"] if self.gpus else [])
        return ",".join(parts + ([f"memory={self.memory / 10**9:.3g}GB"] if self.memory else []))


def read_resources(text: str | None, device: str) -> JobResources:
    """Resources as "cpus=2,gpus=1,memory=8GB"; a job on a GPU uses one by default.

    >>> str(read_resources("cpus=4,memory=500MB", "cuda"))
    'cpus=4,gpus=1,memory=0.5GB'

    Raises:
        InputError: an unknown resource, or an amount that is not one.
    """
    resources, named = JobResources(gpus=0.0 if device == "cpu" else 1.0), set[str]()
    for item in text.split(",") if text else []:
        name, _, amount = (piece.strip() for piece in item.partition("="))
        if name in named:
            raise InputError(f"--resources {text}: {name} is given twice")
        named.add(name)
        if name not in ("cpus", "gpus", "memory"):
            raise InputError(f"--resources has no {name!r}{instead(name, ('cpus', 'gpus', 'memory'), '', 'it has')}")
        value: Any = _bytes(amount) if name == "memory" else _count(name, amount)
        resources = replace(resources, **{name: value})
    return resources


def _count(name: str, amount: str) -> float:
    try:
        count = float(amount)
    except ValueError:
        count = -1.0
    if not (0 <= count < 1e6) or (name == "cpus" and count == 0):
        least = "more than 0" if name == "cpus" else "at least 0"
        raise InputError(f"--resources {name}={amount}: it must be a number, {least}")
    if (count > 1 and not count.is_integer()) or 0 < count < SMALLEST:  # Ray shares out no other parts
        raise InputError(f"--resources {name}={amount}: it must be a whole number, or a part of one from {SMALLEST} on")
    return count


def _bytes(amount: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", amount, re.IGNORECASE)
    if match is None:
        raise InputError(f"--resources memory={amount}: write it as 500MB or 8GB")
    return int(float(match[1]) * BYTES_PER_SUFFIX[(match[2] or "").upper()])
