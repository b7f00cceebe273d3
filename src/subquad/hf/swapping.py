"""Swap methods into a model, restore its own attention, and describe which layer runs which method."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.core.forward_hooks import run_first
from subquad.core.plain_tables import alike, as_text, common_name, ranges
from subquad.distributed import Ranks, Sequence
from subquad.hf.attention_names import SAVED_AS
from subquad.hf.call_checks import check_calls, refuse_weights, stop_checking
from subquad.hf.item_rotary import TwoRotaries
from subquad.hf.layers import ATTACHED, KEEPS, NAME, Attached, Layer, attached_to, head_counts, keep_refusal
from subquad.hf.left_padding import count_from_first_valid_token, counts_from_first_valid_token, stop_counting
from subquad.hf.long_inputs import explain_long_inputs, stop_explaining
from subquad.hf.parts import give_back, separate
from subquad.hf.positions import extended_positions, position_limit
from subquad.hf.probe import find_layers
from subquad.hf.rotary_trial import find_rotary
from subquad.hf.saved import asks_for_ours, configs_of, mark, unmark
from subquad.hf.split import ATTRIBUTE, Split, SplitFit, ranks_of, refuse_holder
from subquad.hf.split_trial import fit_of
from subquad.hf.swap_record import Record, read_record
from subquad.hf.trial import ORIGINAL, originals
from subquad.hf.unwrapping import AnyModel, refuse_late_parameters, transformers_model
from subquad.kernels.tokens.rotary import Rotary
from subquad.methods import BoundMethod, Full, Method, resolve
from subquad.methods.core.mixture import moves_queries
from subquad.methods.core.plugins import find_method

AnyMethod = str | Method | BoundMethod


@runtime_checkable
class HasMethods(Protocol):
    """An object that determines the methods of a model, such as a `Plan`."""

    def for_model(self, model: AnyModel) -> Mapping[int, Method | BoundMethod]:
        """The method of each layer. ValueError where the model is another one."""

    @property
    def recorded(self) -> dict[str, Any]:
        """Data that are saved with the model in addition to its methods: members of a `swap_record.Record`."""


@dataclass(frozen=True)
class Swapped:
    """The methods of a swapped model, by layer. Prints as a table.

    `methods` is {layer number: method}, without layers left alone.
    `keep` lists the tokens whose attention is exact, as in `swap`; `cut_at`, how many tokens of a text the model's
    holder, such as a SentenceTransformer, reads at most. `extended` is whether those are all the positions to which
    `extend_positions` extended the model.
    """

    layers: tuple[Layer, ...]
    methods: dict[int, Method]
    keep: str | None = None
    cut_at: int | None = None
    extended: bool = False

    def __str__(self) -> str:
        methods = [str(self.methods.get(layer.number, "(the model's own)")) for layer in self.layers]
        features = [(layer.kind, method) for layer, method in zip(self.layers, methods, strict=True)]
        table = Table("layer", "name", "kind", "method", box=None)
        for group in alike([layer.name for layer in self.layers], features):
            layers = [self.layers[index] for index in group]
            number = ranges([layer.number for layer in layers])
            if len(layers) == len(self.layers) > 1:
                number = f"all {len(layers)}"
            table.add_row(number, common_name([layer.name for layer in layers]), *features[group[0]])
        lines = [as_text(table)]
        exact = [layer for layer in self.layers if layer.window is not None and self._is_exact(layer)]
        if exact and not all(map(self._is_exact, self.layers)):
            lines.append(f"exact inside their window: {len(exact)} of {len(self.layers)} layers, which see no more")
        if self.keep is not None:
            lines.append(f"exact in every layer: {KEEPS[self.keep]}")
        if self.cut_at is not None:
            hint = ", to which the positions were extended" if self.extended else "; sq.hf.extend_positions raises it"
            lines.append(f"texts are cut to max_seq_length={self.cut_at:,} tokens{hint}")
        return "\n".join(lines)

    def _is_exact(self, layer: Layer) -> bool:
        return layer.number not in self.methods or self.methods[layer.number].is_exact


def swap(
    model: AnyModel,
    method: AnyMethod | Mapping[Any, AnyMethod] | HasMethods,
    *,
    max_length: int | None = None,
    inputs: Mapping[str, Any] | None = None,
    keep: str | None = None,
    parallel: Any = None,
) -> Swapped:
    """Replace the attention of a pretrained transformers model by a method, in place.

    Args:
        model: any transformers model whose attention goes through the attention interface, or a wrapper around one: a
            SentenceTransformer, a CrossEncoder, a pipeline, a PeftModel, a DataParallel, a module of your own.
        method: one method for every layer, except that layers with a window inside which it cannot run have exact
            attention there ("full", in decoders "full:kernel=subquad", whose steps are the faster ones); or a mapping
            from layer numbers (as `describe` counts them) or name patterns ("encoder.*", as fnmatch reads them; later
            entries win) to methods. Layers that a mapping leaves out run "full": exact attention. A method that is
            bound already, with its learned parameters, is for one layer; others with learned parameters are bound here,
            with those that they start with. Or a plan, as `sq.load_plan` reads it.
        max_length: the longest input, for methods that are bound here and whose parameters depend on it; by default
            what the model's learned positions reach (`position_limit`), where they set a limit.
        inputs: a small batch for the trial, for a model that subquad cannot make inputs for.
        keep: tokens whose row and column are exact in self-attention: "first", the first real token of each item, or
            "ends", the first and the last; of each sequence, where several are packed. Other tokens: `keeping`.
        parallel: ranks over which the tokens of every batch are split: a dimension of a device mesh (`mesh["sp"]`), a
            process group, a `sq.distributed.Ranks`, or a `sq.distributed.Sequence` for one length. Each rank gives the
            model its part of the batch, as `shard` cuts it. It is not saved with the model.

    The model is tried first: it runs on a few random tokens with its own attention and with exact attention through
    subquad, and is refused unless both are equal in every layer. What is attached is written into `model.config`, so
    `save_pretrained` keeps it: see `reattach`. Swapping again replaces what was there. Nothing changes when an error is
    raised.

    A part of a model, such as `model.encoder`, is swapped alone. If modules outside of it have its config too, as in
    Whisper and BART, the part gets a copy of it until `restore`, which carries what was changed in the copy over.

    Raises:
        ValueError: with `parallel`, a model that is not right on a part of its tokens, with what differs; an
            architecture outside the interface, a layer that cannot run its method (with the reason), a method without
            windows in a model whose layers all have one, an unknown method, a number or pattern that names no layer, a
            method whose parameters need a longest input in a model that sets none, or tokens to keep in
            cross-attention, in a windowed layer or by a method that cannot.
        TypeError: not a transformers model, and not a wrapper around one.
    """
    wrapped, model = model, transformers_model(model)
    recorded: dict[str, Any] = {}
    if isinstance(method, HasMethods):
        recorded, method = method.recorded, method.for_model(model)
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length={max_length}, but it must be at least 1")
    if keep is not None and keep not in list(KEEPS):
        raise ValueError(
            f"keep={keep!r}, but it must be {' or '.join(map(repr, KEEPS))} or None; for other tokens use "
            "sq.hf.keeping(model, mask)"
        )
    refuse_weights(configs_of(model))
    layers = find_layers(model, inputs=inputs)
    split = None if parallel is None else partial(_tried_split, wrapped, model, layers, parallel, inputs, keep)
    swapped = swap_layers(wrapped, layers, method, max_length=max_length, keep=keep, split=split)
    model.config.subquad = Record(len(layers), swapped.methods, keep, **recorded).to_dict()
    return swapped


def swap_layers(
    wrapped: AnyModel,
    layers: list[Layer],
    method: AnyMethod | Mapping[Any, AnyMethod],
    *,
    implementation: str = ATTACHED,
    max_length: int | None = None,
    keep: str | None = None,
    split: Callable[[], tuple[Ranks, Sequence | None, SplitFit]] | None = None,
) -> Swapped:
    """Attach a method to the layers that a trial found in a model, under a name of our attention in its config.

    `split` makes what divides the tokens over ranks, once no layer refuses its method.

    Raises:
        ValueError: as in `swap`.
    """
    model = transformers_model(wrapped)
    assigned = _assign(layers, method)
    methods = {number: _method_of(each) for number, each in assigned.items()}
    for layer in layers:
        reason = layer.refusal(methods[layer.number], keep=keep is not None)
        if reason:
            hint = "" if isinstance(method, Mapping) else "; pass a mapping to swap only the layers that can"
            raise ValueError(f"layer {layer.label} of {type(model).__name__}: {reason}{hint}")
    rotaries = _rotaries(model, layers, methods)
    divided = None if split is None else split()
    bound = bind_all(layers, assigned, max_length or position_limit(model))
    refuse_late_parameters(wrapped, bound)
    restore(model)
    separate(model)
    saved: set[nn.Module | None] = set()
    for layer in layers:
        learned = bound[layer.number].learned
        rotary = rotaries.get(layer.module)
        attached = Attached(
            layer,
            bound[layer.number],
            saved_before=learned in saved,
            keep=keep,
            rotary=rotary,
            implementation=implementation,
        )
        layer.module.add_module(NAME, attached.train(layer.module.training))
        saved |= {learned} - {None}
    before = originals(model)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):  # of which each can be restored alone
            setattr(part, ORIGINAL, before)
    for config, _ in before:
        config._attn_implementation = implementation
    if divided is not None:
        made = Split(model, *divided, implementation, counts_from_first_valid_token(model))
        setattr(model, ATTRIBUTE, made)
        for layer in layers:
            attached_here: Any = layer.module.get_submodule(NAME)
            attached_here.split = made
    mark(model, SAVED_AS if implementation == ATTACHED else implementation)
    check_calls(model)
    if divided is None:
        count_from_first_valid_token(model)
    explain_long_inputs(model)
    return Swapped(tuple(layers), methods, keep, _cut_at(wrapped), _is_extended_to(wrapped, model))


def record(model: AnyModel, **members: Any) -> None:
    """Change members of the record of a swapped model, which is saved with it: see `swap_record.Record`."""
    model = transformers_model(model)
    changed = replace(read_record(model.config.subquad, model.config), **members)
    model.config.subquad = changed.to_dict()


def provenance(model: AnyModel) -> dict[str, Any]:
    """Data that are saved with a swapped model in addition to its methods, in plain types; empty if there are none.

    "versions" of the packages that decide the output, when the methods were chosen. Of a plan also "floor", which its
    output is to keep, and "verified", what was measured at each length ("fidelity", "bound", "speedup", …). "audit",
    the arguments of `sq.audit` that were recorded: see `Audit.record`.
    """
    plain = getattr(transformers_model(model).config, NAME, None) or {}
    return {name: plain[name] for name in ("versions", "floor", "verified", "audit") if name in plain}


@contextmanager
def swapped_out(model: AnyModel, *, parallel: Any = None) -> Iterator[None]:
    """Run the model's own attention inside; what was swapped in is back afterwards, with its record.

    `parallel`: the ranks that it is divided over, as in `swap`.
    """
    before, keep, recorded = bounds(model), describe(model).keep, provenance(model)
    restore(model)
    try:
        yield
    finally:
        restore(model)
        if before:
            swap(model, before, keep=keep, parallel=parallel)
            if recorded:
                record(model, **{"versions": None, **recorded})


def _rotaries(
    model: PreTrainedModel, layers: list[Layer], methods: Mapping[int, Method]
) -> dict[nn.Module, Rotary | TwoRotaries | None]:
    """The rotary positions of the layers whose methods need them; the model runs only if there are such layers."""
    turning = [layer for layer in layers if layer.causal and not layer.cross and moves_queries(methods[layer.number])]
    try:
        return find_rotary(model, turning) if turning else {}
    except ValueError as error:
        raise ValueError(f"{error}; use queries=rectangle or queries=block") from None


def _tried_split(
    wrapped: AnyModel,
    model: PreTrainedModel,
    layers: list[Layer],
    parallel: Any,
    inputs: Mapping[str, Any] | None,
    keep: str | None,
) -> tuple[Ranks, Sequence | None, SplitFit]:
    """The ranks of a model whose tokens are split, and how it runs on a part of them; ValueError where it does not."""
    ranks, fixed = ranks_of(parallel)
    refuse_holder(wrapped, model)
    if keep is not None:
        raise ValueError(f"`parallel` is not supported with keep={keep!r}; swap without one of them")
    for layer in layers:
        reason = layer.split_refusal()
        if reason:
            raise ValueError(f"layer {layer.label} of {type(model).__name__}: {reason}; swap without `parallel`")
    return ranks, fixed, fit_of(model, layers, inputs)


def _cut_at(holder: Any) -> int | None:
    """The `max_seq_length` of a SentenceTransformer; None where there is none."""
    limit = getattr(holder, "max_seq_length", None)
    return limit if isinstance(limit, int) else None


def _is_extended_to(holder: Any, model: PreTrainedModel) -> bool:
    """True if a holder's `max_seq_length` is all the positions to which `extend_positions` extended its model."""
    cut_at, lengths = _cut_at(holder), [each["length"] for each in extended_positions(model).values()]
    return cut_at is not None and bool(lengths) and cut_at >= min(lengths)


