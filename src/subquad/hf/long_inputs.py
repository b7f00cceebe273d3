"""A note on torch's error about an input that is longer than a model's learned positions: both numbers, and the remedy.

Such a model fails in its own embeddings, with an index or a size, before any attention is called. Which inputs are too
long cannot be known before the forward pass, because models count their positions differently: RoBERTa, for example,
does not count padding. A forward hook that also runs after an error adds the note, and changes nothing else.
"""

import sys
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from subquad.core.forward_hooks import add_hook, remove_hooks
from subquad.core.versions import cache_in
from subquad.hf.positions import holders_of_tables, position_limit


def explain_long_inputs(model: PreTrainedModel) -> None:
    """Add the note to errors of the forward passes of this model, if it has learned positions."""
    for holder in holders_of_tables(model):
        add_hook(holder, _add_note)


def stop_explaining(model: PreTrainedModel) -> None:
    """Remove what `explain_long_inputs` added."""
    remove_hooks(model, _add_note)


def _add_note(holder: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """The hook: after an error of torch, compare the numbers of tokens and of positions."""
    if output is not None:
        return
    error = sys.exception()
    if not isinstance(error, RuntimeError | IndexError):
        return
    inputs = next((x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if x is not None), None)
    limit = position_limit(holder)
    if not isinstance(inputs, Tensor) or inputs.ndim < 2 or limit is None:
        return
    cached = cache_in(kwargs)
    tokens = inputs.shape[1] + (0 if cached is None else cached.get_seq_length())
    if tokens > limit:
        error.add_note(
            f"The input has {tokens:,} tokens, but {type(holder).__name__} has {limit:,} positions: call "
            f"sq.hf.extend_positions(model, {tokens}), or give shorter inputs (truncation=True of the tokenizer)."
        )
