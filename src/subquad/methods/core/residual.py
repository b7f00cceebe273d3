"""The interface of a method that represents all keys, to be the residual of a sum: see `sum`.

Such a method defines

    residual(query, key, value, call) -> Residual

and, where some of its settings rule that out, `keeps_residual`, the text of the settings that do not.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from subquad.kernels.tokens.slots import Buckets
from subquad.methods.core.method import Call, Method, Partial


@dataclass(frozen=True)
class Residual:
    """Attention to all keys but the exact ones, with the weight that each key has in it.

    The weight of key j for query i is e^{a_i·b_j}, or Σ_r e^{a_ir + b_jr} where it is made of features. Those of all
    keys sum to e^lse, and the output is their mean of the values.
    """

    partial: Partial
    of_query: Float[Tensor, "B H N F"]  # a
    of_key: Float[Tensor, "B G M F"]  # b
    by_features: bool
    exact: tuple[Buckets, ...] = ()  # pairs that the method counts individually, in addition to this


@runtime_checkable
class GivesWay(Protocol):
    """A method that can be the residual of a sum, for the keys that other parts leave."""

    def residual(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Residual:
        """Its attention to all keys but its exact ones, on inputs that `attend` would take; the call wants lse."""


def refusal_of_residual(method: Method, beside: Method) -> str | None:
    """The reason why a method cannot represent the keys that `beside` leaves; None if it can."""
    if not isinstance(method, GivesWay):
        return (
            f"{method.name!r} cannot leave out the pairs that {str(beside)!r} counts; take 'clustered-tail', "
            "'lha-tail' or 'performer' for the rest, or add only 'keep' to it"
        )
    needed = getattr(method, "keeps_residual", None)
    if needed is None:
        return None
    return f"{str(method)!r} counts near keys itself, of which {str(beside)!r} counts some; give it {needed}"
