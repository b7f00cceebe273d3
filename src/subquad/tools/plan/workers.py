"""Where the losses of a plan are measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from subquad.tools.plan.loads import PlanInputs
from subquad.tools.plan.measure import Candidate, single_losses
from subquad.tools.runs.executors import LOCAL, Executor


@dataclass(frozen=True)
class Workers:
    """What measures losses of single layers: this process, or an executor whose workers load the model themselves.

    Everything that measures time runs in this process.

    Attributes:
        elsewhere: in a worker, the losses of an input, from the length, the input's number, the names of the
            candidates in each layer, and the number of layers at a time.
    """

    executor: Executor = LOCAL
    elsewhere: Callable[[int, int, dict[int, list[str]], int], dict[str, dict[str, float]]] | None = None

    def losses(
        self, load: PlanInputs, item: int, kept: Mapping[int, list[Candidate]], together: int
    ) -> Callable[[], Any]:
        """What makes the losses of an input."""
        if self.elsewhere is None:
            return partial(single_losses, load, load.items[item], kept, together)
        names = {number: [c.name for c in tried] for number, tried in kept.items()}
        return partial(self.elsewhere, load.length, item, names, together)

    @property
    def note(self) -> tuple[str, ...]:
        """What a report says of it."""
        return (
            (f"Losses of single layers were measured by {self.executor.description}.",)
            if self.executor.description
            else ()
        )


UNAIDED = Workers()
