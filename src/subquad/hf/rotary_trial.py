"""The rotary positions of each layer of a decoder, determined by a trial on a few random tokens.

In the trial every attention layer gets one vector as its input at all positions, in place of its hidden states. Its
queries then differ by their positions alone:

    q_p = R_p q_0        R_p turns pairs of components by the angles p·θ: `Rotary.turned(q_0, p)`

Candidates for θ are the model's buffers inv_freq, both directions, with pairs of neighbours and of halves. The layer
has the candidate that reproduces the queries; if none does, it is refused. Learned positions, which are added to
hidden states, ALiBi and layers without positions leave the queries as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.hf.example_inputs import example_inputs
from subquad.hf.item_rotary import (
    TwoRotaries,
    frequencies_in,
    holds_frequencies,
    item_rotaries,
    original_modules,
    same_frequencies,
    with_longer,
)
from subquad.hf.layers import Layer
from subquad.hf.split import takes
from subquad.hf.trial import recorded_run
from subquad.kernels.tokens.rotary import Rotary

_TOKENS = 16
_OFFSETS = 61, 509  # of positions that a model is given, in addition to those that it counts itself
_SUFFIX = re.compile(r"_?(original_)?inv_freq$")
_ROUNDING = 1e-3, 3e-2  # of fp32 and of 16-bit queries, relative to the size of a component


@dataclass(frozen=True)
class _Candidate:
    """Frequencies of a model, and why they do not serve all positions of its layers; None if they do."""

    rotary: Rotary
    refusal: str | None = None


@dataclass
class _Queries:
    """The queries (C,H,D) of a layer's C calls at its first position, and for the same input some positions later."""

    first: Tensor
    later: dict[int, Tensor]

    @property
    def comparable(self) -> bool:
        """True if these queries distinguish candidates."""
        return all(bool(x.isfinite().all()) and bool(x.any()) for x in (self.first, *self.later.values()))

    def distance_from(self, rotary: Rotary) -> float:
        """The distance of the later queries from the first one turned, in the component where they are farthest.

        Each component counts relative to its size: biases make some of them a hundred times larger than others.
        """
        if 2 * len(rotary.frequencies) > self.first.shape[-1]:
            return float("inf")
        first, later = self.first.double(), torch.stack(list(self.later.values())).double()
        turned = torch.stack([rotary.turned(first, shift) for shift in self.later])
        sizes = later.flatten(0, -2).norm(dim=0)
        return float(((turned - later).flatten(0, -2).norm(dim=0) / sizes.clamp(min=1e-3 * float(sizes.max()))).max())


def find_rotary(model: PreTrainedModel, layers: list[Layer]) -> dict[nn.Module, Rotary | TwoRotaries | None]:
    """The rotary positions of self-attention layers, by their modules. None: positions do not turn the queries.

    The model runs up to three times on 16 tokens, and is left as it was. Layers of a model whose rotary positions were
    extended have those of its short items and of its long ones.

    Args:
        model: before anything is swapped in, or after.
        layers: some of its layers of self-attention.

    Raises:
        ValueError: a layer is not reached, or its queries depend on positions in a way that is not known, or by
            frequencies that change with the length, or on several axes of positions; names the layer.
    """
    if getattr(model, "declares_attention", False):  # its layers provide their positions
        return {module: cast(Any, module).rotary for module in (layer.module for layer in layers)}
    candidates = _candidates(model)
    queries = _all_queries(model, {layer.module for layer in layers})
    rotaries: dict[nn.Module, Rotary | TwoRotaries | None] = {}
    for layer in layers:
        try:
            match = _matching(candidates, queries.get(layer.module))
            rotaries[layer.module] = None if match is None else with_longer(match, model)
        except ValueError as error:
            raise ValueError(f"layer {layer.label} of {type(model).__name__}: {error}") from None
    return rotaries


def has_fixed_frequencies(model: nn.Module) -> bool:
    """True if a model has rotary frequencies, and all of them serve all lengths and one axis of positions."""
    candidates = _candidates(model)
    return bool(candidates) and all(candidate.refusal is None for candidate in candidates)


def _matching(candidates: list[_Candidate], queries: _Queries | None) -> Rotary | None:
    """The candidate by which the queries of a layer are turned; None if they are not."""
    if queries is None:
        raise ValueError("it is not reached by the inputs that subquad makes, so its positions are not known")
    if not queries.comparable:
        raise ValueError("its queries are 0 or not finite on random tokens, so its positions are not known")
    unturned = _Candidate(Rotary(torch.zeros(0, device=queries.first.device)))
    exact = queries.first.dtype in (torch.float32, torch.float64)
    distance, number = min((queries.distance_from(c.rotary), n) for n, c in enumerate([unturned, *candidates]))
    if not distance <= _ROUNDING[not exact]:
        known = "any of the model's rotary frequencies" if candidates else "rotary frequencies in a buffer `inv_freq`"
        raise ValueError(f"its queries depend on their positions, but not by {known}, so their positions are not known")
    if number == 0:
        return None
    match = candidates[number - 1]
    if match.refusal is not None:
        raise ValueError(match.refusal)
    return match.rotary


# ---------------------------------------------------------------------- the frequencies


