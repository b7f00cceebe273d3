"""Random prompts, alone and in a batch, and what a model generates from them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tests.library.hf.models import VOCAB, need_transformers


def prompt(length: int, seed: int = 0, batch: int = 1) -> Tensor:
    """Tokens (batch, length), never padding."""
    return torch.randint(5, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The batch of some prompts, and its mask."""
    longest = max(p.shape[1] for p in prompts)
    pads = [longest - p.shape[1] for p in prompts]
    ids = [F.pad(p, (n, 0)) for p, n in zip(prompts, pads, strict=True)]
    return torch.cat(ids), torch.cat([(torch.arange(longest) >= n).long()[None] for n in pads])


def generated(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, prefix: str = "", **options: Any
) -> tuple[Tensor, Tensor]:
    """The tokens, and the logits of each step. `prefix` is that of the arguments, for decoders of an encoder."""
    if "prompt_lookup_num_tokens" in options:
        need_transformers(5, 13, what="looks up prompts only for models with a token that ends a text")
    inputs = {prefix + "input_ids": ids, prefix + "attention_mask": torch.ones_like(ids) if mask is None else mask}
    torch.manual_seed(1)
    output = model.generate(
        **inputs, **{"max_new_tokens": 6, "do_sample": False, **options}, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return output.sequences, torch.stack(output.logits)
