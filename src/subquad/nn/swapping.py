"""Put methods into the attention layers of any module, remove them, and list what runs where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import ModuleType
from typing import Any

from rich.table import Table
from torch import nn

from subquad.core.forward_hooks import add_pre_hook, remove_hooks
from subquad.core.plain_tables import alike, as_text, common_name
from subquad.methods import Method, resolve
from subquad.nn import timm_layers, torch_layers
from subquad.nn.torch_calls import check_encoder_padding

KINDS: tuple[ModuleType, ...] = (torch_layers, timm_layers)  # each: is_one, sizes, refusal, forward, CHANGED
NAME = "subquad"  # of the bound method in a layer
WRAPPED = "its forward pass is wrapped by another library (as accelerate's hooks do)"
_BEFORE = "_before_subquad"  # attributes of a module as they were


@dataclass(frozen=True)
class SwappedModule:
    """The methods of a module's layers: {name: method}, None for the layer's own attention. Prints as a table."""

    layers: Mapping[str, Method | None]
    kinds: Mapping[str, str]

    def __str__(self) -> str:
        table = Table("layer", "kind", "method", box=None)
        names = list(self.layers)
        features = [(self.kinds[name], str(method or "(the layer's own)")) for name, method in self.layers.items()]
        for group in alike(names, features):
            name = common_name([names[index] for index in group]) or "(the module itself)"
            count = f" ({'all ' if len(group) == len(names) else ''}{len(group)} layers)" if len(group) > 1 else ""
            table.add_row(f"{name}{count}", *features[group[0]])
        return as_text(table)


def swap(
    module: nn.Module, method: str | Method | Mapping[str, str | Method], *, max_length: int | None = None
) -> SwappedModule:
    """Put a method into every `torch.nn.MultiheadAttention` and every `Attention` of timm in a module, in place.

    A layer keeps its parameters under their names, so state dicts, optimizers and hooks stay as they are, and its call:
    arguments, masks and shapes are torch's or timm's. Masks are read as `Mask.from_sdpa` does, at each call. Methods
    with learned parameters get them here, as `subquad` in the layer.

    Args:
        module: any module, such as an `nn.TransformerEncoder` or a timm model, or such a layer itself.
        method: one method for all layers, or a mapping from patterns of their names (as fnmatch reads them; later ones
            win) to methods. Layers that a mapping leaves out keep their own attention.
        max_length: the longest input, for methods whose parameters depend on it.

    Swapping again replaces what was there. Nothing changes when an error is raised. Attention weights are not computed:
    torch's layers must be called with `need_weights=False`, as torch's encoder and decoder layers do.

    Raises:
        ValueError: there is no such layer; a pattern that names none; a layer that cannot run its method, with the
            reason: in a `TransformerDecoderLayer`, methods that mix queries would let later positions leak through the
            cross-attention. In the forward pass, a mask that the method does not take.
            A layer whose forward pass another library wrapped, as accelerate's hooks do.
        TypeError: `module` is not a module, or a pattern is not a text.

    >>> import torch, subquad as sq
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> print(sq.nn.swap(torch.nn.TransformerEncoder(layer, 2), {"layers.1.*": "clustered:clusters=8"}))
     layer               kind                method
     layers.0.self_attn  MultiheadAttention  (the layer's own)
     layers.1.self_attn  MultiheadAttention  clustered:clusters=8
    """
    layers = _find(module)
    chosen = _choose(list(layers), method)
    for name, wanted in chosen.items():
        reason = _refusal(module, name, layers[name], wanted)
        if reason:
            raise ValueError(f"layer {name or type(module).__name__!r} cannot run {wanted}: {reason}")
    bound = {}
    for name, wanted in chosen.items():
        sizes, device = _kind(layers[name]).sizes(layers[name]), next(layers[name].parameters()).device
        bound[name] = wanted.bind(**sizes, max_length=max_length, device=device)
    restore(module)  # refuses layers that were wrapped after they were swapped
    for name, attached in bound.items():
        layer = layers[name]
        weight = next(layer.parameters())
        layer.add_module(NAME, attached.to(weight.device, weight.dtype).train(layer.training))
        _change(layer, forward=partial(_kind(layer).forward, layer), **_kind(layer).CHANGED)
    for part in module.modules():
        is_encoder = type(part).forward is nn.TransformerEncoder.forward
        if is_encoder and any(hasattr(layer, NAME) for layer in part.modules()):
            add_pre_hook(part, check_encoder_padding)
    return describe(module)


def restore(module: nn.Module) -> None:
    """Restore the original attention of a module's swapped layers, in place; other layers are left alone.

    Raises:
        ValueError: the forward pass of a swapped layer was wrapped since, as accelerate's hooks do.
    """
    for name, part in module.named_modules():
        if _BEFORE in vars(part) and _is_wrapped(part):
            raise ValueError(
                f"layer {name or type(part).__name__!r} was swapped, and {WRAPPED}; remove the wrapper first"
            )
    remove_hooks(module, check_encoder_padding)
    for part in module.modules():
        for name, before in vars(part).pop(_BEFORE, {}).items():
            if before is _Absent:
                delattr(part, name)
            else:
                setattr(part, name, before)
        if NAME in part._modules and any(kind.is_one(part) for kind in KINDS):
            delattr(part, NAME)


def describe(module: nn.Module) -> SwappedModule:
    """List the layers that `swap` finds in a module, and their methods. ValueError if there are none."""
    layers = _find(module)
    methods = {name: layer.subquad.method if hasattr(layer, NAME) else None for name, layer in layers.items()}
    return SwappedModule(methods, {name: type(layer).__name__ for name, layer in layers.items()})


def refusals(module: nn.Module, method: str | Method) -> dict[str, str]:
    """The layers that cannot run this method, and the reasons: {layer name: reason}. Empty if all can.

    Masks are known at a call alone, so a layer that is not here may still refuse one in the forward pass.

    Raises:
        ValueError: there is no such layer in the module; an unknown method.
    """
    wanted = resolve(method)
    reasons = {name: _refusal(module, name, layer, wanted) for name, layer in _find(module).items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


class _Absent:
    """In place of an attribute that a module did not have of its own. The class itself, which copies keep."""


def _change(module: nn.Module, **attributes: Any) -> None:
    """Set attributes of a module, and remember what they were."""
    vars(module)[_BEFORE] = {name: vars(module).get(name, _Absent) for name in attributes}
    vars(module).update(attributes)


def _is_wrapped(layer: nn.Module) -> bool:
    """True if another library replaced the forward pass of this one object."""
    forward = vars(layer).get("forward")
    return forward is not None and getattr(forward, "func", None) is not _kind(layer).forward


def _find(module: nn.Module) -> dict[str, Any]:
    """The layers that can run methods, by their names."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(module).__name__}; call sq.nn.swap(module, method)")
    layers = {name: part for name, part in module.named_modules() if any(kind.is_one(part) for kind in KINDS)}
    if not layers:
        raise ValueError(
            f"there is no torch.nn.MultiheadAttention and no timm Attention in this {type(module).__name__}; use "
            "sq.hf.swap(model, method) for a transformers model, and sq.intercept(method) around any other"
        )
    return layers


