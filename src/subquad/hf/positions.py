"""Longer inputs: extend learned and rotary positions, and the limits of what reads the text."""

import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from subquad.core.whole_numbers import is_whole
from subquad.hf.item_positions import MODES, ItemPositions, extend_table
from subquad.hf.item_rotary import (
    YARN,
    ItemRotary,
    TwoRotaries,
    extend_rotary,
    holds_frequencies,
    original_modules,
    with_longer,
)
from subquad.hf.layers import Attached
from subquad.hf.unwrapping import AnyModel, transformers_model

_TABLES = ("position_embeddings", "embed_positions", "wpe", "position_embedding")
_TEXT = ("input_ids", "inputs_embeds")


# In files: what was extended in a saved model, {name: {"length": …, "mode": …}}. Never change it.
RECORD = "subquad_positions"
_LIMITS = ("max_position_embeddings", "n_positions")
_WINDOWED = ("sliding", "chunked", "local")  # how the types of layers begin that see no further than a window
_ROUNDING = 1e-2  # of frequencies in 16 bits


class LearnedTable(NamedTuple):
    """A trained table of token positions.

    Attributes:
        name: in the model.
        table: itself.
        owner: the module that has it, and buffers of positions.
        holder: the innermost model around it.
    """

    name: str
    table: nn.Embedding
    owner: nn.Module
    holder: PreTrainedModel

    @property
    def reserved(self) -> int:
        """Rows at the front that no token uses: BART's offset, or the padding row of RoBERTa and those before it."""
        offset = getattr(self.table, "offset", None)
        if isinstance(offset, int):
            return offset
        return 0 if self.table.padding_idx is None else self.table.padding_idx + 1

    @property
    def rows(self) -> int:
        """Positions that have a row of their own."""
        return self.table.num_embeddings - self.reserved

    @property
    def reach(self) -> int:
        """Positions that an item may have."""
        return reach_of(self.table) - self.reserved

    def configs(self, model: PreTrainedModel) -> list[PreTrainedConfig]:
        """The configs that set the number of positions."""
        return list({id(c): c for c in (getattr(self.owner, "config", model.config), model.config)}.values())


class RotaryPositions(NamedTuple):
    """A module that makes the cos and sin of rotary positions for the layers of a text model.

    Attributes:
        name: in the model.
        module: itself.
        holder: the innermost model around it.
    """

    name: str
    module: Any
    holder: PreTrainedModel

    @property
    def rows(self) -> int | None:
        """The positions that the model was trained with; None if its config does not name them."""
        if isinstance(self.module, ItemRotary):
            return self.module.rows
        limit = getattr(getattr(self.module, "config", None), _LIMITS[0], None)
        return limit if isinstance(limit, int) else None

    @property
    def reach(self) -> int:
        """Positions that an item may have; without a limit, as many as it likes."""
        if isinstance(self.module, ItemRotary):
            return self.module.reach
        return sys.maxsize if self.is_windowed or self.rows is None else self.rows

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The config's description of the frequencies."""
        return getattr(self.module.config, "rope_parameters", None) or {}

    @property
    def by_type(self) -> dict[str, Mapping[str, Any]]:
        """`parameters` by type of layer, of layers that see further than a window; {"": …} if all types share them."""
        nested = {name: each for name, each in self.parameters.items() if isinstance(each, Mapping)}
        return {name: each for name, each in nested.items() if not name.startswith(_WINDOWED)} or {"": self.parameters}

    @property
    def is_windowed(self) -> bool:
        """True if all layers see no further than a window, inside the positions of the model."""
        config = self.module.config
        types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        if types:
            return all(each.startswith(_WINDOWED) for each in types)
        return (
            isinstance(window, int) and getattr(config, "use_sliding_window", True) and 0 < window <= (self.rows or 0)
        )

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The configs that set the number of positions."""
        return list({id(c): c for c in (self.module.config, self.holder.config)}.values())


def position_limit(model: AnyModel) -> int | None:
    """The number of tokens that the learned positions of this model cover; None if there is no such limit."""
    return min((table.reach for table in _learned_tables(transformers_model(model))), default=None)


def rotary_limit(model: AnyModel) -> int | None:
    """The number of tokens that the rotary positions of this model were made for; None if there is no such limit.

    A model whose layers see no further than a window has none.
    """
    rotaries = _rotary_positions(transformers_model(model))
    return min((each.reach for each in rotaries if each.rows is not None and not each.is_windowed), default=None)


def check_extension(model: AnyModel, length: int) -> None:
    """Raise ValueError if `extend_positions` cannot extend the rotary positions of this model to `length` tokens."""
    model = transformers_model(model)
    _refuse_tables(model, length)
    for each in _rotary_positions(model):
        _check_rotary(each, length)


def holders_of_tables(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The innermost models around the learned positions of this model."""
    return list(dict.fromkeys(table.holder for table in _learned_tables(model)))


