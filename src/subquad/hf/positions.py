"""Longer inputs: extend learned absolute positions, and the limits of what reads the text."""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from subquad.hf.item_positions import MODES, ItemPositions, extend_table
from subquad.hf.unwrapping import AnyModel, transformers_model

_TABLES = ("position_embeddings", "embed_positions", "wpe", "position_embedding")
_TEXT = ("input_ids", "inputs_embeds")


# In files: the tables of a saved model that were extended, {name: {"length": …, "mode": …}}. Never change it.
RECORD = "subquad_positions"
_LIMITS = ("max_position_embeddings", "n_positions")


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


def position_limit(model: AnyModel) -> int | None:
    """The number of tokens that the learned positions of this model cover; None if there is no such limit."""
    return min((table.reach for table in _learned_tables(transformers_model(model))), default=None)


def holders_of_tables(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The innermost models around the learned positions of this model."""
    return list(dict.fromkeys(table.holder for table in _learned_tables(model)))


def reach_of(table: nn.Embedding) -> int:
    """Positions that a table of positions reads, those in front of the first token included."""
    return table.reach + table.reserved if isinstance(table, ItemPositions) else table.num_embeddings


def extend_positions(model: AnyModel, length: int, *, mode: str = "interpolate", tokenizer: Any = None) -> AnyModel:
    """Extend a model with learned absolute positions to `length` tokens, in place and without training.

        sq.hf.extend_positions(sentence_transformer, 4096)
        sq.hf.extend_positions(model, 4096, tokenizer=tokenizer)

    An item of a batch that fits the model's own R positions has exactly these, whatever else is in the batch, so that
    its output is that of the original model. The positions of a longer item, of L tokens, come from the same table:

        "interpolate"  token p has the row p·(R − 1)/(L − 1), between the two rows around it
        "tile"         token p has the row p mod R

    L is that of the item alone: its padding, on either side, is read from the attention mask. With `position_ids` it is
    the largest of them plus one, of each sequence where several are packed.

    A decoder reads long prompts in both ways. It generates past its own positions with a cache by "tile" only: under
    "interpolate" each new token moves the positions of those in the cache, which is an error.

    The limits of what reads the text are raised to `length` too, where they are lower: of the tokenizer that is given,
    and of the one inside of a SentenceTransformer, a CrossEncoder or a pipeline (their `max_seq_length`).
    `save_pretrained` writes the extension into the config, and `from_pretrained` makes it again where `subquad.hf` is
    imported; elsewhere the folder loads as the original model.

    Args:
        model: any text model, or a wrapper around one; it is returned. Relative and rotary positions need nothing and
            are left as they are.
        length: tokens that the model must take. Not more than its own positions changes nothing, and fewer raise a
            warning. A second call keeps the larger length, and has the mode of the second.
        mode: how items are read that are longer than the model's own positions.
        tokenizer: the model's tokenizer, where `model` does not hold it.

    Raises:
        ValueError: the model's length is fixed by something else (image patches, audio frames; CLIP's text is as long
            as its table), or `mode` is unknown;
            in the forward pass, for an item of more than `length` positions, a step on a cache under "interpolate", or
            a mask of long items that is not (batch, tokens).
        TypeError: `tokenizer` is not a tokenizer of transformers.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}, but positions are extended by 'interpolate' or 'tile'")
    if not isinstance(length, int) or length < 1:
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
    tables = _learned_tables(model)
    for table in tables:
        _extend(model, table, length, mode, grown)
    raised = _raise_limits([tokenizer, *_readers(wrapped)], length)
    if tables and not raised and length < min(table.rows for table in tables):
        warnings.warn(
            f"extend_positions changed nothing: length={length:,}, but {type(model).__name__} has "
            f"{min(table.reach for table in tables):,} positions already",
            stacklevel=2,
        )
    return wrapped


def extended_tables(model: AnyModel) -> dict[str, dict[str, Any]]:
    """The tables of a model that were extended: {name: {"length": …, "mode": …}}."""
    return {
        each.name: {"length": each.table.reach, "mode": each.table.mode}
        for each in _learned_tables(transformers_model(model))
        if isinstance(each.table, ItemPositions)
    }


@contextmanager
def with_record(model: PreTrainedModel) -> Iterator[None]:
    """The model's config as it is saved: with the original positions, which the weights have, and what extends them."""
    record, before = extended_tables(model), []
    tables = [each for each in _learned_tables(model) if isinstance(each.table, ItemPositions)]
    for config, table in {id(c): (c, each) for each in tables for c in each.configs(model)}.values():
        before.append((config, {name: getattr(config, name) for name in _LIMITS if hasattr(config, name)}))
        _grow_config(config, table.reach, table.rows)
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
        ValueError: the record is damaged.
    """
    record = vars(model.config).pop(RECORD, None)
    if record is None:
        return
    grown: set[int] = set()
    for table in _learned_tables(model):
        for name, entry in _checked(record).items():
            if f".{name}".endswith(f".{table.name}") or f".{table.name}".endswith(f".{name}"):
                _extend(model, table, entry["length"], entry["mode"], grown)
                break


def _checked(record: Any) -> dict[str, dict[str, Any]]:
    """The record of a config; ValueError where it is damaged."""
    entries = list(record.values()) if isinstance(record, dict) else [None]
    for entry in entries:
        if not isinstance(entry, dict) or type(entry.get("length")) is not int or entry.get("mode") not in MODES:
            raise ValueError(
                f"the config's record of longer positions, {RECORD!r}, is damaged: {str(record)[:80]!r} is not "
                "{table: {'length': …, 'mode': …}}"
            )
    return record


def _extend(model: PreTrainedModel, each: LearnedTable, length: int, mode: str, grown: set[int]) -> None:
    """Extend one table, its buffers, and its configs that are not `grown` yet."""
    if length <= each.rows:
        return
    if "weight" in inspect.unwrap(type(each.owner).forward).__code__.co_names:
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
    """What reads text for the model in what was given: tokenizers, and modules with a longest sequence."""
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
