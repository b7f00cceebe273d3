"""The versions and the hardware with which something was made, and their differences from those present."""

import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

DECIDES = ("subquad", "torch", "transformers", "processor", "cores", "threads", "cpu_capability", "gpu")  # speed
OUTPUT = ("subquad", "torch", "transformers")  # packages of which a minor version may change a model's output


def versions() -> dict[str, str]:
    """Versions of everything that results depend on; packages that are not installed are left out."""
    packages = ("subquad", "torch", "triton", "transformers", "scikit-learn", "matplotlib")
    installed = {package: number for package in packages if (number := _version_of(package)) is not None}
    return {"python": platform.python_version(), **installed}


def hardware(device: str = "cpu") -> dict[str, str]:
    """Processor, cores, torch's threads and CPU capability; the GPU and its architecture where one is used."""
    described = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.device(device).type == "cuda" and torch.cuda.is_available():  # else other machines have GPUs
        described |= {"gpu": torch.cuda.get_device_name(device), "gpu_architecture": gpu_architecture()}
    return described


@cache
def gpu_architecture() -> str:
    """The architecture of the GPU here, such as "sm_90" or "gfx942"; "" where there is none."""
    if not torch.cuda.is_available():
        return ""
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(0))


def differences(made_on: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Differences from the present environment that affect the speed: {name: (recorded, present)}.

    `made_on` has "versions" and "hardware", as the functions above return them. Missing entries count as equal.
    """
    recorded: dict[str, Any] = {}
    for part in ("versions", "hardware"):
        part_of_record = made_on.get(part)
        recorded |= part_of_record if isinstance(part_of_record, dict) else {}
    here = versions() | hardware("cuda" if "gpu" in recorded and torch.cuda.is_available() else "cpu")
    return {
        what: (str(recorded[what]), here.get(what, "none"))
        for what in DECIDES
        if what in recorded and str(recorded[what]) != here.get(what, "none")
    }


def output_versions() -> dict[str, str]:
    """Versions of the packages that decide the output of a model whose attention was swapped."""
    return {package: number for package, number in versions().items() if package in OUTPUT}


def changed_versions(recorded: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Packages that decide the output and have another major or minor version here: {package: (there, here)}.

    Patch versions and builds ("2.13.1+cpu") do not count.
    """
    here = output_versions()
    return {
        package: (str(recorded[package]), here.get(package, "none"))
        for package in OUTPUT
        if package in recorded and _minor(str(recorded[package])) != _minor(here.get(package, "none"))
    }


@cache  # reading it takes milliseconds, and every swap records the versions
def _version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _minor(version_text: str) -> list[str]:
    return version_text.partition("+")[0].split(".")[:2]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
