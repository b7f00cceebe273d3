"""The attention layers of a transformers model: found, numbered, labelled."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.hf.doors import AnyModel, transformers_model
from subquad.methods import Bound, Method

NAME = "subquad"  # of our attention among transformers' own, and of the submodule that runs it

_CROSS = re.compile(r"cross|encoder_attn|encdec|encoder_decoder", re.IGNORECASE)


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model, as found before anything is attached."""

    number: int
    name: str
    module: nn.Module
    cross: bool
    causal: bool
    windowed: bool
    biased: bool
    chunked: bool = False
    in_causal_decoder: bool = False  # cross-attention whose queries come one after the other

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.number} ({self.name})"

    @property
    def kind(self) -> str:
        """Its kind in words, "causal self-attention" and the like."""
        words = ["causal" if self.causal else "", "windowed" if self.windowed else ""]
        words += ["biased" if self.biased else "", "cross-attention" if self.cross else "self-attention"]
        return " ".join(filter(None, words))

    def refusal(self, method: Method) -> str | None:
        """Why this method cannot run in this layer, or None."""
        traits, name = method.traits, method.name
        if self.chunked:
            return "this layer attends within chunks, which subquad does not know"
        if traits.needs_hidden:
            return f"{name!r} reads the layer's input, which a pretrained model does not hand to its attention"
        if self.causal and traits.causal != "strict":
            parts = [p.method.name for p in getattr(method, "parts", ()) if p.method.traits.causal != "strict"]
            own = f" (its part {', '.join(map(repr, parts))} is not)" if parts else ""
            return (
                f"{name!r} is not causal{own} and this layer is: the output at one position would depend on later "
                "tokens, so training would leak the future and generation would not match it"
            )
        if self.in_causal_decoder and traits.causal == "no":
            return (
                f"{name!r} mixes queries, and those of this cross-attention are a causal decoder's: the output at "
                "one position would depend on later tokens"
            )
        if self.cross and not traits.cross:
            return f"{name!r} is for self-attention and this is cross-attention"
        if self.windowed and not traits.window:
            return f"{name!r} has no window and this layer attends to a window only (and is cheap already)"
        if self.biased and not traits.bias:
            return f"{name!r} takes no additive bias and this layer adds a position bias to its logits"
        heads, kv_heads, _ = head_counts(self.module)
        if heads != kv_heads and not traits.gqa:
            return f"{name!r} has no grouped-query attention and this layer has {heads} heads on {kv_heads} key heads"
        return None


class Attached(nn.Module):
    """A bound method on one layer, with what the boundary must know of the layer at call time.

    `saved_before`: whether its learned parameters are those of an earlier layer too.
    """

    def __init__(self, layer: Layer, bound: Bound, *, saved_before: bool = False):
        super().__init__()
        self.bound = bound
        if saved_before:  # by this transformers' `save_pretrained` knows that it is on purpose, and saves them once
            self._tied_weights_keys = {f"bound.{name}": name for name, _ in bound.named_parameters()}
        self.label, self.cross, self.causal, self.windowed = layer.label, layer.cross, layer.causal, layer.windowed
        self.config_window = getattr(getattr(layer.module, "config", None), "sliding_window", None)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Run the method."""
        return self.bound(query, key, value, **options)

    def window_width(self, passed: int, causal: bool) -> int:
        """How far a windowed layer sees to each side, by the rule of transformers' own window masks.

        Causal windows hold `sliding_window` tokens with the query itself, bidirectional ones reach that far.
        """
        width = self.config_window or passed
        return width - 1 if causal else width


def attached_to(module: nn.Module) -> Attached | None:
    """What runs in an attention module in place of its own; None where its own does."""
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    attached = getattr(module, NAME, None)
    return attached if chosen == NAME and isinstance(attached, Attached) else None


def find_layers(model: AnyModel) -> list[Layer]:
    """All attention layers of a model that go through transformers' attention interface, in the model's order.

    Raises:
        TypeError: no transformers model, and not what holds one.
        ValueError: the model, or a part of it, computes attention in its own way; named.
    """
    model = transformers_model(model)
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation():
            where = f" (its part {name!r})" if name else ""
            raise ValueError(
                f"{type(part).__name__}{where} computes its attention itself, not through transformers' attention "
                "interface, so nothing can be swapped into it; architectures that can: BERT, RoBERTa, DistilBERT, "
                "ModernBERT, ViT, wav2vec2, Whisper, T5, BART, Llama, GPT-2 and most others"
            )
    found = [(name, module) for name, module in model.named_modules() if _uses_interface(module)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention layer that goes through the attention interface")
    layers = [_describe(number, name, module) for number, (name, module) in enumerate(found)]
    return [replace(layer, in_causal_decoder=_serves_causal_decoder(layer, layers)) for layer in layers]


def head_counts(module: nn.Module) -> tuple[int, int, int]:
    """(query heads, key/value heads, head width) of an attention module, from its attributes or its config."""
    config = getattr(module, "config", None)
    heads = _first(module, config, "num_heads", "n_heads", "num_attention_heads")
    kv_heads = _first(module, config, "num_key_value_heads") or heads
    width = _first(module, config, "head_dim", "attention_head_size", "key_value_proj_dim", "d_kv")
    if width is None and heads is not None:
        hidden = _first(module, config, "embed_dim", "hidden_size", "d_model", "dim")
        width = hidden // heads if hidden else None
    if heads is None or kv_heads is None or width is None:
        raise ValueError(f"cannot tell the head count and width of {type(module).__name__}")
    return heads, kv_heads, width


def _first(module: nn.Module, config: Any, *names: str) -> int | None:
    for owner in (module, config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    return None


def _uses_interface(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _describe(number: int, name: str, module: nn.Module) -> Layer:
    cross = getattr(module, "is_cross_attention", None)
    if cross is None:
        cross = bool(_CROSS.search(type(module).__name__) or _CROSS.search(".".join(name.split(".")[-3:])))
    config = getattr(module, "config", None)
    # A decoder that is asked, in its config, to attend both ways.
    causal = bool(getattr(module, "is_causal", False)) and getattr(config, "is_causal", True) is not False
    return Layer(
        number=number,
        name=name,
        module=module,
        cross=bool(cross),
        causal=causal and not cross,
        windowed=_is_windowed(module, config),
        chunked=_kind_in_config(module, config) == "chunked_attention",
        biased="position_bias" in inspect.signature(type(module).forward).parameters,
    )


def _serves_causal_decoder(layer: Layer, layers: list[Layer]) -> bool:
    """Whether the self-attention next to this cross-attention, with which it shares most of its name, is causal."""
    if not layer.cross:
        return False
    nearest = max(_shared_parts(layer.name, other.name) for other in layers if other is not layer)
    return any(o.causal for o in layers if o is not layer and _shared_parts(layer.name, o.name) == nearest)


def _shared_parts(a: str, b: str) -> int:
    pairs = list(zip(a.split("."), b.split("."), strict=False))
    return next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs))


def _is_windowed(module: nn.Module, config: Any) -> bool:
    if hasattr(module, "sliding_window"):
        return module.sliding_window is not None
    kind = _kind_in_config(module, config)
    return kind == "sliding_attention" if kind else getattr(config, "sliding_window", None) is not None


def _kind_in_config(module: nn.Module, config: Any) -> str | None:
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return kinds[index] if kinds and index is not None else None
