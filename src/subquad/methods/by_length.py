"""By length: short inputs run one method and longer ones another.

    out_i = attention of query i by the method of the last step whose length is ≤ n_i
    n_i   = number of real keys that query i may see: all of its item, or under a causal mask those up to itself

Exact attention is the fastest up to some hundred tokens, and which settings pay beyond depends on the length.
`subquad plan` finds the steps. For one method, `subquad doctor --measure` measures from which length on it is faster
than exact attention on this machine, and the start `measured` is that length.

The longest item of a batch does not decide for the others: each item runs what it would run alone. Under a causal mask
each query does, so that later tokens change nothing: the first queries run the method of a short input, whatever
follows them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from subquad.core.errors import InputError
from subquad.core.readable import can_be_read
from subquad.masks import Mask
from subquad.methods.core.grammar import A_LENGTH, MEASURED, as_term, joined, terms
from subquad.methods.core.measured_crossovers import measured_start
from subquad.methods.core.method import Call, Method, Part, Partial, Traits
from subquad.methods.core.mixture import combined, common_seed, is_mixture, refusal, trait_values
from subquad.methods.core.names import parse_method, resolve
from subquad.methods.core.settings import text_of_methods
from subquad.methods.full import Full
from subquad.methods.i_clustered import ImprovedClustered


class Step(NamedTuple):
    """A method and the number of keys from which on it runs."""

    start: int
    method: Method


def of_lengths(methods: list[Method]) -> Traits:
    """The combined traits of methods for different lengths."""
    return combined(
        methods,
        subquadratic=methods[-1].traits.subquadratic,
        from_start=not all(method.is_exact for method in methods),  # a query's length is its distance from the start
        exact_limit="each length is exact where its own method is: see there",
        example={"steps": "0:full+10:i-clustered:clusters=5;topk=4"},
        source="the methods' own: " + trait_values(methods, "source"),
    )


def written(steps: list[Step]) -> str:
    """The canonical text of steps: sorted, without redundant steps and default settings."""
    kept = steps[:1] + [step for before, step in pairwise(steps) if step.method != before.method]
    return joined(f"{start}:{as_term(method)}" for start, method in kept)


def read(text: str) -> list[Step]:
    """The steps of a text like `0:full+700:i-clustered:clusters=25;topk=16`. ValueError states what is wrong."""
    steps = [_read_step(part) for part in terms(text, A_LENGTH)]
    starts = [step.start for step in steps]
    if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        listed = ", ".join(map(str, starts))
        raise ValueError(f"the steps start at {listed} keys, but they must start at 0 and grow")
    common_seed(step.method for step in steps)
    return steps


def _read_step(text: str) -> Step:
    start, colon, name = text.strip().partition(":")
    start = start.strip()
    if not colon or not (start.isdecimal() or start == MEASURED):
        raise ValueError(f"{text.strip()!r} is not a number of keys, a ':' and a method")
    method = parse_method(name)
    if is_mixture(method):
        raise ValueError(f"{method.name!r} is a mixture itself")
    return Step(measured_start(str(method)) if start == MEASURED else int(start), method)


@dataclass(frozen=True)
class ByLength(Method):
    """A method that selects another method by the number of keys.

    Args:
        steps: the methods with `+` between them, their settings separated by `;`, each after the number of keys from
            which on it runs and a `:`. The first number is 0. `measured` in place of a number is the largest crossover
            that `subquad doctor --measure` measured for that method on this machine; the method that is made has the
            number. In Python also a mapping: `ByLength({0: "full", 700: "i-clustered:clusters=25"})`.

    The length is that of each item, counted in real keys; of each query, under a causal mask. Windows and dense masks
    do not count. If a mask cannot be read without waiting for the device, or while compiling, every method that may
    be needed runs on the whole batch, and each query takes its own.

    Raises:
        ValueError: a text that names no methods, steps that do not start at 0 or do not grow, a mixture inside, or
            methods of different seeds; for `measured`, a method that was not measured on this machine or was not
            faster there. The message names the command that measures it.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 4, 50, 8)
    >>> method = sq.ByLength({0: "full", 700: "i-clustered:clusters=25"})
    >>> torch.equal(sq.attention(q, k, v, method=method), sq.attention(q, k, v, method="full"))
    True
    >>> method
    ByLength(steps='0:full+700:i-clustered:clusters=25')
    """

    steps: str | Mapping[int, Any] = text_of_methods(  # a text, once it is made
        "0:full+1024:i-clustered", examples=("0:full+8:local:window=2", "0:local+9:full")
    )

    name: ClassVar[str] = "by-length"
    traits: ClassVar[Traits] = of_lengths([Full(), ImprovedClustered()])

    def __post_init__(self) -> None:
        listed: Any = self.steps
        try:
            if isinstance(listed, Mapping):
                of_mapping = (_step_of(start, method) for start, method in listed.items())
                listed = written(sorted(of_mapping, key=lambda step: step.start))
            text = written(read(listed))
            steps = read(text)
        except InputError as error:  # of a measured start
            raise InputError(f"{self.name!r}: steps={self.steps!r}: {error}") from None
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self.name!r}: steps={self.steps!r}, but it must be methods with '+' between them, each after the "
                f"number of keys from which on it runs, as in '0:full+700:i-clustered:clusters=25;topk=16': {error}"
            ) from None
        object.__setattr__(self, "steps", text)
        object.__setattr__(self, "_steps", tuple(steps))
        super().__post_init__()

    def describe(self) -> Traits:
        """The combined traits of the methods of all lengths."""
        return of_lengths([step.method for step in self.at])

    @property
    def at(self) -> tuple[Step, ...]:
        """The lengths and methods, in order."""
        return self.__dict__["_steps"]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The methods, each on all heads."""
        return tuple(Part(step.method, 1) for step in self.at)

    def deal(self, heads: int, kv_heads: int) -> list[tuple[slice, slice]]:
        """Assign all heads to each part."""
        return [(slice(0, heads), slice(0, kv_heads))] * len(self.at)

    @property
    def default_seed(self) -> int:
        """The seed of the methods."""
        return common_seed(step.method for step in self.at)

    def number_at(self, keys: int) -> int:
        """The number of the step that runs for `keys` keys."""
        # A filter, so that Dynamo guards on each comparison: their sum would be a symbolic number.
        return len([step for step in self.at[1:] if step.start <= keys])

    def method_at(self, keys: int) -> Method:
        """The method that runs for `keys` keys."""
        return self.at[self.number_at(keys)].method

    @property
    def exact_queries(self) -> int:
        """The fewest of any step."""
        return min(step.method.exact_queries for step in self.at)

    def refuses(self, mask: Mask, **asked: Any) -> str | None:
        """The reason why the method refuses a call; the reason names the steps that refuse."""
        methods = [step.method for step in self.at]
        return refusal(self, methods, mask, super().refuses(mask, **asked), **asked)

    def check_counts(self, N: int, M: int) -> None:
        """Check the numbers of queries and keys against the method that runs for M keys."""
        self.method_at(M).check_counts(N, M)

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """The learned parameters of each method that has some, under its step's number."""
        made = [step.method.make_learned(heads, kv_heads, head_dim, max_length) for step in self.at]
        learned = {str(number): module for number, module in enumerate(made) if module is not None}
        return nn.ModuleDict(learned) if learned else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attend with each query by the method for the number of keys that it sees."""
        N, M = query.shape[2], key.shape[2]
        if call.mask.key_padding(M) is None and not call.mask.is_causal:
            return self._run(self.number_at(M), query, key, value, call)
        lengths = visible_keys(call.mask, N, M, query.device)  # (B or 1, N)
        number = torch.zeros_like(lengths)
        for step in self.at[1 : self.number_at(M) + 1]:  # a later start may exceed int64
            number = number + (lengths >= step.start)
        if not can_be_read(query) or query.device.type != "cpu":
            return self._selected(range(self.number_at(M) + 1), number, query, key, value, call)
        needed = sorted(set(number.flatten().tolist()))
        if len(needed) == 1:
            return self._run(needed[0], query, key, value, call)
        if call.mask.is_causal or number.shape[0] == 1:
            return self._selected(needed, number, query, key, value, call)
        return self._each_item(number[:, 0], query, key, value, call)

    def _run(self, number: int, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """One step's method on everything."""
        method = self.at[number].method.clamped_to(query.shape[2], key.shape[2])
        return method.attend_for(call.mask)(query, key, value, _call_of_step(call, number))

    def _selected(
        self, numbers: Iterable[int], chosen: Tensor, query: Tensor, key: Tensor, value: Tensor, call: Call
    ) -> Partial:
        """Several methods on everything; each query, or each item, takes what its own step gave."""
        first, *others = numbers
        out, lse = self._run(first, query, key, value, call)
        for number in others:
            mine = (chosen == number)[:, None]
            more, more_lse = self._run(number, query, key, value, call)
            out = torch.where(mine[..., None], more, out)
            lse = torch.where(mine, more_lse, lse) if more_lse is not None and lse is not None else None
        return out, lse

    def _each_item(self, chosen: Tensor, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Each method on the batch items that are of its lengths."""
        outs, lses, indices = [], [], []
        for number in chosen.unique().tolist():
            items = (chosen == number).nonzero()[:, 0]
            item_call = replace(
                call,
                mask=_mask_of_items(call.mask, items),
                bias=_of_items(call.bias, items),
                hidden=_of_items(call.hidden, items),
            )
            out, lse = self._run(number, query[items], key[items], value[items], item_call)
            outs.append(out)
            lses.append(lse)
            indices.append(items)
        back = torch.cat(indices).argsort()
        present = [lse for lse in lses if lse is not None]
        return torch.cat(outs)[back], torch.cat(present)[back] if len(present) == len(lses) else None

    @property
    def has_auxiliary_loss(self) -> bool:
        """True if one of the methods has an auxiliary loss."""
        return any(step.method.has_auxiliary_loss for step in self.at)

    def auxiliary_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The auxiliary loss of the method for the length of the batch."""
        number = self.number_at(key.shape[2])
        return self.at[number].method.auxiliary_loss(query, key, value, _call_of_step(call, number))

    def fit_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The loss by which each step's method is fitted."""
        number = self.number_at(key.shape[2])
        return self.at[number].method.fit_loss(query, key, value, _call_of_step(call, number))


def visible_keys(mask: Mask, N: int, M: int, device: torch.device) -> Tensor:
    """The number of real keys that each query may see, int (B or 1, N), without regard to windows and dense masks."""
    valid = mask.key_padding(M)
    valid = torch.ones(1, M, dtype=torch.bool, device=device) if valid is None else valid
    if not mask.is_causal:
        return valid.sum(1, keepdim=True).expand(-1, N)
    last = mask.positions(torch.arange(N, device=device)[None])  # the last key that each query may see
    counts = valid.cumsum(1)
    rows = max(counts.shape[0], last.shape[0])
    return counts.expand(rows, -1).gather(1, last.expand(rows, -1).clamp(0, M - 1))


def _call_of_step(call: Call, number: int) -> Call:
    """The call with the learned parameters of one step."""
    learned = dict(call.learned.items()) if isinstance(call.learned, nn.ModuleDict) else {}
    return replace(call, learned=learned.get(str(number)))


def _step_of(start: Any, method: Any) -> Step:
    if start == MEASURED:
        return Step(measured_start(str(resolve(method))), resolve(method))
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise ValueError(f"{start!r} is not a whole number of keys")
    return Step(start, resolve(method))


def _of_items(x: Tensor | None, items: Tensor) -> Tensor | None:
    """These items of what has one for each, or one for all."""
    return x if x is None or x.shape[0] == 1 else x[items]


def _mask_of_items(mask: Mask, items: Tensor) -> Mask:
    """The mask of some items of a batch, without segments."""
    sides: dict[str, Any] = {side: tuple(x[items] for x in getattr(mask, side)) for side in ("both", "keys", "queries")}
    allowed = tuple(dense if dense.shape[0] == 1 else dense[items] for dense in mask.allowed)
    offset = mask.offset
    if isinstance(offset, Tensor) and offset.numel() > 1:
        offset = offset[items]
    return replace(mask, **sides, allowed=allowed, offset=offset)
