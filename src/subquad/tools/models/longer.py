"""Notes of reports and cards on inputs that are longer than a model's own positions, and on those that are not."""

from collections.abc import Mapping
from typing import Any

from subquad.core.spelling import listed


def longer_note(limit: int) -> str:
    """How a model with `limit` positions of its own reads longer inputs, and what to do for retrieval instead.

    Its figures are those of `benchmarks/stretched_positions.py`.
    """
    return (
        f"The model's positions reach {limit:,} tokens. Inputs of at most {limit:,} tokens have exactly these "
        "positions; those of longer inputs are interpolated without training, and fidelity there compares with exact "
        "attention in the same extended model. For retrieval, do not embed longer inputs whole: the best of the exact "
        f"embeddings of its chunks of {limit:,} tokens finds a document more often (with all-MiniLM-L6-v2 on documents "
        "of 2,048 tokens, recall@1 is 0.353 for the best chunk, 0.280 for the mean of the chunks and 0.253 for the "
        "whole document)."
    )


def short_note(texts: Mapping[str, Mapping[str, Any]]) -> str:
    """The fidelities of `subquad.tools.plan.short`, as a sentence."""
    each = [f"{entry['fidelity']:.4f} at {int(n):,} tokens" for n, entry in texts.items()]
    passages = max(entry["passages"] for entry in texts.values())
    return (
        "Fidelity on short texts to the original model, with its own positions and its exact attention: "
        f"{listed(each)} ({passages} held-out passages)."
    )
