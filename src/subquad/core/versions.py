"""Replacements for what older versions of torch, Triton and transformers lack: all that supporting them costs.

Each part names what differs, since which version, and with which floor in pyproject.toml it can go.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from subquad.core.requirements import release

TORCH = release(torch.__version__)

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
    """The processor's capabilities, named as by `torch.cpu.get_capabilities`; before torch 2.11, only its products."""
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    return {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx_tile": torch.cpu._is_amx_tile_supported(),
        "amx_bf16": torch.cpu._is_amx_tile_supported(),
        "amx_fp16": torch.cpu._is_amx_fp16_supported(),
    }


# ---------------------------------------------------------------------- Triton before 3.7; can go with triton>=3.7


def let_scalars_be_indices(interpreter: Any) -> None:
    """Have `triton.runtime.interpreter` end loops at loaded numbers: arrays of one, which NumPy refuses."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor


# ---------------------------------------------------------------------- transformers before 5.11; can go with >=5.11


class LayerOfCache:
    """A base of a cache's layers, for the name that `get_max_length` had."""

    def get_max_cache_shape(self) -> int:
        """The result of `get_max_length`."""
        length: int = self.get_max_length()  # type: ignore[attr-defined]
        return length


def records_past(layer: Any) -> bool:
    """True if a windowed layer of a cache keeps what is behind the window, which no layer did."""
    return bool(getattr(layer, "record_past", False))


def let_attention_be_set(model_class: Any) -> None:
    """Have a model class report that its attention can be set, whatever it found before in its file."""
    model_class._can_set_attn_implementation_cached_value = True
    asked = model_class._can_set_attn_implementation.__func__
    if "_can_set_attn_implementation_cached_value" not in asked.__code__.co_names:
        model_class._can_set_attn_implementation = classmethod(lambda cls: True)


# ---------------------------------------------------------------------- transformers before 5.13; can go with >=5.13

ModelClass = TypeVar("ModelClass", bound=type[Any])


def loading_shared_modules(model_class: ModelClass) -> ModelClass:
    """Have transformers load a model's weights into modules that its parts share.

    It did so for classes that were registered as code of their own, and made new weights for the others.
    """
    if not hasattr(model_class, "is_custom_code"):
        model_class.is_remote_code = classmethod(lambda cls: True)
    return model_class


# ---------------------------------------------------------------------- transformers before 5.20; can go with >=5.20


def set_attention_in_parts(model: Any, change: Any, implementation: Any) -> None:
    """Set a model's attention in its parts too, after transformers did so with `change`.

    It left out the parts that have another config of the same class, such as T5's encoder and decoder.
    """
    if "_attn_was_changed" not in change.__code__.co_consts or not isinstance(implementation, str):
        return
    for part in model.modules():
        config = part.config if hasattr(part, "get_correct_attn_implementation") else model.config
        if config is not model.config and type(config) is type(model.config):
            config._attn_implementation_internal = part.get_correct_attn_implementation(implementation)


# ---------------------------------------------------------------------- transformers before 5.24; can go with >=5.24

NAMES_OF_CACHE = ("cache", "past_key_values")  # of the argument that holds keys and values, since 5.24 and before


def cache_in(inputs: Mapping[str, Any]) -> Any:
    """The cache of keys and values among the arguments of a forward pass; None without one."""
    held = (inputs.get(name) for name in NAMES_OF_CACHE)  # Flaubert's `cache` is a dict of something else
    return next((cache for cache in held if hasattr(cache, "get_seq_length")), None)


def name_of_cache(function: Callable[..., Any]) -> str:
    """The name of the argument by which a function takes a cache of keys and values.

    Raises:
        TypeError: it takes none.
    """
    for name in NAMES_OF_CACHE:
        if name in inspect.signature(function).parameters:
            return name
    raise TypeError(f"{function.__qualname__} takes no cache of keys and values ({' or '.join(NAMES_OF_CACHE)})")