@contextmanager
def keeping(model: AnyModel, tokens: Tensor) -> Iterator[None]:
    """Keep tokens exact in all swapped self-attention layers, inside a block; this replaces the `keep` of `swap`.

        with sq.hf.keeping(model, inputs["input_ids"] == tokenizer.sep_token_id):
            model(**inputs)

    Args:
        model: a swapped model, or a wrapper around one.
        tokens: bool (B,N) for inputs of that batch and length, True for tokens whose row and column are to be exact.
            Padding is never kept.

    Layers that run "full" are exact already. Gradient checkpointing runs the forward pass again: call `backward` inside
    the block. It acts in all threads that call the model.

    Raises:
        TypeError: `tokens` is not a bool tensor (B,N).
        ValueError: nothing is swapped in, or a layer cannot keep tokens; in the forward pass, if the inputs are of
            another batch or length; and in a backward pass outside of the block, under gradient checkpointing.
    """
    model = transformers_model(model)
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.bool or tokens.ndim != 2:
        got = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"the tokens to keep must be a bool tensor (batch, tokens), got {got}")
    run_first(model)
    layers = [attached for attached in map(attached_to, model.modules()) if attached is not None]
    if not layers:
        raise ValueError(f"nothing is swapped into this {type(model).__name__}, whose attention is exact anyway")
    for attached in layers:
        reason = keep_refusal(attached.bound.method, cross=attached.cross, window=attached.window)
        if reason:
            raise ValueError(f"layer {attached.label} of {type(model).__name__} cannot keep tokens: {reason}")
    before = [attached.kept_now for attached in layers]
    try:
        for attached in layers:
            attached.kept_now = tokens
        yield
    finally:
        for attached, tokens_before in zip(layers, before, strict=True):
            attached.kept_now = tokens_before


