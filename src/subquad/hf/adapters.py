"""Adapters: learned parameters of swapped attention, in a folder next to the model.

adapter.safetensors    "<layer number>.<parameter>" → tensor
adapter.json           the methods of the layers, the model that they belong to, the record of their training, and the
                       digests of the tensors and of all this
README.md              the same for readers
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor, nn

from subquad.core import checksums as seals
from subquad.core import files
from subquad.hf.layers import head_counts
from subquad.hf.positions import position_limit
from subquad.hf.probe import find_layers
from subquad.hf.swapping import AnyMethod, Swapped, bind_all, swap
from subquad.hf.swapping import bounds as _bounds
from subquad.hf.unwrapping import AnyModel, model_parameters, transformers_model
from subquad.methods import BoundMethod, Method, from_dict
from subquad.methods.core.plugins import UnknownMethod, record_of

FORMAT = 2  # 1 had no digest of adapter.json
TENSORS, SETTINGS, CARD = "adapter.safetensors", "adapter.json", "README.md"
_REMEDY = "copy the adapter again from where it came from, or make it again (subquad calibrate)"
_MEMBERS = {"model": dict, "methods": dict, "record": dict, "tensors": str}
_OF_MODEL = {"class": str, "layers": list, "dtype": str, "weights": str, "max_length": int | None}


@dataclass(frozen=True)
class Adapter:
    """Learned parameters read from a folder, checked for consistency but not against a model."""

    path: Path
    methods: dict[int, Method]
    model: dict[str, Any]
    record: dict[str, Any]
    tensors: dict[int, dict[str, Tensor]]

    def bounds(self, model: AnyModel, *, any_weights: bool = False) -> dict[int, BoundMethod]:
        """The adapter's methods bound to this model's layers, with their parameters.

        Raises:
            ValueError: the adapter belongs to another model: to other layers, or (unless `any_weights`) other weights.
        """
        layers = find_layers(model)
        mine = same_kind(self.model, model, f"the adapter {self.path}")
        comparable = self.model["dtype"] == mine["dtype"]  # a mark of rounded weights is another one
        if comparable and self.model["weights"] != mine["weights"] and not any_weights:
            raise ValueError(
                f"the adapter {self.path} was fitted to other weights of the same architecture; fit one to this model "
                "(subquad calibrate), or, if these weights are close to those, load it in Python with "
                "sq.hf.load_adapter(…, any_weights=True)"
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
    bounds: Mapping[int, BoundMethod] | None = None,
    record: Mapping[str, Any] | None = None,
    card: str = "",
    max_length: int | None = None,
) -> Path:
    """Write the learned parameters of a swapped model's layers as an adapter folder.

        sq.hf.save_adapter(model, "my-adapter")

    Args:
        model: the swapped model.
        path: the folder; made if missing; an adapter in it is replaced at once.
        bounds: {layer number: bound method}; by default those that run in the model.
        record: a record of their training, as plain data.
        card: Markdown for readers.
        max_length: the longest length that they were bound for, where their number depends on it; by default the one
            that `bind` was given.

    Raises:
        ValueError: none of them has learned parameters, the layers were bound for several longest lengths, or the path
            is a file or cannot be written to (`subquad.core.files.CannotWrite`, an OSError too); then an adapter that
            was there is as it was.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot save an adapter at {folder}: it is a file; give a folder")
    methods = _bounds(model) if bounds is None else bounds
    tensors = {
        f"{number}.{name}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for number, bound in methods.items()
        if bound.learned is not None
        for name, tensor in bound.learned.state_dict().items()
    }
    if not tensors:
        raise ValueError("none of these layers has learned parameters, so there is nothing to save")
    settings = {
        "format": FORMAT,
        "model": {**describe_model(model), "max_length": max_length or _bound_length(methods) or position_limit(model)},
        "methods": {str(number): record_of(bound.method) for number, bound in methods.items()},
        "record": dict(record or {}),
    }
    data = safetensors.save(tensors)
    settings["tensors"] = seals.digest(data)
    files.write_all({TENSORS: data, CARD: card, SETTINGS: seals.sealed_json(settings)}, folder)
    return folder


def read_adapter(path: str | Path) -> Adapter:
    """Read the learned parameters in an adapter folder.

    Raises:
        ValueError: there is none, or a file of it is missing or damaged; names the file.

    Warns:
        UserWarning: it is of format 1, whose adapter.json has no digest that would show damage.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"no adapter at {folder}: {'it is a file' if folder.exists() else 'there is no such folder'}")
    if (folder / ".progress").exists() and not (folder / SETTINGS).exists():
        raise ValueError(f"no adapter at {folder} yet: its calibration was cut off; start the same command again")
    for name in (SETTINGS, TENSORS):
        if not (folder / name).is_file():
            raise ValueError(f"no adapter at {folder}: it has no {name}")
    settings = _settings(folder / SETTINGS)
    try:
        methods = {int(number): from_dict(method) for number, method in settings["methods"].items()}
    except UnknownMethod as error:
        raise UnknownMethod(f"{folder / SETTINGS}: {error}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / SETTINGS} is damaged, or of another version: {error}") from None
    if beyond := sorted(set(methods) - set(range(len(settings["model"]["layers"])))):
        raise ValueError(f"{folder / SETTINGS} is damaged: it has a method for layer {beyond[0]}, which is none")
    tensors: dict[int, dict[str, Tensor]] = {}
    for name, tensor in _tensors(folder / TENSORS, settings["tensors"]).items():
        number, _, parameter = name.partition(".")
        tensors.setdefault(int(number), {})[parameter] = tensor
    if unclaimed := sorted(set(tensors) - set(methods)):
        raise ValueError(f"{folder / SETTINGS} is damaged: layer {unclaimed[0]} has parameters but no method")
    return Adapter(folder, methods, settings["model"], settings["record"], tensors)


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
    """The description of a model in an adapter: class, (heads, key heads, width) per layer, dtype, fingerprint."""
    model = transformers_model(model)
    shapes = [list(head_counts(layer)) for layer in find_layers(model)]
    return {"class": type(model).__name__, "layers": shapes, "dtype": str(model.dtype), "weights": weights_mark(model)}


def same_kind(made_for: Mapping[str, Any], model: AnyModel, what: str) -> dict[str, Any]:
    """`describe_model` of a model. ValueError where its class or its layers are not those that `what` was made for."""
    mine = describe_model(model)
    for part in ("class", "layers"):
        if made_for[part] != mine[part]:
            raise ValueError(
                f"{what} was made for a {made_for['class']} with {shape_of(made_for['layers'])}, but this is a "
                f"{mine['class']} with {shape_of(mine['layers'])}"
            )
    return mine


def weights_mark(model: AnyModel) -> str:
    """Return a fingerprint of a model's weights: 16 hexadecimal digits from the first numbers of each tensor.

    Learned positions are left out, which a lengthened table changes, and so are swapped methods' parameters. PEFT
    adapters count where they change the model: under a LoRA that is not trained yet the mark is the base model's.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model_parameters(transformers_model(model))):
        if ".subquad." not in name and "position" not in name:
            first = parameter.detach().flatten()[:64].to("cpu", torch.float32)
            digest.update(name.encode() + str(tuple(parameter.shape)).encode() + first.numpy().tobytes())
    return digest.hexdigest()[:16]


