"""The division of a run among processes: which of them have the same items, and which have other ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import ceil
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from subquad import hf
from subquad.core.errors import InputError, check_least
from subquad.distributed import Sequence
from subquad.distributed.run import refusal_of_method
from subquad.masks import Mask
from subquad.nn.auxiliary import has_auxiliary_loss
from subquad.research.training.models import AttentionConfig, MixtureModel, splitting
from subquad.tools.runs import processes

LONGEST_WAIT = 1e6  # seconds


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """The division of a run among several processes.

    Attributes:
        sequence: number of processes that share the tokens of each input; further processes share the batch's items.
        mode: what these processes send each other: "summary", "heads", or "auto", which is a summary if the method has
            one, and otherwise heads (a ring for exact attention with fewer heads than processes).
        fsdp: whether each process stores only its share of the weights, gradients and optimizer states (FSDP2).
        timeout: number of seconds that a process waits for the others before the run ends.
    """

    sequence: int = 1
    mode: Literal["auto", "summary", "heads"] = "auto"
    fsdp: bool = False
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        check_least(self, sequence=1, timeout=1)
        if self.timeout > LONGEST_WAIT:
            raise ValueError(f"timeout={self.timeout:g}, but it must be at most {LONGEST_WAIT:,.0f} seconds")


@dataclass(frozen=True)
class Layout:
    """The processes of a run. Those with the same items are next to each other: 0 and 1, then 2 and 3, …"""

    settings: ParallelSettings = field(default_factory=ParallelSettings)

    def check(self) -> None:
        """InputError where there are not as many processes as the settings need."""
        sequence, count = self.settings.sequence, processes.count()
        if count % sequence:
            raise InputError(
                f"parallel.sequence={sequence} does not divide the number of processes, {count}: start a multiple of "
                f"{sequence}, torchrun --nproc-per-node {sequence} -m subquad train …"
            )
        if self.settings.fsdp and count == 1:
            raise InputError(
                "parallel.fsdp=true shares the weights among processes, but there is one: torchrun --nproc-per-node 2 "
                "-m subquad train …"
            )

    @property
    def splits(self) -> bool:
        """True if processes share the tokens of an input."""
        return self.settings.sequence > 1

    @property
    def shares(self) -> int:
        """The number of parts that a batch is divided into, each of other items."""
        return processes.count() // self.settings.sequence

    @property
    def share(self) -> int:
        """The index of this process's part of a batch."""
        return processes.number() // self.settings.sequence

    @property
    def seconds(self) -> int:
        """The seconds that a process waits for the others, rounded up."""
        return ceil(self.settings.timeout)

    @property
    def part(self) -> int:
        """The index of this process's part of the tokens."""
        return processes.number() % self.settings.sequence

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """Split the tokens of the models that run inside the block.

        Raises:
            InputError: this model cannot run on a part of the tokens; the message states why.
        """
        if not self.splits:
            yield
            return
        # A group of its own, even where it is all processes: another one averages gradients meanwhile.
        group, _ = dist.new_subgroups(self.settings.sequence, timeout=timedelta(seconds=self.seconds))
        reason = self.refusal(model, group)
        if reason:
            raise InputError(reason)
        with splitting.over(group, self.settings.mode):
            yield

    def refusal(self, model: nn.Module, group: Any) -> str | None:
        """The reason why this model cannot run on a part of the tokens, with the remedy; None if it can."""
        what = f"parallel.sequence={self.settings.sequence}"
        config = getattr(model, "config", None)
        if not isinstance(config, AttentionConfig):
            return (
                f"{what} is for models that subquad train makes from their sizes, not for model.pretrained; leave it "
                "out, or train with sq.hf.swap in a script of your own"
            )
        if isinstance(model, MixtureModel):
            return f"{what} is not for models of sets, whose elements are pooled by attention; leave it out"
        if config.attention_dropout:
            return f"{what} is not supported with model.attention_dropout={config.attention_dropout}; give 0"
        if getattr(config, "piece", 0):
            return f"{what} is not supported with model.piece={config.piece}, which reads pieces in turn; give 0"
        if has_auxiliary_loss(model):
            return f"{what} is not for methods with an auxiliary loss, which is one of all tokens; leave it out"
        return _refusal_of_methods(model, Sequence.even(self.settings.sequence, group, mode=self.settings.mode))


def _refusal_of_methods(model: Any, sequence: Sequence) -> str | None:
    """The reason why a layer's method cannot run on a part of the tokens; None if all can."""
    assert isinstance(model, PreTrainedModel)
    layers, bounds = hf.find_layers(model), hf.bounds(model)
    masks = {layer.number: Mask.causal() if layer.causal else Mask() for layer in layers}
    heads = model.config.num_attention_heads
    reasons = (refusal_of_method(x.method, masks[number], sequence, heads, x.learned) for number, x in bounds.items())
    return next((reason for reason in reasons if reason), None)