def _candidates(model: nn.Module) -> list[_Candidate]:
    """Each set of frequencies among the buffers of a model once, for halves and for neighbours, in both directions."""
    distinct: list[tuple[Tensor, str | None]] = []
    for owner in original_modules(model):
        for name, buffer in owner.named_buffers(recurse=False):
            if not holds_frequencies(name, buffer):
                continue
            frequencies = frequencies_in(buffer)
            refusal = _refusal(owner, name)
            equal = next((n for n, (other, _) in enumerate(distinct) if same_frequencies(other, frequencies)), None)
            if equal is None:
                distinct.append((frequencies, refusal))
            elif refusal is not None:  # which of the two the layer reads cannot be told
                distinct[equal] = distinct[equal][0], refusal
    return [
        _Candidate(Rotary(direction * frequencies, interleaved), refusal)
        for frequencies, refusal in distinct
        for direction in (1, -1)  # backwards in NanoChat
        for interleaved in (False, True)
    ]


def _refusal(owner: nn.Module, name: str) -> str | None:
    """The reason why the frequencies in this buffer of a module do not serve all positions; None if they do."""
    layer_type = _SUFFIX.sub("", name)  # such as "full_attention", where a model has several
    config = getattr(owner, "config", None)
    parameters: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parameters = _of_layer_type(parameters, layer_type)
    rope_type: Any = getattr(owner, "rope_type", None)
    rope_type = rope_type.get(layer_type) if isinstance(rope_type, Mapping) else rope_type
    rope_type = rope_type or parameters.get("rope_type") or parameters.get("type") or "default"
    if "dynamic" in rope_type or rope_type == "longrope":
        return f"its rotary positions are of the type {rope_type!r}, whose frequencies change with the length"
    if parameters.get("mrope_section") is not None or getattr(owner, "mrope_section", None) is not None:
        return "its rotary positions have several axes (mrope_section), so tokens have no one distance"
    return None


def _of_layer_type(parameters: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    chosen = parameters.get(layer_type)
    return chosen if isinstance(chosen, Mapping) else parameters


# ---------------------------------------------------------------------- the trial


def _all_queries(model: PreTrainedModel, modules: set[nn.Module]) -> dict[nn.Module, _Queries]:
    """The queries of these layers, from runs of the model and of the parts that its inputs do not reach."""
    queries: dict[nn.Module, _Queries] = {}
    for part in model.modules():
        missing = modules - queries.keys()
        if not missing:
            break
        if isinstance(part, PreTrainedModel) and missing & set(part.modules()):
            queries |= _queries_of(part, missing)
    return queries


def _queries_of(part: PreTrainedModel, modules: set[nn.Module]) -> dict[nn.Module, _Queries]:
    """The queries of those of these layers that a run of a model reaches; empty if it does not run."""
    limit = min([_position_limit(part.config), *(each.rows for each in item_rotaries(part))])
    tokens = min(_TOKENS, limit)
    inputs: dict[nn.Module, Tensor] = {}
    try:
        batch: dict[str, Any] = dict(example_inputs(part, batch=1, length=tokens, images=False))
        if takes(part, "use_cache"):
            batch["use_cache"] = False
        first = _run(part, batch, modules, inputs)
    except Exception:  # this part does not run alone
        return {}
    queries = {
        module: _Queries(x[:, :, 0], {shift: x[:, :, shift] for shift in {1, 5, x.shape[2] - 1} if shift < x.shape[2]})
        for module, x in first.items()
        if x.shape[2] > 1
    }
    of_decoder = "decoder_" if part.config.is_encoder_decoder else ""
    ids = batch.get(of_decoder + "input_ids")
    if ids is None or not takes(part, of_decoder + "position_ids"):
        return queries
    for offset in sorted({min(offset, limit - ids.shape[1]) for offset in _OFFSETS}):
        at = torch.arange(offset, offset + ids.shape[1], device=ids.device)[None]
        try:
            shifted = _run(part, batch | {of_decoder + "position_ids": at}, modules, inputs)
        except Exception:  # positions of another shape, which the model counts itself
            break
        for module in queries.keys() & shifted.keys():
            x = shifted[module]
            queries[module].later |= {offset + index: x[:, :, index] for index in (0, x.shape[2] - 1)}
    return queries


def _run(
    part: PreTrainedModel, batch: Mapping[str, Any], modules: set[nn.Module], inputs: dict[nn.Module, Tensor]
) -> dict[nn.Module, Tensor]:
    """The queries (C,H,N,D) of each layer's C calls, where its input is one vector at all positions."""
    calls: dict[nn.Module, list[Tensor]] = {}
    with _constant_inputs(modules & set(part.modules()), inputs):
        for call in recorded_run(part, lambda model: model(**batch)):
            if call.module in inputs:
                calls.setdefault(call.module, []).append(call.query)
    return {module: torch.cat(queries) for module, queries in calls.items() if len({q.shape for q in queries}) == 1}


@contextmanager
def _constant_inputs(modules: set[nn.Module], inputs: dict[nn.Module, Tensor]) -> Iterator[None]:
    """Give each layer one vector at all positions: that in `inputs`, or its first token's, which is put there."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            return None
        constant = inputs.setdefault(module, hidden[:1, :1].clone()).expand_as(hidden).contiguous()
        return ((constant, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": constant})

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _position_limit(config: Any) -> int:
    """The number of positions that the trial may use: those of the model, and those before its frequencies change."""
    config = config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    limits = [getattr(config, "max_position_embeddings", None)]
    for each in (parameters, *(each for each in parameters.values() if isinstance(each, Mapping))):
        limits.append(each.get("original_max_position_embeddings"))
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=2048)
