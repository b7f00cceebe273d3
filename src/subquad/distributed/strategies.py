"""The registry of strategies: how ranks run the methods of a class without each receiving all tokens.

A method that has no strategy here runs by heads (`by_heads`), for which it needs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

from subquad.distributed.token_split import TokenSplit
from subquad.methods.core.call import Call, Partial
from subquad.methods.core.method import Method

M = TypeVar("M", bound=Method)


def always(method: Method) -> bool:
    """True if a strategy supports a method with these settings."""
    return True


@dataclass(frozen=True, kw_only=True)
class Strategy(Generic[M]):
    """The way in which ranks run the methods of one class on a sequence whose tokens they share.

    Attributes:
        kind: their messages. "partials": a summary of their keys, by a function of the method's own. "halo": the keys
            near their borders; distances alone decide which key a query meets. "places": the same where it matters too
            a token's position in its item. "ring": all keys and values, in turn.
        attend: the partial of this rank's queries over the keys of all ranks, which all ranks compute together. It gets
            the method for the sizes of the whole sequence, this rank's query, key and value, the call (whose mask is
            that of this rank's tokens) and the split. Padded queries may come out as anything finite.
        fits: whether the settings of a method allow it; elsewhere it runs by heads.
        needs: the settings that allow it, for the message of a refusal.
        loss_reads_tokens: whether the auxiliary loss, if there is one, depends on the inputs.
    """

    kind: Literal["partials", "halo", "places", "ring"]
    attend: Callable[[M, Tensor, Tensor, Tensor, Call, TokenSplit], Partial]
    fits: Callable[[M], bool] = always
    needs: str = ""
    loss_reads_tokens: bool = True


_SUMMARIES: dict[type[Method], Strategy[Any]] = {}
_RINGS: dict[type[Method], Strategy[Any]] = {}


def register(method: type[M], strategy: Strategy[M]) -> None:
    """Let ranks run the methods of a class by a strategy: `mode="ring"` for a ring, `mode="summary"` for the others.

    The methods of this package are registered by the modules of `subquad.distributed.methods`. A method of another
    package is registered in the same way, at best where it is defined or in a module that it imports:

        from subquad.distributed.collectives import add

        def attend(method, query, key, value, call, split):
            sums = add(method.sums(key, value, call), split.group)    # of this rank's keys, then of those of all
            return method.read(query, sums), None

        sq.distributed.register(MyMethod, sq.distributed.Strategy(kind="partials", attend=attend))

    It is for exactly this class: a class that inherits from it may compute something else, and has a strategy of its
    own or none. A method without a strategy runs by heads.

    Raises:
        TypeError: `method` is not a class of methods.
        ValueError: the class has a strategy of this sort already.
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise TypeError(f"a strategy is for a class of methods, but this is {method!r}; give the class itself")
    strategies = _RINGS if strategy.kind == "ring" else _SUMMARIES
    if method in strategies:
        raise ValueError(
            f"{method.__name__} has a strategy of the kind {strategies[method].kind!r}; it cannot have another one of "
            f"the kind {strategy.kind!r}, so register it once"
        )
    strategies[method] = strategy


def summary_of(method: Method) -> Strategy[Any] | None:
    """The strategy by which ranks send summaries of their keys; None if the method, or its settings, have none."""
    strategy = _SUMMARIES.get(type(method))
    return strategy if strategy is not None and strategy.fits(method) else None


def ring_of(method: Method) -> Strategy[Any] | None:
    """The strategy by which keys go from rank to rank; None if the method, or its settings, have none."""
    strategy = _RINGS.get(type(method))
    return strategy if strategy is not None and strategy.fits(method) else None


def needed_settings(method: Method) -> str:
    """The requirements of a summary on the settings; empty if there are none."""
    strategy = _SUMMARIES.get(type(method))
    return "" if strategy is None else strategy.needs
