"""A log of the calls of SDPA that were replaced, and of what ran in each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rich.table import Table
from torch import nn

from subquad.core.plain_tables import as_text
from subquad.methods.core.method import Method
from subquad.nn.interception.call_sites import Caller


class InterceptedCalls(NamedTuple):
    """Calls of one place that ran alike. `reason` is why they ran exactly; None if the method ran."""

    where: str
    method: Method | None
    reason: str | None
    times: int


@dataclass
class InterceptionLog:
    """The calls of SDPA that `sq.intercept` has seen. Prints as a table; `calls` has the rows.

    Calls of the method in compiled code are not in it: see `sq.intercept`.
    """

    method: Method
    _counts: dict[tuple[str, str | None], int] = field(default_factory=dict, repr=False)
    _names: dict[nn.Module, dict[nn.Module, str]] = field(default_factory=dict, repr=False)

    @property
    def calls(self) -> list[InterceptedCalls]:
        """One row for each place and outcome, in the order of their first calls."""
        return [
            InterceptedCalls(where, self.method if reason is None else None, reason, times)
            for (where, reason), times in self._counts.items()
        ]

    @property
    def replaced(self) -> int:
        """The number of calls that ran the method."""
        return sum(row.times for row in self.calls if row.reason is None)

    @property
    def exact(self) -> int:
        """The number of calls that ran exact attention instead."""
        return sum(row.times for row in self.calls if row.reason is not None)

    def note(self, caller: Caller, reason: str | None) -> None:
        """Count a call; `reason` as in `Calls`."""
        key = (self.caller_name(caller), reason)
        self._counts[key] = self._counts.get(key, 0) + 1

    def caller_name(self, caller: Caller) -> str:
        """The name of the calling module in the outermost one that runs, or the line of code."""
        if caller.module is None or caller.root is None:
            return caller.line
        if caller.root not in self._names:
            self._names[caller.root] = {
                module: name.removeprefix("_orig_mod.") for name, module in caller.root.named_modules()
            }
        name = self._names[caller.root].get(caller.module, "")
        kind = type(caller.module).__name__
        return f"{name} ({kind})" if name else kind

    def __str__(self) -> str:
        table = Table("where", "calls", "ran", "why not the method", box=None)
        for row in self.calls:
            table.add_row(row.where, str(row.times), str(row.method or "exact attention"), row.reason or "")
        return as_text(table)
