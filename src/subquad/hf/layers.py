"""The attention layers of a transformers model: found, numbered, labelled."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import PreTrainedModel

from subquad.hf.caps_and_sinks import attend_with_caps_and_sinks
from subquad.hf.item_rotary import TwoRotaries
from subquad.hf.mpnet import give_configs
from subquad.kernels.attention.steps.op import MOST_QUERIES
from subquad.kernels.tokens.rotary import Rotary
from subquad.masks import Mask
from subquad.methods import BoundMethod, Method
from subquad.methods.core.global_tokens import Keep
from subquad.methods.core.halves import future_leak
from subquad.nn.padded_queries import attend_all

KEEPS = {"first": "each item's first token", "ends": "each item's first and last token"}  # what `swap` can keep
NAME = "subquad"  # of the submodule that runs a method, and of the record of a swap in a config
ATTACHED = "subquad-attached"  # of our attention among transformers' own, in a model that `swap` changed

STATE_MARK = "_subquad_state_layer"  # on keys that a `StateCache` handed out: the layer of it that did

_DISENTANGLED = (
    "its attention is disentangled: the logit of a query and a key has terms of each with an embedding of their "
    "distance, q_i·r(j−i) and k_j·r(i−j), so it is not q_i·k_j and a bias of the distance alone"
)
# Terms of a model type's attention that no method here computes, in which case an adapter would not help.
UNSUPPORTED_TERMS = {"deberta": _DISENTANGLED, "deberta-v2": _DISENTANGLED}

_CROSS = re.compile(r"cross|encoder_attn|encdec|encoder_decoder", re.IGNORECASE)


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model, before a method is attached.

    `sizes` is (query heads, key heads, width of queries and keys), `window` how far it sees, as `Mask.window` counts.
    """

    number: int
    name: str
    module: nn.Module
    cross: bool
    causal: bool
    window: int | None = None
    biased: bool = False
    sizes: tuple[int, int, int] | None = None
    beside_softmax: tuple[str, ...] = ()  # "capped logits", "sinks": what only exact attention does here
    reason: str | None = None  # the reason why only the model's own attention can run here
    in_causal_decoder: bool = False  # cross-attention whose queries come one after the other
    hands_hidden: bool = False  # passes its input on to the attention function, as models made by subquad do

    @property
    def label(self) -> str:
        """The name of the layer in messages."""
        return f"{self.number} ({self.name})"

    @property
    def kind(self) -> str:
        """The kind of the layer in words, such as "causal self-attention"."""
        words = ["causal" if self.causal else "", "" if self.window is None else "windowed"]
        words += ["biased" if self.biased else "", "cross-attention" if self.cross else "self-attention"]
        return " ".join(filter(None, words))

    def split_refusal(self) -> str | None:
        """The reason why this layer's tokens cannot be split over ranks, whatever runs in it; None if they can."""
        kinds = {
            "cross-attention": self.cross,
            "a position bias": self.biased,
            **dict.fromkeys(self.beside_softmax, True),
        }
        present_kinds = [kind for kind, present in kinds.items() if present]
        return f"`parallel` is not supported with {present_kinds[0]}, which this layer has" if present_kinds else None

    def window_refusal(self, method: Method) -> str | None:
        """The reason why a method cannot run inside this layer's window; None if it can, or if there is no window."""
        if self.window is None:
            return None
        if not method.traits.window:
            return f"{method.label!r} has no window"
        if self.causal and method.traits.from_start:
            return (
                f"{method.label!r} counts from each item's first token, which is no longer in a window's cache once "
                "that has moved on"
            )
        return None

    def refusal(self, method: Method, *, keep: bool = False) -> str | None:
        """The reason why a method cannot run in this layer, or not with kept tokens; None if it can."""
        traits, name = method.traits, method.label
        if self.reason is not None:
            return self.reason
        if traits.needs_hidden and not self.hands_hidden:
            return (
                f"{name!r} reads the layer's input ({method}), which transformers does not hand to attention functions;"
                " run it in sq.nn.MultiheadAttention, or in a model that `subquad train` makes"
            )
        parts = [p.method.name for p in method.parts if not _fits_decoders(p.method)] if self.causal else []
        if parts:
            part_note = f" (its part {', '.join(map(repr, parts))} is not)" if len(method.parts) > 1 else ""
            return (
                f"{name!r} is not causal{part_note} and this layer is: the output at one position would depend on "
                "later tokens, so training would leak the future and generation would not match it; take one that is, "
                "such as 'clustered-tail' for long prompts, or 'local'"
            )
        if self.in_causal_decoder and traits.mixes_queries:
            return (
                f"{name!r} mixes queries, and those of this cross-attention are a causal decoder's: the output at "
                "one position would depend on later tokens"
            )
        if self.cross and not traits.cross:
            return f"{name!r} is for self-attention and this is cross-attention"
        refused_by_window = self.window_refusal(method)
        if refused_by_window is not None:
            return f"{refused_by_window}, and this layer attends to a window only (and is cheap already)"
        if self.biased and not traits.bias:
            return f"{name!r} supports no additive bias and this layer adds a position bias to its logits; 'full' does"
        if self.beside_softmax and not method.is_exact:
            return f"{name!r} knows no {' and no '.join(self.beside_softmax)}, which this layer has; 'full' does"
        return keep_refusal(method, cross=self.cross, window=self.window) if keep else None