def _kind(layer: nn.Module) -> ModuleType:
    return next(kind for kind in KINDS if kind.is_one(layer))


def _choose(names: list[str], method: str | Method | Mapping[str, str | Method]) -> dict[str, Method]:
    """The method of each layer that gets one."""
    if not isinstance(method, Mapping):
        if isinstance(getattr(method, "layers", None), Mapping):
            raise TypeError(
                f"`method` is a {type(method).__name__}; give the mapping in it, sq.nn.swap(module, plan.layers)"
            )
        return dict.fromkeys(names, resolve(method))
    chosen: dict[str, Method] = {}
    for pattern, wanted in method.items():
        if not isinstance(pattern, str):
            raise TypeError(
                f"the mapping has the key {pattern!r}, but layers are named by patterns of their names; there are "
                f"{len(names)}, from {names[0]!r} to {names[-1]!r}"
            )
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"no layer is named by {pattern!r}; there are {len(names)}, from {names[0]!r} to {names[-1]!r}"
            )
        chosen.update(dict.fromkeys(matching, resolve(wanted)))
    if not chosen:
        raise ValueError("the mapping from layers to methods is empty")
    return chosen


def _refusal(module: nn.Module, name: str, layer: nn.Module, method: Method) -> str | None:
    """The reason why a layer cannot run a method, from the layer and from where it is."""
    above, _, attribute = name.rpartition(".")
    in_decoder = name != "" and isinstance(module.get_submodule(above), nn.TransformerDecoderLayer)
    if in_decoder and attribute == "multihead_attn":
        pick = "; pass a mapping to swap only the layers that can"
        if not method.traits.cross:
            return f"{method.label!r} is for self-attention, and this is cross-attention{pick}"
        if method.traits.mixes_queries:
            return (
                f"{method.name!r} mixes queries, and those of this cross-attention are a decoder's: the output at one "
                f"position would depend on later ones{pick}"
            )
    if _is_wrapped(layer):
        return f"{WRAPPED}, which swap would bypass; swap first, and wrap the swapped module"
    reason = _kind(layer).refusal(layer, method)
    return None if reason is None else str(reason)
