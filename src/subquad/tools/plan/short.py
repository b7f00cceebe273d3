"""The closeness of a planned model to the original one on short texts, within the model's own positions.

The model is extended as far as the longest plan needs, and runs the plan as it is saved. The original is the model as
it was given, in its own dtype and with its own attention. Texts are the first tokens of held-out passages.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from subquad.hf.plans import Plan
from subquad.tools.models.pretrained import Pretrained, running
from subquad.tools.plan.loads import PlanInputs, loss_of
from subquad.tools.runs.floor import Floor

LENGTHS = (16, 64, 128)
PASSAGES = 8


def short_fidelities(
    pretrained: Pretrained, loads: Sequence[PlanInputs], plan: Plan, floor: Floor
) -> dict[str, dict[str, Any]]:
    """{tokens: {"fidelity": mean, "passages": number}} at a few lengths and where the model's own positions end.

    Empty if the plan is exact attention everywhere.
    """
    if not plan.distinct:
        return {}
    longest = max(loads, key=lambda load: load.length)
    limit = longest.length if pretrained.limit is None else min(pretrained.limit, longest.length)
    lengths = sorted({n for n in (*LENGTHS, *([limit] if limit < longest.length else [])) if n <= limit})
    planned = pretrained.with_model(longest.model)
    methods = plan.for_model(longest.model)
    by_length = {n: _texts(pretrained, loads, n) for n in lengths}
    return {str(n): _fidelity(pretrained, planned, methods, texts, floor) for n, texts in by_length.items() if texts}


def _texts(pretrained: Pretrained, loads: Sequence[PlanInputs], length: int) -> list[list[int]]:
    """The first tokens of held-out passages that have as many, special tokens included."""
    load = next(load for load in sorted(loads, key=lambda load: load.length) if load.length >= length)
    before = len(pretrained.first_tokens)
    passages = [text for batch in load.held_out for text in batch if len(text) >= length]
    return [pretrained.wrap(passage[before:], length) for passage in passages[:PASSAGES]]


def _fidelity(
    original: Pretrained, planned: Pretrained, methods: Mapping[int, Any], texts: list[list[int]], floor: Floor
) -> dict[str, Any]:
    """1 − the mean loss of the planned model to the original one."""
    batches = [[text] for text in texts] if original.is_causal_lm else [texts]  # logits of all tokens of one at a time
    loss = loss_of(original, floor.figure)
    with running(original.model, None, original.group):
        exact = [original.forward(batch) for batch in batches]
    with running(planned.model, methods, planned.group):
        outputs = [planned.forward(batch) for batch in batches]
    losses = [loss(output, want) for output, want in zip(outputs, exact, strict=True)]
    return {"fidelity": 1.0 - statistics.mean(losses), "passages": len(texts)}
