"""Swap in what a saved model's config records of an earlier swap."""

from pathlib import Path

from transformers import PreTrainedModel

from subquad.hf.adapters import read_adapter
from subquad.hf.doors import AnyModel, transformers_model
from subquad.hf.layers import KEEPS, NAME
from subquad.hf.probe import find_layers
from subquad.hf.swapping import Swapped, swap
from subquad.methods import Bound, Method, from_dict

ADAPTER = "subquad-adapter"  # the folder of learned parameters inside of the folder of a saved model


def reattach(model: AnyModel) -> Swapped:
    """Swap in what `save_pretrained` recorded of an earlier swap.

    `from_pretrained` does this itself once `subquad.hf` is imported. It is for a model that was asked for with another
    attention, or that could not be attached when it was loaded:

        model = AutoModel.from_pretrained(folder, attn_implementation="sdpa")
        sq.hf.reattach(model)

    Learned parameters are read from the adapter inside of the model's folder, which `subquad compare --save` and
    `subquad plan --save` write there.

    Raises:
        ValueError: the config records no swap, one of a model with another number of layers, or one of a method with
            learned parameters that are not in the model's folder; or the adapter there is damaged or another one.
    """
    given, model = model, transformers_model(model)
    record = getattr(model.config, NAME, None)
    if record is None:
        raise ValueError(f"the config of this {type(model).__name__} records no swapped attention; use sq.hf.swap")
    try:
        recorded, methods = record["layers"], {int(n): from_dict(method) for n, method in record["methods"].items()}
        keep = record.get("keep")  # records of earlier versions have none
        if keep is not None and keep not in list(KEEPS):
            raise ValueError(f"keep={keep!r}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # also a method of another version
        raise ValueError(f"the config's record of a swap is damaged: {type(error).__name__}: {error}") from None
    layers = len(find_layers(model))
    if recorded != layers:
        raise ValueError(f"the config records a swap of {recorded} layers but the model has {layers}")
    learned = {number: method for number, method in methods.items() if method.traits.learned}
    return swap(given, _with_parameters(model, methods) if learned else methods, keep=keep)


def _with_parameters(model: PreTrainedModel, methods: dict[int, Method]) -> dict[int, Bound]:
    """The methods with the learned parameters that the model's folder holds."""
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
