"""The subject of a plan, as far as losses of it are measured: a text model at a length, or any module."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from subquad.tools.measure.prefix import Chain


class PlanSubject(ABC):
    """A model with inputs, a judge of its outputs, and a way to put methods into its layers by their numbers."""

    length: int  # tokens of an input, or of the longest one
    items: Sequence[Any]  # the inputs on which losses are measured
    run: Callable[[Any], Any]  # one input through the model
    no_gradients: ClassVar[type[torch.no_grad | torch.inference_mode]] = torch.inference_mode
    refusals: ClassVar[tuple[type[Exception], ...]] = ()  # by which a method refuses an input: its loss there is NaN

    @property
    @abstractmethod
    def single_loss(self) -> Callable[[Any, Any], float]:
        """A function that gives the loss of an output, from it and the exact one; 0 if they are equal."""

    @abstractmethod
    def running(self, methods: Any) -> AbstractContextManager[None]:
        """Run methods in layers by number, `EXACT` in all layers, or the model's own attention if it is None."""

    def chain(self) -> Chain | None:
        """The blocks whose outputs can be kept; None if they are no chain, or it is not known."""
        return None
