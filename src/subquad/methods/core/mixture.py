"""The combined traits and refusals of methods that share a call, in `sum`, `mixed-heads` and `by-length`."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from subquad.masks import Mask
from subquad.methods.core.method import Method, Part, Traits

WEAKEST_FIRST: tuple[Literal["no", "values-only", "strict"], ...] = ("no", "values-only", "strict")
# Traits that are yes or no, by how they combine: those that all methods must have, and those that one is enough for.
ALL = (
    "cross",
    "window",
    "dense_mask",
    "bias",
    "lse",
    "order_free",
    "normalised",
    "subquadratic",
    "quadratic_baseline",
)
ANY = (
    "by_halves",
    "stochastic",
    "positional",
    "from_start",
    "by_values",
    "relative",
    "synthetic",
    "needs_hidden",
    "learned",
)


def combined(methods: Sequence[Method], **changes: Any) -> Traits:
    """The combined traits of methods; `changes` are traits of the mixture itself."""
    traits = [method.traits for method in methods]
    together: dict[str, Any] = {
        "family": "mixture",
        "causal": next(t.causal for kind in WEAKEST_FIRST for t in traits if t.causal == kind),
        **{trait: all(getattr(t, trait) for t in traits) for trait in ALL},
        **{trait: any(getattr(t, trait) for t in traits) for trait in ANY},
        "cached": all(t.cross or t.cached for t in traits),
        "fit": next((t.fit for t in traits if t.fit is not None), None),
        "unit": traits[0].unit if len({t.unit for t in traits}) == 1 else "none",
        "dropout": trait_values(methods, "dropout"),
        "complexity": trait_values(methods, "complexity"),
    }
    return Traits(**(together | changes))


def trait_values(methods: Iterable[Method], trait: str) -> str:
    """The distinct values of a trait of these methods."""
    return "; ".join(dict.fromkeys(f"{method.name}: {getattr(method.traits, trait)}" for method in methods))


def is_mixture(method: Method) -> bool:
    """True if a method runs others on some of the heads or some of the lengths. A sum does not: it is one attention."""
    return method.parts != (Part(method, 1),)


def refusal(mixture: Method, methods: Iterable[Method], mask: Mask, general: str | None, **asked: bool) -> str | None:
    """The reason why a mixture cannot take a call, naming the parts that refuse it; None if it can.

    Args:
        mixture: the mixture.
        methods: its parts.
        mask: the mask of the call.
        general: the refusal by the mixture's own traits.
        asked: the options of `Method.refuses`.
    """
    reasons = {str(method): method.refuses(mask, **asked) for method in methods}
    refusing = {part: reason for part, reason in reasons.items() if reason}
    if not refusing:
        return general
    part, reason = next(iter(refusing.items()))
    if general is None:
        return f"{mixture.name!r} does not support what its part {part!r} refuses: {reason}"
    return f"{general} (or another method for {' and '.join(map(repr, refusing))}, which cannot do it)"


def common_seed(methods: Iterable[Method]) -> int:
    """The common seed of methods that share a call. ValueError if they have several."""
    seeds = sorted({method.default_seed for method in methods if hasattr(method, "seed")})
    if len(seeds) > 1:
        raise ValueError(
            f"the parts have the seeds {' and '.join(map(str, seeds))}, but a call has one for all of them"
        )
    return seeds[0] if seeds else 0


def moves_queries(method: Method) -> bool:
    """True if a method, or a part of it, makes centroids of queries at earlier positions."""
    return any(getattr(part.method, "queries", None) == "earlier" for part in method.parts)