def reach_of(table: nn.Embedding) -> int:
    """Positions that a table of positions reads, those in front of the first token included."""
    return table.reach + table.reserved if isinstance(table, ItemPositions) else table.num_embeddings


def extend_positions(model: AnyModel, length: int, *, mode: str = "interpolate", tokenizer: Any = None) -> AnyModel:
    """Extend a model with learned or rotary positions to `length` tokens, in place and without training.

        sq.hf.extend_positions(sentence_transformer, 4096)
        sq.hf.extend_positions(decoder, 16384, tokenizer=tokenizer)

    An item of a batch that fits the model's own R positions has exactly these, whatever else is in the batch, so that
    its output is that of the original model. A longer item, of L tokens, is read in another way.

    Learned positions come from the same table:

        "interpolate"  token p has the row p·(R − 1)/(L − 1), between the two rows around it
        "tile"         token p has the row p mod R

    Rotary positions (RoPE) come from the frequencies of YaRN (Peng et al. 2024), as transformers computes them for
    `{"rope_type": "yarn", "factor": length / R, "original_max_position_embeddings": R}`. If layers with a window have
    frequencies of their own, as in Gemma 3, these stay, and a model that sees nothing outside of windows is left as it
    is.

    L is that of the item alone: its padding, on either side, is read from the attention mask. With `position_ids` it is
    the largest of them plus one, of each sequence where several are packed.

    A cache of rotary keys cannot be turned again, so the prompt decides, with all tokens that are still to come:
    `generate` counts its new tokens (and compares the prompt and the most new tokens with R), and a loop of your own
    states the length of the request with `reaching`. A step that would cross R on a cache that was filled within R is
    an error. A cache keeps how each of its items is read, for these items in these rows.

    A decoder with learned positions reads long prompts in both modes. It generates past its own positions with a cache
    by "tile" only: under "interpolate" each new token moves the positions of those in the cache, which is an error.

    The limits of what reads the text are raised to `length` too, where they are lower: of the tokenizer that is given,
    and of the one inside of a SentenceTransformer, a CrossEncoder or a pipeline (their `max_seq_length`).
    `save_pretrained` writes the extension into the config, and `from_pretrained` makes it again where `subquad.hf` is
    imported; elsewhere the folder loads as the original model. It can be made before or after `swap`.

    Args:
        model: any text model, or a wrapper around one; it is returned. Relative positions (ALiBi, T5's biases) need
            nothing and are left as they are.
        length: tokens that the model must take. Not more than its own positions changes nothing, and fewer raise a
            warning. A second call keeps the larger length, and has the mode of the second.
        mode: the way in which items longer than a table of learned positions are read.
        tokenizer: the model's tokenizer, where `model` does not hold it.

    Raises:
        ValueError: the model's length is fixed by something else (image patches, audio frames; CLIP's text is as long
            as its table, GPT-Neo's as its masks), its table is not a `torch.nn.Embedding` (I-BERT), its rotary
            positions are scaled already (linear, dynamic, YaRN, LongRoPE, Llama 3), have several axes, or are computed
            in the model's own way, or `mode` is unknown;
            in the forward pass, for an item of more than `length` positions, a step on a cache that its keys do not
            allow, or a mask of long items that is not (batch, tokens).
        TypeError: `tokenizer` is not a tokenizer of transformers.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}, but positions are extended by 'interpolate' or 'tile'")
    if not is_whole(length, 1):
        raise ValueError(f"length={length!r}, but it must be a whole number ≥ 1")
    if tokenizer is not None and not hasattr(tokenizer, "model_max_length"):
        raise TypeError(f"expected a tokenizer with a model_max_length, got {type(tokenizer).__name__}")
    wrapped, model = model, transformers_model(model)
    if model.main_input_name not in _TEXT:
        raise ValueError(
            f"{type(model).__name__} reads {model.main_input_name!r}: its length is fixed by its images or audio, "
            "not by a table of token positions"
        )
    grown: set[int] = set()
    check_extension(model, length)
    tables, rotaries = _learned_tables(model), _rotary_positions(model)
    for table in tables:
        _extend(model, table, length, mode, grown)
    for rotary in rotaries:
        _extend_rotary(model, rotary, length, grown)
    raised = _raise_limits([tokenizer, *_readers(wrapped)], length)
    limits = [(table.rows, table.reach) for table in tables]
    limits += [(each.rows, each.reach) for each in rotaries if each.rows is not None and not each.is_windowed]
    if limits and not raised and length < min(limits)[0]:
        warnings.warn(
            f"extend_positions changed nothing: length={length:,}, but {type(model).__name__} has "
            f"{min(reach for _, reach in limits):,} positions already",
            stacklevel=2,
        )
    return wrapped


def extended_positions(model: AnyModel) -> dict[str, dict[str, Any]]:
    """The positions of a model that were extended: {name of the module: {"length": …, "mode": …}}."""
    model = transformers_model(model)
    tables = {
        each.name: {"length": each.table.reach, "mode": each.table.mode}
        for each in _learned_tables(model)
        if isinstance(each.table, ItemPositions)
    }
    return tables | {
        each.name: {"length": each.module.reach, "mode": YARN}
        for each in _rotary_positions(model)
        if isinstance(each.module, ItemRotary)
    }


@contextmanager
def with_record(model: PreTrainedModel) -> Iterator[None]:
    """The model's config as it is saved: with the original positions, which the weights have, and what extends them."""
    record, before = extended_positions(model), []
    longer = [
        (config, each.table.reach, each.table.rows)
        for each in _learned_tables(model)
        if isinstance(each.table, ItemPositions)
        for config in each.configs(model)
    ]
    longer += [
        (config, each.module.reach, each.module.rows)
        for each in _rotary_positions(model)
        if isinstance(each.module, ItemRotary)
        for config in each.configs
    ]
    for config, reach, rows in {id(config): (config, reach, rows) for config, reach, rows in longer}.values():
        before.append((config, {name: getattr(config, name) for name in _LIMITS if hasattr(config, name)}))
        _grow_config(config, reach, rows)
    vars(model.config).pop(RECORD, None)
    if record:
        setattr(model.config, RECORD, record)
    try:
        yield
    finally:
        vars(model.config).pop(RECORD, None)
        for config, limits in before:
            for name, limit in limits.items():
                setattr(config, name, limit)


