"""What ran where: versions and hardware."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from subquad.ops import native
from subquad.ops.backends import backends as states
from subquad.ops.backends import chosen_backend

# i-clustered, fp32, 512 to 4,096 tokens, 12 heads of 32, one thread of an AMD EPYC, beside `use_backend("reference")`:
# 13 to 25 times with AVX-512 and VPOPCNTDQ, 8 with AVX2, 4 with the baseline.
_COST = "clustered methods run as plain PyTorch: some 10 times slower, and slower than exact attention at short lengths"


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


def backends() -> dict[str, str]:
    """For each backend, as "backend NAME": what runs, or what is missing, what that costs and the remedy."""
    described = states() | {"reference": "plain PyTorch", "cpu": _cpu_backend()}
    in_use = chosen_backend()
    return {f"backend {name}": f"{'in use: ' * (name == in_use)}{what}" for name, what in described.items()}


def _cpu_backend() -> str:
    reason = native.refusal()
    if reason is not None:
        return f"{reason}. Until then {_COST}"
    others = [name for name in native.variants() if name != native.variant()]
    threads = "OpenMP" if native.has_openmp() else "built without OpenMP: on one thread"
    return f"variant {native.variant()} ({', '.join(others) or 'no other'} could run here too), {threads}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
