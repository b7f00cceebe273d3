"""The positions that models work out themselves, for a part of the tokens.

    places    0, 1, 2, …                                                   BERT, GPT-2, Llama and most others
    ids       1, 2, … behind the padding id, of ids that are not padding    RoBERTa and those made from it
    mask      0, 1, 2, … of tokens that the attention mask has          OPT

The first depends on how many tokens other ranks have, the others on how many real ones.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Any]
RULES = ("places", "ids", "mask")


def counted(rule: str, inputs: Inputs, config: Any) -> Tensor | None:
    """The tokens (B,n) that count, as int64; None: every place does.

    Raises:
        ValueError: there are no ids to count, or no mask.
    """
    if rule == "places":
        return None
    if rule == "ids":
        if "input_ids" not in inputs:
            raise ValueError(
                "this model counts positions from input_ids; give them in place of inputs_embeds, or give position_ids"
            )
        return (inputs["input_ids"] != config.pad_token_id).long()
    if "attention_mask" in inputs:
        return inputs["attention_mask"].long()
    return torch.ones(tokens_of(inputs).shape[:2], dtype=torch.long, device=tokens_of(inputs).device)


def positions(rule: str, inputs: Inputs, start: int, before: Tensor | None, config: Any) -> Tensor:
    """The positions (B|1,n) of tokens after `start` others, of which `before`, (B,), count."""
    valid = counted(rule, inputs, config)
    if valid is None or before is None:
        tokens = tokens_of(inputs)
        return torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
    number = (valid.cumsum(1) + before[:, None]) * valid
    return number + (config.pad_token_id if rule == "ids" else -1)


def tokens_of(inputs: Inputs) -> Tensor:
    """The ids or the embeddings of this rank's tokens.

    Raises:
        ValueError: there are none.
    """
    for name in ("input_ids", "inputs_embeds"):
        if inputs.get(name) is not None:
            tokens: Tensor = inputs[name]
            return tokens
    raise ValueError("a model on split tokens takes input_ids or inputs_embeds, of which there are none")
