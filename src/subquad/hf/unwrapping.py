"""Find the transformers model inside objects that hold one, which every function of `sq.hf` takes.

Nothing is imported for this: what is around a model is recognised by its attributes and its class's name.
"""

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.methods import BoundMethod

AnyModel: TypeAlias = Any  # a PreTrainedModel, or a wrapper around one: see `transformers_model`

_EXPECTED = (
    "expected a transformers PreTrainedModel or a wrapper around one (a SentenceTransformer, CrossEncoder, pipeline, "
    "PeftModel, DataParallel or other module)"
)
_WRAPPED_TOO_EARLY = {
    "OptimizedModule": "it is compiled: swap before compiling (torch.compile), or give the model that was compiled",
    "ScriptModule": "it is a TorchScript module: swap before torch.jit.trace or torch.jit.script",
    "FullyShardedDataParallel": "its parameters are sharded: swap before wrapping it in FullyShardedDataParallel",
}


def transformers_model(wrapped: AnyModel) -> PreTrainedModel:
    """Return the transformers model inside a wrapper; a transformers model is returned as it is.

    It is searched in modules of any kind (SentenceTransformer, CrossEncoder, PeftModel, DataParallel,
    DistributedDataParallel, modules of the user) and in transformers' pipelines.

    Raises:
        TypeError: there is no transformers model in it, there are several, or it was wrapped in what cannot be changed
            any more; the message states what was given and what to give.
    """
    if isinstance(wrapped, PreTrainedModel):
        return wrapped
    if isinstance(wrapped, str | os.PathLike):
        raise TypeError(
            f"expected a model, got {os.fspath(wrapped)!r}: load it first, with transformers' "
            "AutoModel.from_pretrained or what else loads it, and give the model"
        )
    if isinstance(wrapped, type):
        raise TypeError(f"expected a model, got the class {wrapped.__name__}; give an instance of it")
    kind, module = type(wrapped).__name__, _module_of(wrapped)
    if not isinstance(module, nn.Module):
        raise TypeError(f"{_EXPECTED}, got {kind}{_hint(wrapped)}")
    candidates = {model: name for name, model in _outermost(module, "")}
    if not candidates:
        raise TypeError(f"{_EXPECTED}, got {kind} with no PreTrainedModel in it{_hint(module)}")
    if len(candidates) > 1:
        names = ", ".join(repr(name) for name in list(candidates.values())[:5])
        raise TypeError(
            f"this {kind} contains {len(candidates)} transformers models "
            f"({names}{', …' if len(candidates) > 5 else ''}): give them one by one, "
            f"for example its .get_submodule({next(iter(candidates.values()))!r})"
        )
    return next(iter(candidates))


def refuse_late_parameters(wrapped: AnyModel, bounds: Mapping[int, BoundMethod]) -> None:
    """Raise ValueError if parameters would be added to a model that DistributedDataParallel already wraps.

    It synchronises the gradients of the parameters that it found when it was made; each process would train its own
    values of others.
    """
    module = _module_of(wrapped)
    if not any(_named(part, "DistributedDataParallel") for part in module.modules()):
        return
    for number, bound in bounds.items():
        if any(parameter.requires_grad for parameter in bound.parameters()):
            raise ValueError(
                f"layer {number}: {bound.method.name!r} has learned parameters, which DistributedDataParallel would "
                "not synchronise because it was made before them: swap before wrapping the model in it"
            )


def model_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield `model.named_parameters()` with their names without PEFT.

    What PEFT put around a layer comes too, under PEFT's names, where it is active and changes the layer: a LoRA that
    was just made (its B is 0), is switched off or is merged does not. Of `modules_to_save` the active copy comes.
    """
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "get_base_layer")}
    copied = {name: module for name, module in model.named_modules() if hasattr(module, "modules_to_save")}
    acting = {name: _adapters_that_act(layer) for name, layer in adapted.items()}
    for name, parameter in model.named_parameters():
        layer = next((layer for layer in adapted if name.startswith(f"{layer}.")), None)
        copies = next((copies for copies in copied if name.startswith(f"{copies}.")), None)
        if layer is not None and any(parameter is p for p in adapted[layer].get_base_layer().parameters()):
            yield name.replace(".base_layer.", "."), parameter
        elif layer is not None:
            if acting[layer] & set(name.removeprefix(layer).split(".")):
                yield name, parameter
        elif copies is not None:
            short_name = name.removeprefix(f"{copies}.{_active_copy(copied[copies])}.")
            if short_name != name:
                yield f"{copies}.{short_name}", parameter
        else:
            yield name, parameter


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, PreTrainedModel]]:
    """The transformers models in a module with their names, not those inside of others."""
    if isinstance(module, PreTrainedModel):
        yield name, module
        return
    for wrapper, reason in _WRAPPED_TOO_EARLY.items():
        if _named(module, wrapper):
            where = f" (its part {name!r})" if name else ""
            raise TypeError(f"cannot change the model in this {wrapper}{where}: {reason}")
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}".lstrip("."))


def _module_of(wrapped: Any) -> Any:
    """The module of a pipeline, which is none itself; else what is given."""
    return wrapped.model if _named(wrapped, "Pipeline") and hasattr(wrapped, "model") else wrapped


def _named(value: Any, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(value).__mro__)


def _hint(value: Any) -> str:
    """The remedy for an object without a transformers model in PyTorch, if known."""
    holders = [value, *(value.modules() if isinstance(value, nn.Module) else ())]
    held = [getattr(holder, name, holder) for holder in holders for name in ("auto_model", "model")]
    kinds = [type(part).__name__ for part in held]
    # Those of optimum: ONNX Runtime, OpenVINO.
    exported = next((kind for kind in kinds if kind.startswith(("ORT", "OV"))), None)
    if exported:
        return (
            f": {exported} runs an exported graph, whose attention cannot be replaced; load the model in PyTorch "
            "(backend='torch')"
        )
    if any(isinstance(part, PreTrainedModel) for part in held):
        return "; give its .model"
    if any(isinstance(holder, nn.MultiheadAttention) for holder in holders):
        return ": use sq.nn.swap(module, method) for modules with torch.nn.MultiheadAttention layers"
    return ""


def _adapters_that_act(layer: Any) -> set[str]:
    """The active adapters of a layer that PEFT adapts; none where merging them would leave its weights as they are."""
    if layer.disable_adapters or layer.merged:
        return set()
    merged = copy.deepcopy(layer)
    merged.merge()
    pairs = zip(layer.get_base_layer().parameters(), merged.get_base_layer().parameters(), strict=True)
    return set() if all(torch.equal(before, after) for before, after in pairs) else set(layer.active_adapters)


def _active_copy(wrapper: Any) -> str:
    """The copy of a module that PEFT's `modules_to_save` runs, as the prefix of its parameters' names."""
    if wrapper.disable_adapters or not wrapper.active_adapters:
        return "original_module"
    return f"modules_to_save.{wrapper.active_adapters[0]}"
