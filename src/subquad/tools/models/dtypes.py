"""The dtypes that a model is run in, by the short names of the command line."""

import torch
from torch import nn

from subquad.core.versions import cpu_capabilities

FP32 = "fp32"
TORCH = {FP32: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def has_products(device: str, dtype: str) -> bool:
    """True if the device multiplies matrices of this dtype faster than fp32.

    A GPU does. A CPU does with instructions for it, as those of AVX512-BF16, AVX512-FP16, AMX, or Arm's extensions.
    """
    if dtype == FP32 or not device.startswith("cpu"):
        return True
    return any(dtype in name and able is True for name, able in cpu_capabilities().items())


def has_tiles(device: str, dtype: str) -> bool:
    """True if the device is a processor that multiplies tiles of this dtype, by Intel's AMX."""
    return device.startswith("cpu") and cpu_capabilities().get(f"amx_{dtype}") is True


def short_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, or torch's own where it has none."""
    return next((name for name, each in TORCH.items() if each == dtype), str(dtype).removeprefix("torch."))


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the floating-point weights of a model another dtype; buffers, as RoPE's frequencies, stay as they are."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
