"""Plans: which method runs in which layer at which length, in a folder that `subquad plan` wrote.

plan.json              methods by length and layer, the model that they are for, what was verified, a digest of all this
adapter.safetensors    next to adapter.json: learned parameters, where a method has some (see `adapters`)
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from subquad.core import checksums as seals
from subquad.core import files
from subquad.core.environment import OUTPUT, differences
from subquad.core.spelling import listed
from subquad.hf.adapters import Adapter, read_adapter, same_kind, save_adapter
from subquad.hf.layers import Layer, head_counts
from subquad.hf.positions import position_limit, rotary_limit
from subquad.hf.unwrapping import AnyModel
from subquad.methods import BoundMethod, ByLength, Full, Method, from_dict
from subquad.methods.by_length import Step
from subquad.methods.core.plugins import record_of

FORMAT = 1
FILE = "plan.json"
_REMEDY = "make it again (subquad plan)"
_METRICS = ("fidelity", "bound", "confidence", "speedup")  # of each length
_SIZES = ("batch", "tokens", "padded")  # of the batches of a length
_MEMBERS = {"model": dict, "lengths": list, "layers": dict, "verified": dict, "made_on": dict}


@dataclass(frozen=True)
class Plan:
    """A method for each layer and length; `sq.hf.swap(model, plan)` puts them into the model.

    `layers` has a method for each layer, `by-length` where lengths differ. `lengths` are those that were planned.
    `verified` maps each of them, as text, to measurements on held-out passages: "fidelity" (mean), "bound" (its
    lower bound at "confidence"), "floor", "passages", "speedup" of the whole model, "batches" if inputs were batches of
    texts with lengths of their own, and for `sq.audit` "baseline" and "output", the floor in the unit of the model's
    output, where an audit can measure it.
    """

    model: dict[str, Any]  # the description by `describe_model`
    lengths: tuple[int, ...]
    layers: dict[int, Method]
    verified: dict[str, dict[str, Any]]
    made_on: dict[str, Any] = field(default_factory=dict)  # versions, hardware, the text's fingerprint, the command
    bounds: dict[int, BoundMethod] = field(default_factory=dict, compare=False)  # with learned parameters
    adapter: Adapter | None = field(default=None, compare=False)  # those of a plan that was read

    def __str__(self) -> str:
        listed = [f"layer {number}: {method}" for number, method in sorted(self.layers.items())]
        return "\n".join([*listed, *(f"{length} tokens: {self.description(int(length))}" for length in self.verified)])

    def description(self, length: int) -> str:
        """A description in words of what was verified at a planned length."""
        measured = self.verified[str(length)]
        batches = f" ({batches_in_words(measured['batches'])})" if measured.get("batches") else ""
        requests = measured.get("requests")
        whole = f", {requests['speedup']:.2f}× with {requests['new_tokens']} new tokens" if requests else ""
        return (
            f"fidelity {measured['fidelity']:.4f}, at least {measured['bound']:.4f} at confidence "
            f"{measured['confidence']:g}; {measured['speedup']:.2f}× the speed of exact attention{whole}{batches}"
        )

    def baseline(self, length: int) -> dict[str, Any]:
        """The usual errors of the layers at a planned length, for `sq.audit(model, baseline=plan.baseline(2048), …)`.

        Raises:
            ValueError: the length was not planned, or exact attention runs there.
        """
        recorded = self.verified.get(str(length), {}).get("baseline")
        if recorded is None:
            have = [n for n, entry in self.verified.items() if entry.get("baseline")]
            those = f"it has one for {listed(have)} tokens" if have else "it has none at any length"
            raise ValueError(
                f"the plan has no baseline for {length} tokens; {those}. Lengths have one where a verified plan runs "
                "something else than exact attention"
            )
        floor = self.verified[str(length)].get("output")
        return dict(recorded) if floor is None else {**recorded, "floor": floor}

    @property
    def floor(self) -> dict[str, Any] | None:
        """The minimum fidelity of the verified plan, in the unit of the model's output, which `sq.audit` monitors.

        {"min_fidelity": 0.99, "pooling": "mean"} of embeddings, {"max_kl": 0.002} or {"min_agreement": 0.99} of next
        tokens. None where the plan was made with a loss or a metric of one's own, or for a masked language model.
        """
        return next((entry["output"] for entry in self.verified.values() if entry.get("output")), None)

    @property
    def recorded(self) -> dict[str, Any]:
        """The members that `swap` records with the model: floor, what was verified, and with which versions."""
        made_with = self.made_on.get("versions")
        members: dict[str, Any] = {"floor": self.floor, "verified": self.verified}
        if isinstance(made_with, dict):
            members["versions"] = {package: made_with[package] for package in OUTPUT if package in made_with}
        return members

    @property
    def extended_to(self) -> int | None:
        """The tokens to which the positions of the model were extended for the plan; None if they were not."""
        tokens = self.made_on.get("extended_to")
        return tokens if isinstance(tokens, int) else None

    def for_model(self, model: AnyModel) -> dict[int, Method | BoundMethod]:
        """The mapping for `swap` that puts the plan into this model.

        Raises:
            ValueError: the plan is for another class of model, for layers of other numbers or shapes, for longer
                positions, or, where methods have learned parameters, for other weights.
        """
        tokens, limits = self.extended_to, (position_limit(model), rotary_limit(model))
        limit = min((each for each in limits if each is not None), default=None)
        if tokens is not None and limit is not None and limit < tokens:
            raise ValueError(
                f"this plan is for positions that were extended to {tokens:,} tokens, but this model has {limit:,}: "
                f"call sq.hf.extend_positions(model, {tokens}) first"
            )
        return self.by_layer(model)

    def by_layer(self, model: AnyModel) -> dict[int, Method | BoundMethod]:
        """`for_model`, for any positions of the model.

        Raises:
            ValueError: the plan is for another class of model, for layers of other numbers or shapes, or, where methods
                have learned parameters, for other weights.
        """
        same_kind(self.model, model, "this plan")
        read = {} if self.adapter is None else self.adapter.bounds(model)
        learned = {number: read[number] for number in self.learned if number in read}
        return {**self.layers, **learned, **self.bounds}

    @property
    def distinct(self) -> list[Method]:
        """The methods of all layers and lengths, each once, without exact attention."""
        steps = [
            method.at if isinstance(method, ByLength) else [Step(0, method)]
            for _, method in sorted(self.layers.items())
        ]
        return [
            method
            for method in dict.fromkeys(step.method for layer_steps in steps for step in layer_steps)
            if method != Full()
        ]

    @property
    def learned(self) -> dict[int, Method]:
        """The methods of the plan that have learned parameters."""
        return {number: method for number, method in self.layers.items() if method.traits.learned}

    def save(self, path: str | Path, model: AnyModel | None = None) -> Path:
        """Write the plan into a folder, with an adapter next to it if methods have learned parameters.

        Raises:
            ValueError: it has learned parameters, and `model`, whose layers they are, is not given or is another one.
        """
        folder = Path(path)
        if self.learned:
            if model is None:
                raise ValueError("the plan has learned parameters, which are saved for a model: plan.save(path, model)")
            bounds = {n: bound for n, bound in self.by_layer(model).items() if isinstance(bound, BoundMethod)}
            save_adapter(model, folder, bounds=bounds)
        content = {
            "format": FORMAT,
            "model": self.model,
            "lengths": list(self.lengths),
            "layers": {str(number): record_of(method) for number, method in sorted(self.layers.items())},
            "verified": self.verified,
            "made_on": self.made_on,
        }
        files.write_all({FILE: seals.sealed_json(content)}, folder)
        return folder


def load_plan(path: str | Path) -> Plan:
    """Read a plan that `subquad plan` wrote: a folder, or its plan.json.

    Raises:
        ValueError: there is none, it is damaged or of another version, a method in it is unknown, or the learned
            parameters of one are not in the adapter next to it; names the file.

    Warns:
        UserWarning: it was edited by hand since it was verified, so `verified` is about another plan. Or it was
            made on other hardware or versions, so its speeds are not those here.
    """
    folder = Path(path)
    folder = folder.parent if folder.name == FILE else folder
    file = folder / FILE
    if not file.is_file():
        raise ValueError(
            f"no plan at {folder}: {'it has no ' + FILE if folder.is_dir() else 'there is no such folder'}"
        )
    content = seals.parsed(file, _REMEDY)
    if content.get("format") != FORMAT:
        raise ValueError(f"{file} has format {content.get('format')!r}, but this version reads {FORMAT}; {_REMEDY}")
    for name, kind in _MEMBERS.items():
        if not isinstance(content.get(name), kind):
            raise seals.Damaged(file, f"its {name!r} is {str(content.get(name))[:50]!r}", _REMEDY)
    if content.get(seals.DIGEST) != seals.digest_of({k: v for k, v in content.items() if k != seals.DIGEST}):
        warnings.warn(f"{file} was edited since it was written: its verification is of another plan", stacklevel=2)
    model = content["model"]
    if not isinstance(model.get("class"), str) or not isinstance(model.get("layers"), list):
        raise seals.Damaged(file, "it does not name its model", _REMEDY)
    for number, shape in enumerate(model["layers"]):
        if not isinstance(shape, list) or [type(n) for n in shape] != [int] * 3 or min(shape) < 1:
            raise seals.Damaged(
                file, f"the heads, key heads and width of layer {number} are {str(shape)[:50]}", _REMEDY
            )
    layers, last = {}, len(model["layers"]) - 1
    known = {str(number) for number in range(last + 1)}
    for number, settings in content["layers"].items():
        if number not in known:
            raise ValueError(f"{file} has a method for layer {number[:20]!r}, but the model has layers 0 to {last}")
        if not isinstance(settings, dict):
            raise seals.Damaged(file, f"the method of layer {number} is {str(settings)[:50]!r}", _REMEDY)
        try:
            layers[int(number)] = from_dict(settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}, layer {number}: {error}") from None
    if not all(type(length) is int and length > 0 for length in content["lengths"]):
        raise seals.Damaged(file, f"its lengths are {str(content['lengths'])[:50]}", _REMEDY)
    for length, entry in content["verified"].items():
        if not _is_verification(entry):
            raise seals.Damaged(file, f"what it verified at {length[:20]} tokens is {str(entry)[:50]}", _REMEDY)
    _say_where_it_was_made(file, content["made_on"])
    plan = Plan(model, tuple(content["lengths"]), layers, content["verified"], content["made_on"])
    return replace(plan, adapter=_adapter_of(plan, folder)) if plan.learned else plan


def batches_in_words(sizes: Mapping[str, Any]) -> str:
    """A description of the batches of a length.

    >>> batches_in_words({"batch": 8, "tokens": 284.2, "padded": 490.7})
    'batches of 8, mean 284 tokens, padded to 491'
    >>> batches_in_words({"batch": 1, "tokens": 1284.2, "padded": 1284.2})
    'single texts, mean 1,284 tokens'
    """
    mean = f"mean {sizes['tokens']:,.0f} tokens"
    if sizes["batch"] == 1:
        return f"single texts, {mean}"
    return f"batches of {sizes['batch']}, {mean}, padded to {sizes['padded']:,.0f}"


def _is_verification(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and all(type(entry.get(name)) in (int, float) and math.isfinite(entry[name]) for name in _METRICS)
        and isinstance(entry.get("baseline"), dict | None)
        and isinstance(entry.get("output"), dict | None)
        and _has_sizes(entry.get("batches"))
    )


def _has_sizes(batches: Any) -> bool:
    return batches is None or (
        isinstance(batches, dict) and all(type(batches.get(name)) in (int, float) for name in _SIZES)
    )


def _say_where_it_was_made(file: Path, made_on: Mapping[str, Any]) -> None:
    differs = differences(made_on)
    if differs:
        present, here = (", ".join(f"{what} {pair[side]}" for what, pair in differs.items()) for side in (0, 1))
        warnings.warn(
            f"{file} was made with {present}, but this is {here}: its times were measured there, and another "
            "plan may be faster here",
            stacklevel=3,
        )


def _adapter_of(plan: Plan, folder: Path) -> Adapter:
    """The adapter next to a plan, which has the learned parameters of all its methods."""
    try:
        adapter = read_adapter(folder)
    except ValueError as error:
        number, method = next(iter(plan.learned.items()))
        raise ValueError(f"{folder / FILE}: the learned parameters of layer {number}, {method}: {error}") from None
    for number, method in plan.learned.items():
        if adapter.methods.get(number) != method:
            raise ValueError(
                f"{folder / FILE}: layer {number} runs {method}, but the adapter next to it has "
                f"{adapter.methods.get(number, 'nothing')} for it; {_REMEDY}"
            )
    return adapter


def joined(layer: Layer, steps: Mapping[int, Method | BoundMethod]) -> tuple[Method, BoundMethod | None]:
    """One method for a layer from those of several lengths, and the same bound where some have learned parameters.

    `by-length`, or the method itself where all lengths have the same.
    """
    methods = {
        start: step_method.method if isinstance(step_method, BoundMethod) else step_method
        for start, step_method in steps.items()
    }
    together = ByLength(methods)
    learned = {
        step_method.method: step_method for step_method in steps.values() if isinstance(step_method, BoundMethod)
    }
    if len(together.at) == 1:
        method = together.at[0].method
        return method, learned.get(method)
    if not learned:
        return together, None
    heads, kv_heads, width = head_counts(layer)
    modules = {str(n): learned[step.method].learned for n, step in enumerate(together.at) if step.method in learned}
    lengths = [bound.max_length for bound in learned.values()]
    return together, BoundMethod(
        together,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        learned=nn.ModuleDict({number: module for number, module in modules.items() if module is not None}),
        max_length=next((length for length in lengths if length is not None), None),
    )