def restore(model: AnyModel) -> None:
    """Restore a model's original attention, in place; a model that was not swapped is left alone.

    A model that was loaded from a folder that was saved while swapped gets what transformers gives it by default.
    """
    model = transformers_model(model)
    attached = [module for module in model.modules() if isinstance(getattr(module, NAME, None), Attached)]
    if attached or asks_for_ours(model.config):
        separate(model)
    for module in attached:
        delattr(module, NAME)
    if asks_for_ours(model.config) or any(ORIGINAL in vars(module) for module in model.modules()):
        for config, implementation in originals(model):
            config._attn_implementation = implementation
    for module in model.modules():
        vars(module).pop(ORIGINAL, None)
        split = vars(module).pop(ATTRIBUTE, None)
        if split is not None:
            split.remove()
    stop_checking(model)
    stop_counting(model)
    stop_explaining(model)
    unmark(model)
    give_back(model)


def describe(model: AnyModel) -> Swapped:
    """List the attention layers of a model and their methods, whether or not it is swapped.

    After another attention was set by other means, such as `model.set_attn_implementation`, a swapped layer counts as
    the model's own, and calling the model raises an error until `restore` or `swap` is called.
    """
    attached = attached_layers(model)
    keep = next((each.keep for each in attached.values() if each.keep is not None), None)
    methods = {number: each.bound.method for number, each in attached.items()}
    extended = _is_extended_to(model, transformers_model(model))
    return Swapped(tuple(find_layers(model)), methods, keep, _cut_at(model), extended)