def _bound_length(bounds: Mapping[int, BoundMethod]) -> int | None:
    """The longest length that the layers with learned parameters were bound for; None if none was given."""
    lengths = sorted({bound.max_length for bound in bounds.values() if bound.learned is not None and bound.max_length})
    if len(lengths) > 1:
        raise ValueError(
            f"the layers were bound for longest lengths of {' and '.join(map(str, lengths))}, but an adapter has one "
            "for all: bind them for the same, or give max_length=… where no parameter depends on it"
        )
    return lengths[0] if lengths else None


def _load(bound: BoundMethod, tensors: dict[str, Tensor], where: str) -> None:
    learned = bound.learned or nn.Module()
    wanted = learned.state_dict()
    if wanted.keys() != tensors.keys():
        raise ValueError(f"{where}: {bound.method} has {sorted(wanted)}, but the adapter contains {sorted(tensors)}")
    for name, tensor in wanted.items():
        have, want = tuple(tensors[name].shape), tuple(tensor.shape)
        if have != want:
            raise ValueError(f"{where}: {name} of {bound.method} is {want}, but the adapter contains {have}")
    learned.load_state_dict(tensors)


def shape_of(layers: Sequence[Sequence[int]]) -> str:
    """Layers' (heads, key heads, width) in words."""
    shapes = sorted({tuple(layer) for layer in layers})
    listed = " or ".join(f"{heads} heads ({kv} for keys) of width {width}" for heads, kv, width in shapes)
    return f"{len(layers)} attention layer{'' if len(layers) == 1 else 's'} of {listed}"


def _settings(path: Path) -> dict[str, Any]:
    """The members of adapter.json, each of its type."""
    settings = seals.parsed(path, _REMEDY)
    made = settings.get("format")
    if type(made) is not int or made not in (1, FORMAT):
        raise ValueError(f"{path} has format {made!r}, but this version reads 1 and {FORMAT}")
    if made == FORMAT or seals.DIGEST in settings:
        settings = seals.opened(settings, path, _REMEDY)
    else:
        warnings.warn(
            f"{path} has format 1, without a digest of its settings, so damage to them is not noticed; saving the "
            f"adapter again writes format {FORMAT}",
            stacklevel=3,
        )
    wrong = _wrong(settings, _MEMBERS) or _wrong(settings["model"], _OF_MODEL) or _wrong_parts(settings)
    if wrong:
        raise seals.Damaged(path, wrong, _REMEDY)
    return settings


def is_adapter(settings: Any) -> bool:
    """True if the content of a JSON file looks like an adapter.json, of whatever format."""
    return isinstance(settings, dict) and settings.keys() >= {"format", "model", "methods"}


def _wrong(members: Mapping[str, Any], types: Mapping[str, Any]) -> str:
    """A message that names the member that is missing or of another type; empty if all are right."""
    for name, kind in types.items():
        if name not in members:
            return f"it lacks {name!r}"
        if not isinstance(members[name], kind) or isinstance(members[name], bool):
            return f"{name!r} is {str(members[name])[:50]!r}, which is of another type"
    return ""


def _wrong_parts(settings: Mapping[str, Any]) -> str:
    """A message that names the layer whose shape or method is wrong; empty if all are right."""
    for number, shape in enumerate(settings["model"]["layers"]):
        if not isinstance(shape, list) or len(shape) != 3 or any(type(n) is not int or n < 1 for n in shape):
            return f"the heads, key heads and width of layer {number} are {str(shape)[:50]}"
    for number, method in settings["methods"].items():
        if not number.isdecimal() or not isinstance(method, dict) or not isinstance(method.get("name"), str):
            return f"the method of layer {number[:50]!r} is {str(method)[:50]}"
    return ""


def _tensors(path: Path, digest: str) -> dict[str, Tensor]:
    """The content of adapter.safetensors, if it has this digest."""
    data = seals.read_bytes(path, _REMEDY)
    if seals.digest(data) != digest:
        raise seals.Damaged(path, f"its digest is not the one in {SETTINGS}", _REMEDY)
    try:
        return safetensors.load(data)
    except SafetensorError as error:
        raise seals.Damaged(path, str(error), _REMEDY) from None
