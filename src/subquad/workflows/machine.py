"""What ran where: versions and hardware."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """Versions of everything that results depend on; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in ("subquad", "torch", "transformers", "scikit-learn", "matplotlib"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware(device: str = "cpu") -> dict[str, str]:
    """Processor, cores, torch's threads and CPU capability; the GPU where one is used."""
    described = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.device(device).type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
    return described


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
