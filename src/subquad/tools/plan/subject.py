"""The subject of a plan, as far as losses of it are measured: a text model at a length, or any module."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from subquad.tools.measure.capture import LayerInputs
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.measure.prefix import Chain


class PlanSubject(ABC):
    """A model with inputs, a judge of its outputs, and a way to put methods into its layers by their numbers."""

    length: int  # tokens of an input, or of the longest one
    items: Sequence[Any]  # the inputs on which losses are measured
    run: Callable[[Any], Any]  # one input through the model
    loss: Callable[[Any, Any], float]  # the loss of an output against the exact one; 0 if they are equal
    group: MeasuringGroup = ALONE  # the processes that split the tokens of an input
    no_gradients: ClassVar[type[torch.no_grad | torch.inference_mode]] = torch.inference_mode
    refusals: ClassVar[tuple[type[Exception], ...]] = ()  # errors of methods that refuse an input: its loss is NaN

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device for whose work a stopwatch waits."""

    @property
    def single_loss(self) -> Callable[[Any, Any], float]:
        """The loss of outputs with a method in single layers."""
        return self.loss

    @abstractmethod
    def recorded(self) -> AbstractContextManager[list[LayerInputs]]:
        """Collect the inputs of every attention call inside."""

    @abstractmethod
    def running(self, methods: Any) -> AbstractContextManager[None]:
        """Run methods in layers by number, `EXACT` in all layers, or the model's own attention if it is None."""

    def chain(self) -> Chain | None:
        """The blocks whose outputs can be kept; None if they do not run in a chain, or if that is not known."""
        return None
