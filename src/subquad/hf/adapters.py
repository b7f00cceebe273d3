"""Adapters: learned parameters of swapped attention, in a folder beside the model.

adapter.safetensors    "<layer number>.<parameter>" → tensor
adapter.json           the methods of the layers, the model that they belong to, the record of their training
README.md              the same for readers
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from subquad.hf.doors import AnyModel, own_parameters, transformers_model
from subquad.hf.layers import head_counts
from subquad.hf.positions import position_limit
from subquad.hf.probe import find_layers
from subquad.hf.swapping import AnyMethod, Swapped, bind_all, swap
from subquad.hf.swapping import bounds as _bounds
from subquad.methods import Bound, Method, from_dict

FORMAT = 1
TENSORS, SETTINGS, CARD = "adapter.safetensors", "adapter.json", "README.md"


@dataclass(frozen=True)
class Adapter:
    """Learned parameters as read from a folder, checked against themselves but not yet against a model."""

    path: Path
    methods: dict[int, Method]
    model: dict[str, Any]
    record: dict[str, Any]
    tensors: dict[int, dict[str, Tensor]]

    def bounds(self, model: AnyModel, *, any_weights: bool = False) -> dict[int, Bound]:
        """The adapter's methods bound to this model's layers, with their parameters.

        Raises:
            ValueError: the adapter belongs to another model: to other layers, or (unless `any_weights`) other weights.
        """
        layers = find_layers(model)
        mine = describe_model(model)
        for what in ("class", "layers"):
            if self.model[what] != mine[what]:
                raise ValueError(
                    f"the adapter {self.path} was made for a {self.model['class']} with {_shape(self.model)}, but this "
                    f"is a {mine['class']} with {_shape(mine)}"
                )
        comparable = self.model["dtype"] == mine["dtype"]  # a mark of rounded weights is another one
        if comparable and self.model["weights"] != mine["weights"] and not any_weights:
            raise ValueError(
                f"the adapter {self.path} was fitted to other weights of the same architecture; fit one to this model "
                "(subquad calibrate), or pass any_weights=True if these are close to those"
            )
        made = bind_all(layers, self.methods, self.model["max_length"])
        for number, bound in made.items():
            _load(bound, self.tensors.get(number, {}), f"{self.path / TENSORS}, layer {number}")
        device = transformers_model(model).device
        return {number: bound.to(device).eval() for number, bound in made.items()}


def save_adapter(
    model: AnyModel,
    path: str | Path,
    *,
    bounds: Mapping[int, Bound] | None = None,
    record: Mapping[str, Any] | None = None,
    card: str = "",
    max_length: int | None = None,
) -> Path:
    """Write the learned parameters of a swapped model's layers as an adapter folder.

        sq.hf.save_adapter(model, "my-adapter")

    Args:
        model: whose layers they are.
        path: the folder; made where it is not there, and what it holds of an adapter is replaced at once.
        bounds: {layer number: bound method}; by default those that run in the model.
        record: of their training, as plain data.
        card: Markdown for readers.
        max_length: the longest length that they were bound for, where their number depends on it; by default the one
            that `bind` was given.

    Raises:
        ValueError: none of them has learned parameters, the layers were bound for several longest lengths, or the path
            is a file.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot save an adapter at {folder}: it is a file; give a folder")
    given = _bounds(model) if bounds is None else bounds
    tensors = {
        f"{number}.{name}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for number, bound in given.items()
        if bound.learned is not None
        for name, tensor in bound.learned.state_dict().items()
    }
    if not tensors:
        raise ValueError("none of these layers has learned parameters, so there is nothing to save")
    settings = {
        "format": FORMAT,
        "model": {**describe_model(model), "max_length": max_length or _bound_length(given) or position_limit(model)},
        "methods": {str(number): bound.method.to_dict() for number, bound in given.items()},
        "record": dict(record or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / f"{TENSORS}.part")
    settings["tensors"] = _digest(folder / f"{TENSORS}.part")
    (folder / f"{SETTINGS}.part").write_text(json.dumps(settings, indent=1), "utf-8")
    os.chmod(folder / f"{TENSORS}.part", (folder / f"{SETTINGS}.part").stat().st_mode)  # safetensors hides its files
    (folder / f"{CARD}.part").write_text(card, "utf-8")
    for name in (TENSORS, CARD, SETTINGS):
        os.replace(folder / f"{name}.part", folder / name)
    return folder


def read_adapter(path: str | Path) -> Adapter:
    """Read an adapter folder.

    Raises:
        ValueError: there is none, or a file of it is missing or damaged; names the file.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"no adapter at {folder}: {'it is a file' if folder.exists() else 'there is no such folder'}")
    if (folder / ".progress").exists() and not (folder / SETTINGS).exists():
        raise ValueError(f"no adapter at {folder} yet: its calibration was cut off; start the same command again")
    for name in (SETTINGS, TENSORS):
        if not (folder / name).is_file():
            raise ValueError(f"no adapter at {folder}: it has no {name}")
    try:
        settings = json.loads((folder / SETTINGS).read_text("utf-8"))
        made = settings["format"]
        model, record, digest = settings["model"], settings["record"], settings["tensors"]
        given = {int(number): method for number, method in settings["methods"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # the latter: no JSON, no text, no number
        raise ValueError(f"{folder / SETTINGS} is damaged: {type(error).__name__}: {error}") from None
    if made != FORMAT:
        raise ValueError(f"{folder / SETTINGS} has format {made!r}, but this version reads {FORMAT}")
    if missing := {"class", "layers", "dtype", "weights", "max_length"} - set(model):
        raise ValueError(f"{folder / SETTINGS} is damaged: it does not say the model's {', '.join(sorted(missing))}")
    try:
        methods = {number: from_dict(method) for number, method in given.items()}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / SETTINGS} is damaged, or of another version: {error}") from None
    if beyond := sorted(set(methods) - set(range(len(model["layers"])))):
        raise ValueError(f"{folder / SETTINGS} is damaged: it has a method for layer {beyond[0]}, which is none")
    if _digest(folder / TENSORS) != digest:
        raise ValueError(f"{folder / TENSORS} is damaged: it does not hold what {SETTINGS} says")
    try:
        flat = load_file(folder / TENSORS)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / TENSORS} is damaged: {error}") from None
    tensors: dict[int, dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        number, _, parameter = name.partition(".")
        tensors.setdefault(int(number), {})[parameter] = tensor
    if unclaimed := sorted(set(tensors) - set(methods)):
        raise ValueError(f"{folder / SETTINGS} is damaged: layer {unclaimed[0]} has parameters but no method")
    return Adapter(folder, methods, model, record, tensors)


def load_adapter(model: AnyModel, path: str | Path, *, any_weights: bool = False) -> Swapped:
    """Put an adapter's methods, with their learned parameters, into a model, in place. Other layers stay exact.

        sq.hf.load_adapter(model, "lha-adapter")

    Args:
        model: the one that the adapter was fitted to.
        path: the folder that `subquad calibrate` or `save_adapter` wrote.
        any_weights: take a model of the same architecture with other weights too.

    Raises:
        ValueError: the folder or a file of it is missing or damaged, or it belongs to another model; the model is left
            as it was.
    """
    adapter = read_adapter(path)
    methods: dict[Any, AnyMethod] = dict(adapter.bounds(model, any_weights=any_weights))
    return swap(model, methods)


def describe_model(model: AnyModel) -> dict[str, Any]:
    """What an adapter remembers of its model: class, (heads, key heads, width) of each layer, dtype, weights' mark."""
    model = transformers_model(model)
    shapes = [list(head_counts(layer)) for layer in find_layers(model)]
    return {"class": type(model).__name__, "layers": shapes, "dtype": str(model.dtype), "weights": weights_mark(model)}


def weights_mark(model: AnyModel) -> str:
    """A mark of a model's own weights in 16 hexadecimal digits, from the first numbers of each tensor.

    Learned positions are left out, which `extend_positions` stretches, and so are swapped methods' parameters. PEFT
    adapters count where they change the model: under a LoRA that is not trained yet the mark is the base model's.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(own_parameters(transformers_model(model))):
        if ".subquad." not in name and "position" not in name:
            first = parameter.detach().flatten()[:64].to("cpu", torch.float32)
            digest.update(name.encode() + str(tuple(parameter.shape)).encode() + first.numpy().tobytes())
    return digest.hexdigest()[:16]


def _bound_length(bounds: Mapping[int, Bound]) -> int | None:
    """The longest length that the layers with learned parameters were bound for; None where none was said."""
    lengths = sorted({bound.max_length for bound in bounds.values() if bound.learned is not None and bound.max_length})
    if len(lengths) > 1:
        raise ValueError(
            f"the layers were bound for longest lengths of {' and '.join(map(str, lengths))}, but an adapter has one "
            "for all: bind them for the same, or give max_length=… where no parameter depends on it"
        )
    return lengths[0] if lengths else None


def _load(bound: Bound, tensors: dict[str, Tensor], where: str) -> None:
    learned = bound.learned or nn.Module()
    wanted, given = learned.state_dict(), tensors
    if wanted.keys() != given.keys():
        raise ValueError(f"{where}: {bound.method} has {sorted(wanted)}, but the adapter holds {sorted(given)}")
    for name, tensor in wanted.items():
        if tensor.shape != given[name].shape:
            raise ValueError(
                f"{where}: {name} of {bound.method} is {tuple(tensor.shape)}, but the adapter holds "
                f"{tuple(given[name].shape)}"
            )
    learned.load_state_dict(given)


def _shape(model: Mapping[str, Any]) -> str:
    shapes = {tuple(layer) for layer in model["layers"]}
    listed = " or ".join(f"{heads} heads ({kv} for keys) of width {width}" for heads, kv, width in sorted(shapes))
    return f"{len(model['layers'])} attention layers of {listed}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