def refusals(model: AnyModel, method: AnyMethod) -> dict[int, str]:
    """The layers that cannot run this method, and the reasons: {layer number: reason}. Empty when all can."""
    reasons = {layer.number: layer.refusal(_method_of(method)) for layer in find_layers(model)}
    return {number: reason for number, reason in reasons.items() if reason}


def bounds(model: AnyModel) -> dict[int, BoundMethod]:
    """The bound methods of a swapped model: {layer number: bound}. Empty if the model is not swapped."""
    return {number: attached.bound for number, attached in attached_layers(model).items()}


def attached_layers(model: AnyModel) -> dict[int, Attached]:
    """The bound methods attached to the layers of a model: {layer number: attached}."""
    run_first(transformers_model(model))
    by_number = {layer.number: attached_to(layer.module) for layer in find_layers(model)}
    return {number: attached for number, attached in by_number.items() if attached is not None}


def check_training(model: AnyModel) -> None:
    """Raise ValueError if training through a swapped layer would leak the future; names the layer."""
    for attached in attached_layers(model).values():
        attached.check_training()


def bind(
    layer: Layer, method: AnyMethod, max_length: int | None = None, *, shared: nn.Module | None = None
) -> BoundMethod:
    """Return a method bound to this layer, with new learned parameters; a bound method is only checked.

    `shared` are learned parameters of another layer, if layers share them.

    Raises:
        ValueError: it was bound for other head counts or another width than the layer's.
    """
    heads, kv_heads, head_dim = head_counts(layer)
    if not isinstance(method, BoundMethod):
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        device = next((x.device for x in layer.module.parameters() if not x.is_meta), None)  # meta if it is offloaded
        return resolve(method).bind(**sizes, max_length=max_length, shared=shared, device=device)
    if (method.heads, method.kv_heads, method.head_dim) != (heads, kv_heads, head_dim):
        raise ValueError(
            f"{method.method} was bound for {method.heads} heads of width {method.head_dim} and {method.kv_heads} key "
            f"heads, but layer {layer.label} has {heads} of width {head_dim} and {kv_heads}"
        )
    return method


