"""Notes of reports and cards on inputs that are longer than a model's own positions, and on those that are not."""

from collections.abc import Mapping, Sequence
from typing import Any

from subquad.core.spelling import listed


def extension_note(limit: int, yarn: int | None, *, causal: bool) -> str:
    """A note on longer inputs in a model with `limit` positions of its own.

    Args:
        limit: its own positions.
        yarn: the tokens that its rotary positions are extended to; None if its positions are interpolated.
        causal: True for a causal language model, for which advice on embeddings is out of place.
    """
    if yarn is not None:
        return _yarn_note(limit, yarn)
    return _interpolation_note(limit) if causal else f"{_interpolation_note(limit)} {_retrieval_note(limit)}"


def _interpolation_note(limit: int) -> str:
    """A note on inputs with interpolated positions."""
    return (
        f"The model's positions reach {limit:,} tokens. Inputs of at most {limit:,} tokens have exactly these "
        "positions; those of longer inputs are interpolated without training, and fidelity there compares with exact "
        "attention in the same extended model."
    )


def _retrieval_note(limit: int) -> str:
    """A note on what to do for retrieval instead, with figures of `benchmarks/stretched_positions.py`."""
    return (
        "For retrieval, do not embed longer inputs whole: the best of the exact "
        f"embeddings of its chunks of {limit:,} tokens finds a document more often (with all-MiniLM-L6-v2 on documents "
        "of 2,048 tokens, recall@1 is 0.353 for the best chunk, 0.280 for the mean of the chunks and 0.253 for the "
        "whole document)."
    )


def _yarn_note(limit: int, extended: int) -> str:
    """A note on inputs of up to `extended` tokens in a decoder with `limit` rotary positions of its own."""
    return (
        f"The model's rotary positions were trained to {limit:,} tokens. Requests of at most {limit:,} tokens have "
        f"exactly these; longer ones, up to {extended:,}, are read by YaRN (factor {extended / limit:.3g}), without "
        "training. Fidelity there compares with exact attention in the same extended model."
    )


def quarters_note(length: int, perplexities: Sequence[float]) -> str:
    """The exact model's perplexities in the quarters of a text, which show whether the model itself bears the length.

    >>> quarters_note(16384, [42.5, 29.04, 35.6, 30.3])
    "The exact model's perplexity in the four quarters of 16,384 tokens: 42.50, 29.04, 35.60 and 30.30."
    """
    each = listed([f"{perplexity:.2f}" for perplexity in perplexities])
    return f"The exact model's perplexity in the four quarters of {length:,} tokens: {each}."


def short_note(texts: Mapping[str, Mapping[str, Any]]) -> str:
    """The fidelities of `subquad.tools.plan.short`, as a sentence."""
    each = [f"{entry['fidelity']:.4f} at {int(n):,} tokens" for n, entry in texts.items()]
    passages = max(entry["passages"] for entry in texts.values())
    return (
        "Fidelity on short texts to the original model, with its own positions and its exact attention: "
        f"{listed(each)} ({passages} held-out passages)."
    )