def _fits_decoders(method: Method) -> bool:
    """True if no value of the future enters an output, and steps on a cache are what they are in the whole call."""
    return method.traits.causal == "strict" or (method.traits.by_halves and method.refuses(Mask.causal()) is None)


def keep_refusal(method: Method, *, cross: bool, window: int | None) -> str | None:
    """The reason why no token can be kept where this method runs in a layer, or None. "full" keeps all anyway."""
    if method.is_exact:
        return None
    if cross:
        return "this is cross-attention, and tokens are kept in self-attention only (run 'full' in this layer)"
    if window is not None:
        return (
            "this layer attends to a window only, which a kept token would see beyond, unlike in the model's own "
            "attention (run 'full' in this layer)"
        )
    return method.refuses(Mask(), keep=True)


class Attached(nn.Module):
    """A bound method on one layer, with what the boundary must know of the layer at call time.

    `saved_before`: whether its learned parameters are those of an earlier layer too. `keep`: which tokens' attention is
    exact, by their place among the real ones. `kept_now` is a bool (B,N) of these tokens, in place of it. `rotary`: the
    layer's rotary positions, for methods that move queries. `implementation`: the name in the config under which it
    runs.
    """

    def __init__(
        self,
        layer: Layer,
        bound: BoundMethod,
        *,
        saved_before: bool = False,
        keep: str | None = None,
        rotary: Rotary | TwoRotaries | None = None,
        implementation: str = ATTACHED,
    ):
        super().__init__()
        self.keep: str | None = None if bound.method.is_exact else keep
        self.kept_now: Tensor | None = None
        self._kept_in_forward: Tensor | None = None  # `kept_now` of the last forward pass in training
        self.for_timestamps = False  # while Whisper generates word timestamps: see `word_timestamps`
        self.split: Any = None  # the `split.Split` of a model whose tokens are split over ranks
        self.rotary = rotary
        self.implementation = implementation
        self.bound = bound
        # What `steps` asks in each call.
        self.is_exact = bound.method.is_exact
        by_position = bound.method.prepare_step
        self.prepare_step = by_position or bound.method.prepare_exact
        exact_queries = min(bound.method.exact_queries, MOST_QUERIES)
        self.prepared_queries = 0 if self.keep else 1 if by_position else exact_queries
        sizes = bound.heads, bound.kv_heads, bound.head_dim
        self.step_kind = layer.cross, layer.window, self.is_exact, self.prepare_step, *sizes
        if saved_before:  # by this transformers' `save_pretrained` knows that it is on purpose, and saves them once
            self._tied_weights_keys = {f"bound.{name}": name for name, _ in bound.named_parameters()}
        self.label, self.cross, self.causal, self.window = layer.label, layer.cross, layer.causal, layer.window

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask,
        valid: Tensor | None = None,
        query_valid: Tensor | None = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        hidden: Tensor | None = None,
        parallel: Any = None,
        **options: Any,
    ) -> Tensor:
        """Run the method for all queries: `mask`, `valid`, `query_valid` and `parallel` as in `attend_all`."""
        if self.training and torch.is_grad_enabled():
            self.check_training()
        if self.training and not is_compiling():
            self._check_run_again()
        keep = self._keep(mask, valid, query.shape[2], key.shape[2])
        if softcap is not None or sinks is not None:
            if not self.bound.method.is_exact:
                raise ValueError(
                    f"layer {self.label} has capped logits or sinks, which {self.bound.method} does not know"
                )
            visible = mask if valid is None else mask & Mask.padding(keys=valid)
            return attend_with_caps_and_sinks(query, key, value, visible, softcap=softcap, sinks=sinks, **options)
        if self.rotary is not None:
            self.rotary = self.rotary.to(query.device)
            options["rotary"] = self.rotary if isinstance(self.rotary, Rotary) else self.rotary.now()
        options |= {"bias": bias, "keep": keep, "hidden": hidden, "parallel": parallel}
        return attend_all(self.bound, query, key, value, mask=mask, valid=valid, query_valid=query_valid, **options)

    def check_training(self) -> None:
        """Raise ValueError if training through this layer would leak the future."""
        method = self.bound.method
        if self.causal and method.traits.leaks_in_training:
            raise ValueError(f"layer {self.label}: {future_leak(method)}")

    def _check_run_again(self) -> None:
        """Raise ValueError if a backward pass runs the forward pass again and would keep other tokens than before."""
        if torch._C._current_graph_task_id() == -1:  # no backward pass runs
            self._kept_in_forward = self.kept_now
        elif self.kept_now is not self._kept_in_forward:
            raise ValueError(
                f"layer {self.label}: gradient checkpointing runs the forward pass again, but sq.hf.keeping names "
                "other tokens now than in the first one: call backward inside its block"
            )

    def _keep(self, mask: Mask, valid: Tensor | None, N: int, M: int) -> Keep | None:
        """The tokens whose attention is exact in this call, as an argument of methods."""
        if self.kept_now is not None:
            return None if self.bound.method.is_exact else self.kept_now
        if self.keep is None:
            return None
        if N != M:
            raise ValueError(
                f"layer {self.label}: keep={self.keep!r} needs all tokens at once, but there are {N} queries and {M} "
                "keys: generate with use_cache=False, or swap without `keep`"
            )
        return ends_of(self.keep, mask, valid)


