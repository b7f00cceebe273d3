"""The result of `sq.plan` for a module that contains no transformers model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from subquad.methods import Method
from subquad.tools.modules.tables import Columns, as_markdown, as_terminal
from subquad.tools.report import cells


@dataclass(frozen=True)
class HeldOutResult:
    """A plan on inputs that it was not made from.

    Attributes:
        inputs: number of held-out inputs.
        fidelity: mean over them.
        least: a lower bound of the mean fidelity, at a confidence of 95 % over all choices that were verified.
        cost: time of a pass, and its speed-up over the module's own attention with the verdict of the noise.
    """

    inputs: int
    fidelity: float
    least: float
    cost: Mapping[str, Any]

    def __str__(self) -> str:
        speed = cells.speedup(self.cost["speedup"], self.cost.get("verdict")).text
        return (
            f"{speed} the speed of exact attention, fidelity {self.fidelity:.4f} (at least {self.least:.4f} at a "
            f"confidence of 95 %) on {self.inputs} held-out inputs"
        )


@dataclass(frozen=True)
class ModulePlan:
    """The result of `sq.plan` for a module without a transformers model: a method for each layer. Prints as a table.

    `sq.nn.swap` with a module and `layers` puts the methods into the module.

    Attributes:
        module: the class of the module.
        metric: the metric or score of the outputs.
        min_fidelity: the least mean fidelity that a plan may have on held-out inputs.
        layers: {layer name: method}. Layers that are not in it keep their own attention; empty: all of them should.
        kinds: {layer name: class} of all layers.
        losses: {layer name: loss of fidelity by the method in this layer alone}, of those in `layers`.
        verified: the plan on held-out inputs, or the last choice that was tried; None if none was.
        why_exact: the reason why exact attention should stay, in a sentence; None if `layers` are faster.
        notes: sentences that a reader of the plan needs.
    """

    module: str
    metric: str
    min_fidelity: float
    layers: Mapping[str, Method]
    kinds: Mapping[str, str]
    losses: Mapping[str, float]
    verified: HeldOutResult | None
    why_exact: str | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, which can be written as JSON."""
        verified = self.verified
        return {
            "module": self.module,
            "metric": self.metric,
            "min_fidelity": self.min_fidelity,
            "layers": {name: str(method) for name, method in self.layers.items()},
            "losses": dict(self.losses),
            "verified": None
            if verified is None
            else {
                "inputs": verified.inputs,
                "fidelity": verified.fidelity,
                "least": verified.least,
                "cost": dict(verified.cost),
            },
            "why_exact": self.why_exact,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return as_terminal(self._columns, self._lines, self._sentences)

    def _repr_markdown_(self) -> str:
        return as_markdown(self._columns, self._lines, self._sentences)

    @property
    def _columns(self) -> Columns:
        return [("layer", False), ("kind", False), ("method", False), ("loss alone", True)]

    @property
    def _lines(self) -> list[list[str]]:
        return [
            [
                name or "(the module itself)",
                kind,
                str(self.layers.get(name, "(the layer's own)")),
                cells.number(self.losses.get(name), 5).text,
            ]
            for name, kind in self.kinds.items()
        ]

    @property
    def _sentences(self) -> list[str]:
        if self.why_exact is None:
            result = f"The plan has {self.verified}."
        else:
            result = f"Stay with exact attention: {self.why_exact}."
            if self.verified is not None:
                result += f" That choice has {self.verified}."
        return [f"{self.module}; fidelity: {self.metric}, at least {self.min_fidelity:g}", result, *self.notes]
