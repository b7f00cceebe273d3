"""What older versions of torch and transformers lack: all that supporting them costs.

Each part names what differs, since which version, and with which floor in pyproject.toml it can go.
"""

import re
from typing import Any

import torch

TORCH = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])

# ---------------------------------------------------------------------- torch before 2.13; can go with torch>=2.13

# There, Dynamo cannot trace `torch.sym_min` of numbers that it knows. It traces `min`, as `torch.sym_min` where it does
# not know them; in other tracers `min` would decide which number is less, and the program be wrong if the other one is.
if TORCH >= (2, 13):
    sym_min, sym_max = torch.sym_min, torch.sym_max
else:

    def sym_min(a: Any, b: Any) -> Any:
        """`torch.sym_min`, which Dynamo can trace."""
        return min(a, b) if torch.compiler.is_dynamo_compiling() else torch.sym_min(a, b)

    def sym_max(a: Any, b: Any) -> Any:
        """`torch.sym_max`, which Dynamo can trace."""
        return max(a, b) if torch.compiler.is_dynamo_compiling() else torch.sym_max(a, b)


# ---------------------------------------------------------------------- torch before 2.11; can go with torch>=2.11


def cpu_capabilities() -> dict[str, Any]:
    """What the processor can do, as `torch.cpu.get_capabilities` names it; before torch 2.11, only its products."""
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    return {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx_tile": torch.cpu._is_amx_tile_supported(),
        "amx_bf16": torch.cpu._is_amx_tile_supported(),
        "amx_fp16": torch.cpu._is_amx_fp16_supported(),
    }


# ---------------------------------------------------------------------- transformers before 5.11; can go with >=5.11


class LayerOfCache:
    """A base of a cache's layers, for the name that `get_max_length` had."""

    def get_max_cache_shape(self) -> int:
        """What `get_max_length` returns."""
        length: int = self.get_max_length()  # type: ignore[attr-defined]
        return length


def records_past(layer: Any) -> bool:
    """Whether a windowed layer of a cache keeps what is behind the window, which none did."""
    return bool(getattr(layer, "record_past", False))


def let_attention_be_set(model_class: Any) -> None:
    """Have a model class report that its attention can be set, whatever it found before in its file."""
    model_class._can_set_attn_implementation_cached_value = True
    asked = model_class._can_set_attn_implementation.__func__
    if "_can_set_attn_implementation_cached_value" not in asked.__code__.co_names:
        model_class._can_set_attn_implementation = classmethod(lambda cls: True)
