"""The properties of each attention layer of a model, found by a trial on a few random tokens.

A model's code does not declare who attends to whom: that is in the mask which it makes, in keywords of the call, in the
shapes of its keys. So before anything is swapped in, the model runs three times on the same small inputs:

    own         with its own attention
    recorded    with its own attention and masks, each call written down: who sees whom, sizes, windows, the output
    trial       with "full" through subquad's boundary, each call held against the recorded one

A model that does not come out equal is refused, with the first layer that differs or the model's own error. Padding on
both sides, packed sequences and two generated tokens on a static cache are tried if the model supports them. Results
are kept for as long as the model lives.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from subquad.hf.example_inputs import example_inputs
from subquad.hf.layers import Layer, inspect_layers, serving_decoders
from subquad.hf.saved import without_marks
from subquad.hf.trial import Run, TrialTrace, recorded_run, same_outputs, trial_run, undisturbed
from subquad.hf.unwrapping import AnyModel, transformers_model

Inputs = Mapping[str, Any]

_ON_CACHE = "generating on a static cache"
_UNCHANGED = "as given"
_GIVE_A_BATCH = "give a small batch of your own: sq.hf.swap(model, method, inputs=batch)"
_KNOWN: WeakKeyDictionary[PreTrainedModel, tuple[str, list[Layer]]] = WeakKeyDictionary()
_KNOWN_CLASSES: dict[Any, list[Layer]] = {}  # by class and config: layers of models that are equal in both
_MOST_CLASSES = 64  # of which the results are kept, the latest ones


def find_layers(model: AnyModel, *, inputs: Inputs | None = None) -> list[Layer]:
    """All attention layers of a model that go through transformers' attention interface, in the model's order.

    Args:
        model: any transformers model, or a wrapper around one.
        inputs: a small batch for the trial, where subquad cannot make one for this architecture.

    Raises:
        TypeError: not a transformers model, and not a wrapper around one.
        ValueError: the model, or a part of it, computes attention in its own way, or its attention is not the same
            through subquad's boundary; the message states where and why.
    """
    model = transformers_model(model)
    layers = inspect_layers(model)
    if getattr(model, "declares_attention", False):
        return layers
    mark = mark_of_trial(model, layers)
    known = _KNOWN.get(model)
    if known is not None and known[0] == mark and inputs is None and _modules_of(known[1]) == _modules_of(layers):
        return known[1]
    tried = serving_decoders(_tried(model, layers, inputs))
    _KNOWN[model] = (mark, tried)
    return tried


def find_layers_by_class(model: PreTrainedModel, *, compare: bool = True) -> list[Layer]:
    """Like `find_layers`, but a model is tried only if no other model of its class, modules, dtype and config was.

    Without `compare`, the model runs once with its own attention, which shows who attends to whom, and nothing is
    compared: a model whose attention is not the same through subquad's boundary is not found.

    Raises:
        ValueError: as in `find_layers`.
    """
    layers = inspect_layers(model)
    if getattr(model, "declares_attention", False):
        return layers
    if not compare:
        return serving_decoders(_tried(model, layers, None, compare=False))
    modules = dict(model.named_modules())
    if any("forward" in vars(module) for module in modules.values()):  # another library changed this model alone
        return find_layers(model)
    mark = mark_of_trial(model, layers)
    kind = type(model), model.dtype, mark, tuple(type(module) for module in modules.values())
    if kind in _KNOWN_CLASSES:
        _KNOWN[model] = mark, [replace(layer, module=modules[layer.name]) for layer in _KNOWN_CLASSES[kind]]
        return _KNOWN[model][1]
    tried = find_layers(model)
    _KNOWN_CLASSES[kind] = [replace(layer, module=nn.Identity()) for layer in tried]  # which holds no model
    for oldest in list(_KNOWN_CLASSES)[:-_MOST_CLASSES]:
        _KNOWN_CLASSES.pop(oldest, None)
    return tried


def _tried(model: PreTrainedModel, layers: list[Layer], inputs: Inputs | None, *, compare: bool = True) -> list[Layer]:
    """The layers as trials of the model, and of the parts of it that its inputs do not reach, show them."""
    trace = _try(model, layers, inputs, compare)
    for part in model.modules():
        missing = {layer.module for layer in layers} - trace.keys()
        if not missing:
            break
        if isinstance(part, PreTrainedModel) and part is not model and missing & set(part.modules()):
            try:
                batch = example_inputs(part)
                with undisturbed(part):
                    part(**batch)
            except Exception:  # this part does not run alone
                continue
            trace |= _try(part, layers, batch, compare)
    return [_as_traced(layer, trace.get(layer.module)) for layer in layers]


def _as_traced(layer: Layer, trace: TrialTrace | None) -> Layer:
    if trace is None:
        return layer
    cross = layer.cross or trace.cross
    return replace(layer, **vars(trace) | {"cross": cross, "causal": trace.causal and not cross})


def _try(model: PreTrainedModel, layers: list[Layer], inputs: Inputs | None, compare: bool) -> dict[Any, TrialTrace]:
    """The properties of each layer that was reached; ValueError if the model is not the same through the boundary."""
    runs: list[tuple[str, Run]] = _runs(model) if inputs is None else [(_UNCHANGED, partial(_forward, inputs))]
    try:
        return _try_runs(model, layers, runs, compare)
    except _DoesNotRunError as error:
        if inputs is None:
            try:
                return _try_runs(model, layers, _runs(model, images=False), compare)
            except _DoesNotRunError:  # messages about the first inputs are clearer
                pass
        raise ValueError(str(error)) from error.__cause__


class _DoesNotRunError(ValueError):
    """The model does not run on its first inputs with its own attention."""


def _try_runs(
    model: PreTrainedModel, layers: list[Layer], runs: list[tuple[str, Run]], compare: bool
) -> dict[Any, TrialTrace]:
    name = type(model).__name__
    traces: dict[Any, TrialTrace] = {}
    for number, (description, run) in enumerate(runs if compare else runs[:1]):
        try:
            with undisturbed(model):
                unchanged = run(model)
        except Exception as error:
            if number:  # a model that does not take such inputs
                continue
            fails = "does not run on the inputs that subquad made to try it"
            if description == _UNCHANGED:
                fails = "does not run on the inputs that were given to try it"
            raise _DoesNotRunError(f"{name} {fails} ({_one_line(error)}); {_GIVE_A_BATCH}") from error
        try:
            calls = recorded_run(model, run)
            for call in calls:
                traces[call.module] = call.trace.after(traces.get(call.module), on_cache=description == _ON_CACHE)
            if not compare:
                continue
            tried = [_as_traced(layer, traces.get(layer.module)) for layer in layers]
            if any(layer.reason for layer in tried):  # reported for each layer, when a method is put into it
                continue
            outputs = trial_run(model, tried, run, calls)
        except Exception as error:
            raise ValueError(
                f"{name} cannot run on subquad's attention: {_one_line(error)} (tried {description})"
            ) from error
        if all(call.defined for call in calls) and not same_outputs(unchanged, outputs, model.dtype):
            raise ValueError(
                f"{name} gives other outputs with its attention routed through subquad, though each layer's "
                "attention is the same: a part of it depends on the attention implementation"
            )
    return traces


def _runs(model: PreTrainedModel, *, images: bool = True) -> list[tuple[str, Run]]:
    """The inputs to try: first those that the model must accept, then those that not every model accepts.

    Without `images` that is text alone, unpadded: the config of a model of text and images may lack what it needs for
    more, such as the token that starts an image.
    """
    if model.device.type == "meta":
        raise ValueError(
            f"{type(model).__name__} is on the meta device; load its weights before swapping. If accelerate "
            "offloads them (cpu_offload, a device_map with 'cpu' or 'disk'), swap first and offload the swapped model"
        )
    try:
        plain, left = example_inputs(model, images=images), None
    except ValueError as error:
        raise ValueError(f"{error}; {_GIVE_A_BATCH}") from error
    runs: list[tuple[str, Inputs]]
    try:
        runs = [("with padding on the right", example_inputs(model, images=images, padding="right"))]
        left = example_inputs(model, images=images, padding="left")
        runs.append(("with padding on the left", left))
    except ValueError:
        runs = [("without padding", plain)]
    if not images:
        runs = [("without padding", plain), *(run for run in runs if run[1] is not plain)]
    ids = plain.get("input_ids")
    if ids is not None and ids.shape[1] > 3 and "decoder_input_ids" not in plain:
        positions = torch.arange(ids.shape[1], device=ids.device)
        positions = torch.where(positions < 3, positions, positions - 3).expand(ids.shape)
        packed = {key: value for key, value in plain.items() if key != "attention_mask"}
        runs.append(("with packed sequences", packed | {"position_ids": positions, "use_cache": False}))
    tried: list[tuple[str, Run]] = [(description, partial(_forward, batch)) for description, batch in runs]
    if model.can_generate():
        prompt = plain if model.config.is_encoder_decoder or left is None else left
        prompt = {key: value for key, value in prompt.items() if not key.startswith("decoder_")}
        tried.append((_ON_CACHE, partial(_generate, prompt)))
    return tried


def _forward(batch: Inputs, model: PreTrainedModel) -> Any:
    return model(**batch)


def _generate(prompt: Inputs, model: PreTrainedModel) -> Any:
    """Two tokens, of which the second is a step on the cache that the first filled."""
    length = {"max_new_tokens": 2, "min_new_tokens": 2}
    return model.generate(**prompt, **length, do_sample=False, cache_implementation="static", disable_compile=True)


def mark_of_trial(model: PreTrainedModel, layers: list[Layer]) -> str:
    """The scope of a trial's result: these layers under this config."""
    config = without_marks(model.config.to_dict())
    return json.dumps([[layer.name for layer in layers], str(config)])


def _modules_of(layers: list[Layer]) -> list[nn.Module]:
    """The modules of layers, whose names stay the same if modules are moved or replaced."""
    return [layer.module for layer in layers]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if not isinstance(error, ValueError) else text[:400]
