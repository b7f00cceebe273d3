"""Longer inputs: extend learned absolute positions, and the limits of what reads the text."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.hf.unwrapping import AnyModel, transformers_model

_TABLES = ("position_embeddings", "embed_positions", "wpe", "position_embedding")


def position_limit(model: AnyModel) -> int | None:
    """How many tokens the learned positions of this model reach; None where positions set no limit."""
    model = transformers_model(model)
    tables = _learned_tables(model)
    return min((table.num_embeddings - _reserved(model, table) for _, table in tables), default=None)


def extend_positions(model: AnyModel, length: int, *, mode: str = "interpolate", tokenizer: Any = None) -> AnyModel:
    """Let a model with learned absolute positions read `length` tokens, in place and without training.

        sq.hf.extend_positions(sentence_transformer, 4096)
        sq.hf.extend_positions(model, 4096, tokenizer=tokenizer)

    The limits of what reads the text are raised to `length` too, where they are lower: of the tokenizer that is given,
    and of the one inside of a SentenceTransformer, a CrossEncoder or a pipeline (their `max_seq_length`).

    Args:
        model: any text model, or what holds one; it is returned. Relative and rotary positions need nothing and are
            left as they are.
        length: tokens that the model must take; no more than now changes nothing.
        mode: "interpolate" stretches the learned table linearly; "tile" repeats it.
        tokenizer: the model's tokenizer, where `model` does not hold it.

    Short inputs then see other positions than before under "interpolate", the same ones under "tile".

    Raises:
        ValueError: the model's length is fixed by something else (image patches, audio frames), or `mode` is unknown.
        TypeError: `tokenizer` is not a tokenizer of transformers.
    """
    if mode not in ("interpolate", "tile"):
        raise ValueError(f"mode={mode!r}, but positions are extended by 'interpolate' or 'tile'")
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"length={length!r}, but it must be a whole number ≥ 1")
    if tokenizer is not None and not hasattr(tokenizer, "model_max_length"):
        raise TypeError(f"expected a tokenizer with a model_max_length, got {type(tokenizer).__name__}")
    wrapped, model = model, transformers_model(model)
    if model.main_input_name not in ("input_ids", "inputs_embeds"):
        raise ValueError(
            f"{type(model).__name__} reads {model.main_input_name!r}: its length is fixed by its images or audio, "
            "not by a table of token positions"
        )
    for owner, table in _learned_tables(model):
        reserved = _reserved(model, table)
        rows = table.weight.data[reserved:]
        if length > rows.shape[0]:
            longer = torch.cat([table.weight.data[:reserved], _extended(rows, length, mode)])
            table.weight = nn.Parameter(longer, requires_grad=table.weight.requires_grad)
            table.num_embeddings = longer.shape[0]
            _grow_buffers(owner, longer.shape[0])
            for config in {id(c): c for c in (getattr(owner, "config", model.config), model.config)}.values():
                _grow_config(config, rows.shape[0], length)
    _raise_limits([tokenizer, *_readers(wrapped)], length)
    return wrapped


def _readers(model: AnyModel) -> Iterator[Any]:
    """What reads text for the model in what was given: tokenizers, and modules with a longest sequence."""
    yield getattr(model, "tokenizer", None)
    if isinstance(model, nn.Module):
        yield from (module for module in model.modules() if not isinstance(module, PreTrainedModel))


def _raise_limits(readers: list[Any], length: int) -> None:
    """Raise each lower limit of tokens to `length`."""
    for reader in readers:
        for name in ("model_max_length", "max_seq_length"):
            limit = getattr(reader, name, None)
            if isinstance(limit, int | float) and limit < length:
                setattr(reader, name, length)


def _extended(rows: Tensor, length: int, new_rows: str) -> Tensor:
    if new_rows == "tile":
        return rows[torch.arange(length, device=rows.device) % rows.shape[0]]
    stretched = F.interpolate(rows.T[None].float(), size=length, mode="linear", align_corners=True)
    return stretched[0].T.to(rows.dtype)


def _learned_tables(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Embedding]]:
    """(the module that holds it, the table) for every trained table of absolute positions."""
    return [
        (owner, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if name in _TABLES and isinstance(child, nn.Embedding)
    ]


def _reserved(model: PreTrainedModel, table: nn.Embedding) -> int:
    """Rows at the front that no token uses: BART's offset, or the padding row of RoBERTa and those before it."""
    offset = getattr(table, "offset", None)
    if isinstance(offset, int):
        return offset
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _grow_buffers(owner: nn.Module, rows: int) -> None:
    """Lengthen the (1, positions) buffers that BERT-like embeddings read positions and token types from."""
    for name, buffer in list(owner.named_buffers(recurse=False)):
        if name == "position_ids":
            setattr(owner, name, torch.arange(rows, device=buffer.device)[None])
        elif name == "token_type_ids":
            setattr(owner, name, buffer.new_zeros(1, rows))


def _grow_config(config: object, before: int, length: int) -> None:
    for name in ("max_position_embeddings", "n_positions"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit >= before:
            setattr(config, name, limit - before + length)
