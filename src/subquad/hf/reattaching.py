"""Swap in what a saved model's config records of an earlier swap."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from subquad.hf.adapters import read_adapter
from subquad.hf.layers import NAME
from subquad.hf.probe import find_layers
from subquad.hf.saved import asks_for_ours, configs_of, default_implementation, unmark_config
from subquad.hf.swap_record import (
    OPTIONAL,
    PARTS,
    PARTS_DIGEST,
    OtherLayers,
    read_record,
    warn_of_edited_parts,
    warn_of_other_versions,
)
from subquad.hf.swapping import Swapped, describe, record, restore, swap
from subquad.hf.unwrapping import AnyModel, transformers_model
from subquad.methods import BoundMethod, Method

ADAPTER = "subquad-adapter"  # the folder of learned parameters inside of the folder of a saved model


def reattach(model: AnyModel) -> Swapped:
    """Swap in the methods that `save_pretrained` recorded.

    `from_pretrained` does this itself once `subquad.hf` is imported. It is for a model that was asked for with another
    attention, or that could not be attached when it was loaded:

        model = AutoModel.from_pretrained(folder, attn_implementation="sdpa")
        sq.hf.reattach(model)

    Learned parameters are read from the adapter inside of the model's folder, which `subquad compare --save` and
    `subquad plan --save` write there.

    Raises:
        ValueError: the config records no swap, one of a model with another number of layers, or one of a method with
            learned parameters that are not in the model's folder; or the adapter there is damaged or another one.

    Warns:
        UserWarning: the record was edited since the model was saved; names the layers. The edited record runs. Or the
            methods were chosen with other minor versions of subquad, torch or transformers; names both.
    """
    wrapped, model = model, transformers_model(model)
    record = getattr(model.config, NAME, None)
    if record is None:
        raise ValueError(f"the config of this {type(model).__name__} records no swapped attention; use sq.hf.swap")
    if isinstance(record, dict) and PARTS in record:
        return _reattach_parts(wrapped, model, record)
    return _reattach(wrapped, model, record)


def _reattach_parts(wrapped: AnyModel, model: PreTrainedModel, record: dict[str, Any]) -> Swapped:
    """Swap in the records of a model's parts, after the record of the whole model, if there is one."""
    whole = {key: value for key, value in record.items() if key not in (PARTS, PARTS_DIGEST)}
    try:
        parts = {name: (model.get_submodule(name), of_part) for name, of_part in record[PARTS].items()}
    except AttributeError as error:  # also if the parts are not a mapping
        raise ValueError(f"the config's record of a swap is damaged: {error}") from None
    warn_of_edited_parts(record, model.config)
    if whole:
        _reattach(wrapped, model, whole)
    for part, of_part in parts.values():
        if of_part is None:
            restore(part)
        else:
            _reattach(part, part, of_part)
    if not whole:  # the rest of the model, which asked for our attention until nothing could fail any more
        swapped = {id(config) for part, _ in parts.values() for config, _ in configs_of(part)}
        for config, owner in configs_of(model):
            if id(config) not in swapped:
                if asks_for_ours(config):
                    config._attn_implementation_internal = default_implementation(owner, model)
                unmark_config(config)
    return describe(wrapped)


def _reattach(wrapped: AnyModel, model: PreTrainedModel, plain: Any) -> Swapped:
    """Swap the methods of one record into one model."""
    saved = read_record(plain, model.config)
    methods = saved.methods
    layers = len(find_layers(model))
    if saved.layers != layers:
        raise OtherLayers(f"the config records a swap of {saved.layers} layers but the model has {layers}")
    warn_of_other_versions(saved, model.config)
    learned = {number: method for number, method in methods.items() if method.traits.learned}
    swapped = swap(wrapped, _with_parameters(model, methods) if learned else methods, keep=saved.keep)
    record(model, **{name: getattr(saved, name) for name in OPTIONAL})
    return swapped


def _with_parameters(model: PreTrainedModel, methods: dict[int, Method]) -> dict[int, BoundMethod]:
    """The methods with the learned parameters in the model's folder."""
    folder = Path(model.name_or_path) / ADAPTER
    if not folder.is_dir():
        number, method = next((number, method) for number, method in methods.items() if method.traits.learned)
        raise ValueError(
            f"layer {number} ran {method.name!r}, whose learned parameters come from an adapter: use "
            "sq.hf.load_adapter(model, folder)"
        )
    adapter = read_adapter(folder)
    if adapter.methods != methods:
        raise ValueError(f"the adapter {folder} has other methods than the config of the model records")
    return adapter.bounds(model)