def extend_as_recorded(model: PreTrainedModel) -> None:
    """Extend the positions that the config of a loaded model records as extended, and delete the record.

    Names are compared by their ends, because a model may be loaded with another head, or without.

    Raises:
        ValueError: the record is damaged, or the positions of the model are now others than those that it extends.
    """
    record = vars(model.config).pop(RECORD, None)
    if record is None:
        return
    grown: set[int] = set()
    entries = _checked(record)
    for table in _learned_tables(model):
        if (entry := _entry_of(table.name, entries)) is not None and entry["mode"] != YARN:
            _extend(model, table, entry["length"], entry["mode"], grown)
    for rotary in _rotary_positions(model):
        if (entry := _entry_of(rotary.name, entries)) is not None and entry["mode"] == YARN:
            _check_rotary(rotary, entry["length"])
            _extend_rotary(model, rotary, entry["length"], grown)


def _entry_of(name: str, record: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The entry of a record for the module of this name; None if there is none."""
    ends = (
        entry for other, entry in record.items() if f".{other}".endswith(f".{name}") or f".{name}".endswith(f".{other}")
    )
    return next(ends, None)


def _checked(record: Any) -> dict[str, dict[str, Any]]:
    """The record of a config; ValueError where it is damaged."""
    entries, modes = list(record.values()) if isinstance(record, dict) else [None], (*MODES, YARN)
    for entry in entries:
        if not isinstance(entry, dict) or type(entry.get("length")) is not int or entry.get("mode") not in modes:
            raise ValueError(
                f"the config's record of longer positions, {RECORD!r}, is damaged: {str(record)[:80]!r} is not "
                "{table: {'length': …, 'mode': …}}"
            )
    return record


# ---------------------------------------------------------------------- rotary positions


def _rotary_positions(model: PreTrainedModel) -> list[RotaryPositions]:
    """Every module that makes rotary positions of tokens, not those of images or audio in a model of both."""
    models = {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    known = {id(module) for module in original_modules(model)}
    modules = [
        RotaryPositions(path, module, _innermost(models, path))
        for path, module in model.named_modules()
        if id(module) in known and any(holds_frequencies(*each) for each in module.named_buffers(recurse=False))
    ]
    return [each for each in modules if each.holder.main_input_name in _TEXT]


def _refuse_tables(model: PreTrainedModel, length: int) -> None:
    """Raise ValueError for a model that reads positions from a short table that is not a `torch.nn.Embedding`."""
    for name, module in model.named_modules():
        table = module._buffers.get("embed_positions")
        if table is not None and table.ndim == 2 and len(table) < length:
            raise ValueError(
                f"{type(model).__name__} reads its rotary positions from a table of {len(table):,} rows ({name!r}), "
                "which cannot be extended; give shorter inputs"
            )
        is_table = name.rpartition(".")[2] in _TABLES and hasattr(module, "padding_idx")
        weight = module._parameters.get("weight")
        if is_table and weight is not None and not isinstance(module, nn.Embedding) and len(weight) < length:
            raise ValueError(
                f"{type(model).__name__} reads its positions from a {type(module).__name__} of {len(weight):,} rows "
                f"({name!r}), which cannot be extended to {length:,}; give shorter inputs"
            )


def _check_rotary(each: RotaryPositions, length: int) -> None:
    """Raise ValueError for rotary positions that cannot be extended, if they do not reach this length."""
    if each.is_windowed or (each.rows is not None and length <= each.rows) or isinstance(each.module, ItemRotary):
        return
    kind = type(each.holder).__name__
    takes_positions = "position_ids" in inspect.signature(type(each.module).forward).parameters
    thetas = [parameters.get("rope_theta") for parameters in each.by_type.values()]
    if each.rows is None or None in thetas or not takes_positions:
        raise ValueError(
            f"{kind} computes its rotary positions in its own way ({type(each.module).__name__}), so they cannot be "
            "extended; give shorter inputs"
        )
    for layer_type, parameters in each.by_type.items():
        rope_type = parameters.get("rope_type") or "default"
        of_layers = f" of its {layer_type!r} layers" if layer_type else ""
        if parameters.get("mrope_section") is not None or getattr(each.module, "mrope_section", None) is not None:
            raise ValueError(
                f"{kind} has rotary positions of several axes (mrope_section), as of images, which cannot be extended; "
                f"give at most {each.rows:,} tokens"
            )
        if rope_type != "default":
            raise ValueError(
                f"the rotary positions{of_layers} of {kind} are scaled already, by rope_type={rope_type!r} for "
                f"{each.rows:,} positions; give at most {each.rows:,} tokens, or load it with rope_parameters of your "
                "own"
            )
        name = f"{layer_type}_inv_freq".lstrip("_")
        frequencies = each.module._buffers.get(name)
        if frequencies is None or not _is_geometric(frequencies, parameters["rope_theta"]):
            raise ValueError(
                f"the rotary positions{of_layers} of {kind} are not the frequencies of rope_theta="
                f"{parameters['rope_theta']:g} in its config, so they cannot be extended; give at most {each.rows:,} "
                "tokens"
            )
    x = next(each.module.buffers()).new_zeros(1, 2, 1)
    made = each.module(x, torch.arange(2, device=x.device)[None], *[name for name in each.by_type if name][:1])
    if any(part.shape[:2] != (1, 2) for part in ([made] if isinstance(made, Tensor) else made)):
        raise ValueError(
            f"{type(each.module).__name__} of {kind} returns no (batch, tokens, width), so its rotary positions cannot "
            f"be extended; give at most {each.rows:,} tokens"
        )


def _is_geometric(frequencies: Tensor, theta: float) -> bool:
    """True if these are the frequencies θ^(−r/R) of the original rotary positions."""
    exponents = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    return torch.allclose(frequencies.double().cpu(), float(theta) ** -exponents, rtol=_ROUNDING, atol=0)


@torch.inference_mode(False)  # else new buffers could not be used in training
def _extend_rotary(model: PreTrainedModel, each: RotaryPositions, length: int, grown: set[int]) -> None:
    """Extend rotary positions, in the layers that are swapped too, and its configs that are not `grown` yet."""
    if each.is_windowed or length <= each.reach:
        return
    assert each.rows is not None
    before, types = each.reach, {name: _yarn(plain, each.rows, length) for name, plain in each.by_type.items()}
    parameters = types.get("", {**each.parameters, **types})
    extend_rotary(each.module, each.holder, parameters, each.rows, length, tuple(filter(None, types)))
    for part in each.holder.modules():
        if isinstance(part, Attached) and part.rotary is not None:
            part.rotary = with_longer(
                part.rotary.within if isinstance(part.rotary, TwoRotaries) else part.rotary, each.holder
            )
    for config in each.configs:
        if id(config) not in grown:
            grown.add(id(config))
            _grow_config(config, before, length)


def _yarn(parameters: Mapping[str, Any], rows: int, length: int) -> dict[str, Any]:
    """The `rope_parameters` of YaRN from `rows` positions to `length`."""
    same = {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
    return same | {"rope_type": YARN, "factor": length / rows, "original_max_position_embeddings": rows}


# ---------------------------------------------------------------------- learned positions


@torch.inference_mode(False)  # else new buffers could not be used in training
def _extend(model: PreTrainedModel, each: LearnedTable, length: int, mode: str, grown: set[int]) -> None:
    """Extend one table, its buffers, and its configs that are not `grown` yet."""
    if length <= each.rows:
        return
    masks = (buffer for buffer in each.holder.buffers() if buffer.dtype == torch.bool)  # GPT-Neo's
    has_short_masks = any(mask.shape[-2:] == (each.rows, each.rows) for mask in masks)
    if has_short_masks or "weight" in inspect.unwrap(type(each.owner).forward).__code__.co_names:
        raise ValueError(
            f"{type(each.owner).__name__} takes no more tokens than its table has rows, {each.rows:,}, so that its "
            "positions cannot be extended; give shorter inputs"
        )
    before, reach = each.reach, max(length, each.reach)
    extend_table(each.table, each.holder, each.reserved, reach, mode)
    _grow_buffers(each.owner, reach + each.reserved)
    for config in each.configs(model):
        if id(config) not in grown:
            grown.add(id(config))
            _grow_config(config, before, reach)


def _readers(model: AnyModel) -> Iterator[Any]:
    """The objects that read text for the model: its tokenizer, and modules that may have a longest sequence."""
    yield getattr(model, "tokenizer", None)
    if isinstance(model, nn.Module):
        yield from (module for module in model.modules() if not isinstance(module, PreTrainedModel))


def _raise_limits(readers: list[Any], length: int) -> bool:
    """Raise each lower limit of tokens to `length`; whether there was one."""
    raised = False
    for reader in readers:
        for name in ("model_max_length", "max_seq_length"):
            limit = getattr(reader, name, None)
            if isinstance(limit, int | float) and limit < length:
                setattr(reader, name, length)
                raised = True
    return raised


def _learned_tables(model: PreTrainedModel) -> list[LearnedTable]:
    """Every trained table of absolute positions of tokens, not those of images or audio in a model of both."""
    models = {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    tables = [
        LearnedTable(f"{path}.{name}".lstrip("."), child, owner, _innermost(models, path))
        for path, owner in model.named_modules()
        for name, child in owner.named_children()
        if name in _TABLES and isinstance(child, nn.Embedding)
    ]
    return [table for table in tables if table.holder.main_input_name in _TEXT]


def _innermost(models: dict[str, PreTrainedModel], path: str) -> PreTrainedModel:
    """The innermost of these models around the module of this name."""
    return models[max((name for name in models if f"{path}.".startswith(f"{name}.") or not name), key=len)]


def _grow_buffers(owner: nn.Module, rows: int) -> None:
    """Lengthen the (1, positions) buffers that BERT-like embeddings read positions and token types from."""
    for name, buffer in list(owner.named_buffers(recurse=False)):
        if name == "position_ids":
            setattr(owner, name, torch.arange(rows, device=buffer.device)[None])
        elif name == "token_type_ids":
            setattr(owner, name, buffer.new_zeros(1, rows))


def _grow_config(config: object, before: int, length: int) -> None:
    for name in _LIMITS:
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit >= before:
            setattr(config, name, limit - before + length)
