"""The backend "triton": kernels for GPUs, written in Triton.

An op's kernels are in the file `triton.py` of its folder. What they share is here: `launch` runs or records one,
`groups` sorts tokens by label. This file imports neither Triton nor anything that does: it reports what is missing.

Triton's interpreter runs the same kernels on CPU tensors, slowly: set TRITON_INTERPRET=1 before Python starts.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from os import environ
from pathlib import Path
from pkgutil import walk_packages

import torch
from torch import Tensor

from subquad.kernels import dispatch as backends
from subquad.kernels.transforms import transform

VERSION = "3.7.1"  # the one that torch 2.13 is built with, if torch does not state it
INTERPRETED = environ.get("TRITON_INTERPRET") == "1"
DTYPES = torch.float32, torch.bfloat16, torch.float16
WIDEST = 256  # of a key or a value: a kernel holds whole vectors
MOST_HEADS = 65535  # of all items: what CUDA allows along the second and third axis of a grid


def usable() -> bool:
    """True if Triton is installed, so that the kernels can be imported."""
    return find_spec("triton") is not None


def installed_version() -> str | None:
    """The version of Triton that is installed; None where none is, or where it came under another name."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def wanted_version() -> str:
    """The version of Triton that the installed torch was built with. Its builds for GPUs require it."""
    for requirement in requires("torch") or []:
        name, equal, version = requirement.partition(";")[0].strip().partition("==")
        if equal and name.strip() == "triton":
            return version.strip()
    return VERSION


def wanted() -> bool:
    """True if the kernels may run here: importing Triton takes half a second, which other installs do not pay."""
    return usable() and (INTERPRETED or torch.version.cuda is not None or torch.version.hip is not None)


def load() -> None:
    """Import the kernels of all ops, which register themselves."""
    for module in walk_packages([str(Path(__file__).parents[1])], "subquad.kernels."):
        if module.name.endswith(".triton") and module.name != __name__:
            import_module(module.name)


def refusal() -> str | None:
    """The reason why the backend cannot run here; None if it can."""
    if not INTERPRETED and torch.version.cuda is None and torch.version.hip is None:
        slowly = "; with TRITON_INTERPRET=1 the kernels run on the CPU, slowly" if usable() else ""
        return f"this build of torch has no GPU support{slowly}"
    if not INTERPRETED and not torch.cuda.is_available():
        return "there is no GPU"
    return None if usable() else f"Triton is not installed: `pip install triton=={wanted_version()}`"


def refusal_of_any_dtype(x: Tensor) -> str | None:
    """The reason why the kernels cannot read this (B,H,N,…) tensor, with any dtype; None if they can."""
    devices = ("cpu",) if INTERPRETED else ("cuda",)
    if x.device.type not in devices and not (x.device.type == "meta" and backends.is_tracing()):
        return f"the tensors are on {x.device}"
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    if exporting and torch.onnx.is_in_onnx_export():
        return "inside torch.onnx.export, and ONNX knows none of the custom ops"
    if not torch.compiler.is_exporting() and x.shape[0] * x.shape[1] > MOST_HEADS:  # an export would be bound to fewer
        return f"there are {x.shape[0] * x.shape[1]:,} heads of all items, and the kernels take at most {MOST_HEADS:,}"
    return transform()


def refusal_of(*tensors: Tensor) -> str | None:
    """Like `refusal_of_any_dtype`, for vectors: (B,H,N,D) tensors of one dtype."""
    for x in tensors:
        reason = refusal_of_any_dtype(x)
        if reason is not None:
            return reason
        if x.dtype not in DTYPES:
            return f"the dtype is {x.dtype}, and the kernels compute in fp32"
        if INTERPRETED and x.dtype == torch.bfloat16:
            return "the dtype is torch.bfloat16, which Triton's interpreter multiplies wrongly"
        if x.shape[-1] > WIDEST:
            return f"vectors have {x.shape[-1]} components, and the kernels hold at most {WIDEST}"
    return None


backends.register("triton", refusal)
