"""The workers that measure the losses of a plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from subquad.tools.plan.measure import Candidate, SingleLosses
from subquad.tools.runs.executors import LOCAL, Executor


@dataclass(frozen=True)
class Workers:
    """The place where losses of single layers are measured: this process, or workers that load the model themselves.

    Everything that measures time runs in this process.

    Attributes:
        elsewhere: in a worker, the loss of a passage, from the length, the passage's number, a candidate's name, and
            the layers that have it.
    """

    executor: Executor = LOCAL
    elsewhere: Callable[[int, int, str, tuple[int, ...]], float] | None = None

    def single_loss(
        self, losses: SingleLosses, item: int, candidate: Candidate, layers: Sequence[int]
    ) -> Callable[[], float]:
        """A function that computes the loss of a passage with a candidate in some layers."""
        if self.elsewhere is None:
            return partial(losses.loss, item, {number: candidate.by_layer[number] for number in layers})
        return partial(self.elsewhere, losses.load.length, item, candidate.name, tuple(layers))

    @property
    def note(self) -> tuple[str, ...]:
        """The description in reports."""
        return (
            (f"Losses of single layers were measured by {self.executor.description}.",)
            if self.executor.description
            else ()
        )


UNAIDED = Workers()
