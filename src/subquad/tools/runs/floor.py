"""The floor: the most by which a method may change what a model gives, in the units of that kind of model."""

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from subquad.core.errors import InputError

Figure = Literal["fidelity", "kl", "agreement"]

OPTIONS: dict[Figure, str] = {"fidelity": "min_fidelity", "kl": "max_kl", "agreement": "min_agreement"}
MOST_DIGITS = 12  # of a figure that is close to its floor
MIN_FIDELITY, MAX_KL = 0.99, 0.002  # defaults, for embeddings and masked tokens, and for next tokens


@runtime_checkable
class FloorSettings(Protocol):
    """Settings with a floor, of which at most one is given."""

    @property
    def min_fidelity(self) -> float | None:
        """Least fidelity."""

    @property
    def max_kl(self) -> float | None:
        """Largest KL in nats."""

    @property
    def min_agreement(self) -> float | None:
        """Least share of exact top tokens."""


@dataclass(frozen=True)
class Floor:
    """A figure of closeness to the exact model, and its bound.

    "fidelity" is a mean cosine of embeddings, or a ratio of pseudo-perplexities. For a causal language model it is
    e^{−KL} of next-token distributions under the floor "kl", and the share of equal top tokens under "agreement".
    """

    figure: Figure = "fidelity"
    bound: float = MIN_FIDELITY
    causal: bool = False  # all attention of the model is causal, as it is under a floor of next tokens

    @classmethod
    def for_model(cls, settings: FloorSettings, kind: str) -> "Floor":
        """The floor that settings name for a model of this kind, or its default.

        Raises:
            InputError: several are given, or one of a model of another kind.
        """
        check_floor(settings)
        named: list[Figure] = [f for f, option in OPTIONS.items() if getattr(settings, option) is not None]
        if not named:
            return cls("kl", MAX_KL) if kind == "causal-lm" else cls()
        figure = named[0]
        if (kind == "causal-lm") == (figure == "fidelity"):
            what = "a causal language model" if kind == "causal-lm" else "not a causal language model"
            instead = "--max-kl or --min-agreement" if kind == "causal-lm" else "--min-fidelity"
            raise InputError(f"{_as_option(figure)} does not fit: the model is {what}; give {instead}")
        return cls(figure, getattr(settings, OPTIONS[figure]))

    @property
    def of_next_tokens(self) -> bool:
        """True if it is a floor of a causal language model."""
        return self.figure != "fidelity"

    @property
    def is_causal(self) -> bool:
        """True if it is a floor of a model all of whose attention is causal."""
        return self.causal or self.of_next_tokens

    @property
    def option(self) -> str:
        """The setting that names it."""
        return OPTIONS[self.figure]

    @property
    def least(self) -> float:
        """The fidelity that must be kept."""
        return math.exp(-self.bound) if self.figure == "kl" else self.bound

    def __str__(self) -> str:
        return {
            "fidelity": f"fidelity ≥ {self.bound:g}",
            "kl": f"KL ≤ {self.bound:g}",
            "agreement": f"same top token ≥ {self.bound:g}",
        }[self.figure]

    def describe(self, fidelity: float) -> str:
        """A fidelity in the floor's unit, with the digits that show on which side of the floor it is."""
        name = {"kl": "KL", "agreement": "same top token", "fidelity": "fidelity"}[self.figure]
        value, kind, digits = fidelity, "f", 3
        if self.figure == "kl":
            value, kind, digits = max(0.0 - math.log(max(fidelity, 1e-30)), 0.0), "g", 2
        for more in range(MOST_DIGITS - digits):
            shown = f"{value:.{digits + more}{kind}}"
            if (float(shown) <= self.bound if kind == "g" else float(shown) >= self.bound) == (fidelity >= self.least):
                break
        return f"{name} {shown}"

    def to_dict(self) -> dict[str, Any]:
        """The fields that a report keeps."""
        return {"figure": self.figure, "bound": self.bound}


def check_floor(settings: FloorSettings) -> None:
    """InputError where several floors are given, or one is out of its range."""
    named = {f: value for f, option in OPTIONS.items() if (value := getattr(settings, option)) is not None}
    if len(named) > 1:
        raise InputError(f"{' and '.join(map(_as_option, named))} are both given; give one of them")
    for figure, value in named.items():
        if figure == "kl" and not 0.0 < value < math.inf:
            raise InputError(f"max-kl {value:g} must be above 0 and finite")
        if figure != "kl" and not 0.0 < value <= 1.0:
            raise InputError(f"{OPTIONS[figure].replace('_', '-')} {value:g} must be above 0 and at most 1")


def _as_option(figure: Figure) -> str:
    return "--" + OPTIONS[figure].replace("_", "-")