def ends_of(keep: str, mask: Mask, valid: Tensor | None) -> Keep:
    """The first real token of each item, or the first and the last; of each segment, where items are packed."""
    last = keep == "ends"
    if mask.ids:
        ids = mask.ids[0]
        before, after = F.pad(ids, (1, 0), value=-1)[:, :-1], F.pad(ids, (0, 1), value=-1)[:, 1:]
        at_end = (ids != before) | (ids != after) if last else ids != before
        return at_end & (ids >= 0)
    if valid is None:
        return [0, -1] if last else [0]
    first = valid.int().argmax(1)  # of several that are equal, the first
    behind = valid.flip(1).int().argmax(1)
    return torch.stack([first, valid.shape[1] - 1 - behind] if last else [first], dim=1)


def attached_to(module: nn.Module) -> Attached | None:
    """The bound method that runs in an attention module; None if its own attention runs."""
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    attached = getattr(module, NAME, None)
    return attached if isinstance(attached, Attached) and chosen == attached.implementation else None


def inspect_layers(model: PreTrainedModel) -> list[Layer]:
    """All attention layers of a model that go through transformers' attention interface, as its code describes them.

    Raises:
        ValueError: the model, or a part of it, computes attention in its own way; named.
    """
    give_configs(model)
    check_interface(model)
    modules = [(name, module) for name, module in model.named_modules() if uses_interface(module)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no attention layer that goes through the attention interface")
    return serving_decoders([_describe(number, name, module) for number, (name, module) in enumerate(modules)])


def check_interface(model: PreTrainedModel) -> None:
    """Raise ValueError if a model, or a part of it, computes attention in its own way; names the part."""
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation():
            where = f" (its part {name!r})" if name else ""
            model_type = part.config.model_type
            why = f"; {UNSUPPORTED_TERMS[model_type]}" if model_type in UNSUPPORTED_TERMS else ""
            raise ValueError(
                f"{type(part).__name__}{where} computes its attention itself, not through transformers' attention "
                f"interface, so nothing can be swapped into it{why}; architectures that can: BERT, RoBERTa, "
                "DistilBERT, ModernBERT, MPNet, ViT, wav2vec2, Whisper, T5, BART, Llama, GPT-2 and most others"
            )


def serving_decoders(layers: list[Layer]) -> list[Layer]:
    """The layers, with the cross-attention of causal decoders marked."""
    return [replace(layer, in_causal_decoder=layer.cross and _is_beside_causal(layer, layers)) for layer in layers]


def head_counts(layer: Layer | nn.Module) -> tuple[int, int, int]:
    """Return (query heads, key/value heads, head width) of a layer, or of a module by its attributes or config."""
    if isinstance(layer, Layer):
        return layer.sizes or head_counts(layer.module)
    config = getattr(layer, "config", None)
    heads = _first(layer, config, "num_heads", "n_heads", "num_attention_heads")
    kv_heads = _first(layer, config, "num_key_value_heads") or heads
    width = _first(layer, config, "head_dim", "attention_head_size", "key_value_proj_dim", "d_kv")
    if width is None and heads is not None:
        hidden = _first(layer, config, "embed_dim", "hidden_size", "d_model", "dim")
        width = hidden // heads if hidden else None
    if heads is None or kv_heads is None or width is None:
        raise ValueError(f"cannot tell the head count and width of {type(layer).__name__}")
    return heads, kv_heads, width


def _first(module: nn.Module, config: Any, *names: str) -> int | None:
    for owner in (module, config):
        for name in names:
            try:
                value = getattr(owner, name, None)
            except (AttributeError, ValueError):  # a value of the config that differs from layer to layer
                continue
            if isinstance(value, int):
                return value
    return None


def uses_interface(module: nn.Module) -> bool:
    """True if a module calls the attention function that transformers' attention interface names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _describe(number: int, name: str, module: nn.Module) -> Layer:
    cross = getattr(module, "is_cross_attention", None)
    if cross is None:
        cross = bool(_CROSS.search(type(module).__name__) or _CROSS.search(".".join(name.split(".")[-3:])))
    causal = bool(getattr(module, "is_causal", False)) and not cross
    biased = "position_bias" in inspect.signature(type(module).forward).parameters
    hands_hidden = bool(getattr(module, "hands_hidden", False))
    return Layer(number, name, module, bool(cross), causal, biased=biased, hands_hidden=hands_hidden)


def _is_beside_causal(layer: Layer, layers: list[Layer]) -> bool:
    """True if the self-attention next to this cross-attention, with which it shares most of its name, is causal."""
    shared = [(_shared_parts(layer.name, other.name), other) for other in layers if other is not layer]
    nearest = max(count for count, _ in shared)
    return any(other.causal for count, other in shared if count == nearest)


def _shared_parts(a: str, b: str) -> int:
    pairs = list(zip(a.split("."), b.split("."), strict=False))
    return next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs))