def bind_all(
    layers: Many[Layer], methods: Mapping[int, AnyMethod], max_length: int | None = None
) -> dict[int, BoundMethod]:
    """`bind` for the layers with these numbers. One module serves all layers of a method that is one for all layers."""
    bound: dict[int, BoundMethod] = {}
    shared: dict[Method, nn.Module | None] = {}
    for number, wanted in methods.items():
        method = _method_of(wanted)
        common = method.traits.one_for_all_layers and not isinstance(wanted, BoundMethod)
        bound[number] = bind(layers[number], wanted, max_length, shared=shared.get(method) if common else None)
        if common:
            shared.setdefault(method, bound[number].learned)
    return bound


def _method_of(value: AnyMethod) -> Method:
    return value.method if isinstance(value, BoundMethod) else resolve(value)


def _assign(layers: list[Layer], method: AnyMethod | Mapping[Any, AnyMethod]) -> dict[int, AnyMethod]:
    if isinstance(method, BoundMethod):
        raise ValueError(f"{method.method} is bound to one layer; give a mapping from layer numbers to bound methods")
    if isinstance(method, str) and os.path.isdir(method) and find_method(method.partition(":")[0]) is None:
        raise ValueError(
            f"{method!r} is a folder: give the plan in it, sq.load_plan({method!r}), or the "
            f"adapter in it, with sq.hf.load_adapter(model, {method!r})"
        )
    if not isinstance(method, Mapping):
        return _outside_windows(layers, resolve(method))
    if not method:
        raise ValueError("the mapping from layers to methods is empty")
    methods: dict[int, AnyMethod] = {layer.number: Full() for layer in layers}
    for key, wanted in method.items():
        chosen = [layer.number for layer in layers if _names(key, layer)]
        if not chosen:
            raise ValueError(
                f"no layer is named by {key!r}; the model has layers 0 to {len(layers) - 1}, "
                f"from {layers[0].name!r} to {layers[-1].name!r}"
            )
        methods.update(dict.fromkeys(chosen, wanted if isinstance(wanted, BoundMethod) else resolve(wanted)))
    return methods


def _outside_windows(layers: list[Layer], method: Method) -> dict[int, AnyMethod]:
    """The method in every layer, but exact attention in those with a window inside which it cannot run."""
    reasons = {layer.number: layer.window_refusal(method) for layer in layers}
    if all(reasons.values()):
        raise ValueError(
            f"{reasons[layers[0].number]}, and all {len(layers)} layers of this model attend to a window only (and "
            "are cheap already): there is nothing to gain, so leave the model as it is"
        )
    return {layer.number: _inside_window(layer) if reasons[layer.number] else method for layer in layers}


def _inside_window(layer: Layer) -> Method:
    """Exact attention; in decoders that by subquad's kernel, whose steps on a cache are the faster ones."""
    return Full(kernel="subquad") if layer.causal else Full()


def _names(key: int | str, layer: Layer) -> bool:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise TypeError(f"layers are named by number or pattern, got {key!r}")
    return key == layer.number if isinstance(key, int) else fnmatchcase(layer.name, key)
