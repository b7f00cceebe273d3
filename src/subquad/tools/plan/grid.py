"""The methods that a plan tries at a length."""

import math
from collections.abc import Sequence

from subquad.methods import Method, parse_method
from subquad.methods.full import FAST_EXACT

LEAST = 8  # clusters


def grid(length: int) -> list[Method]:
    """Settings of methods that need no fitting, from cheap to close; clusters and top keys grow with the length.

    Around the defaults of `clustered-tail`, C = √(2N) clusters and k = √(8N) top keys, which keep its error about
    constant. Exact attention by subquad's kernel is for layers that bear nothing. Crude methods are for layers that
    bear much: the last layer of an encoder is nearly free. Windows are for causal layers, and, in addition to clusters,
    layers that attend to neighbours, as in speech.
    """
    C, k = math.sqrt(2 * length), math.sqrt(8 * length)
    tails = [
        (0.5, 0.25, 8),
        (0.5, 0.5, 16),
        (0.7, 0.5, 16),
        (0.7, 0.7, 32),
        (1.0, 1.0, 32),
        (1.4, 1.0, 32),
        (2.0, 1.4, 32),
    ]
    texts = [
        FAST_EXACT,
        "clustered:clusters=25",
        "i-clustered:clusters=25,topk=32",
        f"i-clustered:clusters={_even(C)},topk={_even(k / 2)},space=logits,refine=1",
        *(f"clustered-tail:clusters={_even(a * C)},topk={_even(b * k)},cells={x}" for a, b, x in tails),
        f"clustered-tail:clusters={_even(C)},topk={_even(k)},window=16",
        "local:window=64",
        f"local:window={_even(k)}",
        f"local:window={_even(length / 8)}",
        "performer",
        "nystrom",
    ]
    return list(dict.fromkeys(map(parse_method, texts)))


def _even(size: float) -> int:
    """A multiple of eight near this size, which suits vectors of the processor."""
    return max(LEAST, 8 * round(size / 8))


def pareto(errors: dict[str, float], seconds: dict[str, float], most: int) -> list[str]:
    """At most `most` names of the Pareto front of error and time, spread evenly from fast to close; 1: the closest."""
    front: list[str] = []
    for name in sorted(errors, key=lambda name: (seconds[name], errors[name])):
        if not front or errors[name] < errors[front[-1]]:
            front.append(name)
    if len(front) <= most:
        return front
    if most == 1:
        return front[-1:]
    positions: Sequence[int] = [round(i * (len(front) - 1) / (most - 1)) for i in range(most)]
    return [front[position] for position in dict.fromkeys(positions)]
