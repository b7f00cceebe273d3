"""The distance of a causal language model's next tokens from the exact model's, on a sample of its prompts.

A sampled prompt is read twice more, with the methods of its layers and with exact attention in all of them. The two
next-token distributions p_exact and p are compared at sampled positions, and at the last one:

    KL(exact ‖ method) = Σ_t p_exact(t) · (log p_exact(t) − log p(t))      in nats
    same top token     = [argmax p_exact = argmax p]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor, nn

from subquad.audits.outputs import OutputWatch, token_input
from subquad.audits.report import LARGEST, NextTokenReport
from subquad.audits.statistics import RunningMoments, mean_upper, share_upper

MULTIPLE = 10  # of the floor of the KL: losses are cut off there, or at 1 nat if that is more


@dataclass(frozen=True)
class NextTokenFloor:
    """The largest mean KL in nats, or else the least share of exact top tokens."""

    max_kl: float | None = None
    min_agreement: float | None = None

    @property
    def largest_kl(self) -> float:
        """The least KL that counts as a loss of 1: well above the floor, which nothing could break otherwise."""
        return max(1.0, MULTIPLE * (self.max_kl or 0.0))

    @property
    def accepted(self) -> float:
        """The largest expected loss of a prompt that is accepted."""
        return self.max_kl / self.largest_kl if self.max_kl is not None else 1.0 - (self.min_agreement or 0.0)

    def loss(self, kl: float, different: float) -> float:
        """The loss of a prompt in [0, 1], from its means: KL / `largest_kl`, or the share of other top tokens."""
        return min(kl / self.largest_kl, 1.0) if self.max_kl is not None else different

    def __str__(self) -> str:
        return f"KL ≤ {self.max_kl:g}" if self.max_kl is not None else f"same top token ≥ {self.min_agreement:g}"


@dataclass
class Compared:
    """Sums over positions."""

    kl: RunningMoments = field(default_factory=RunningMoments)  # of all positions that have one
    undefined: int = 0  # positions without a finite KL; they count as another top token
    same: int = 0

    @property
    def positions(self) -> int:
        """Number of positions."""
        return self.kl.count + self.undefined

    def add(self, kls: list[float], same: list[bool]) -> None:
        """Add the positions of a prompt."""
        for kl, equal in zip(kls, same, strict=True):
            if kl == kl and abs(kl) != float("inf"):
                self.kl.add(max(kl, 0.0))
                self.same += equal
            else:
                self.undefined += 1


class PromptWatch(OutputWatch):
    """Compares the next tokens of prompts."""

    def __init__(self, model: nn.Module, *, positions: int, floor: NextTokenFloor | None, seed: int, **options: Any):
        super().__init__(model, accepted=None if floor is None else floor.accepted, seed=seed, **options)
        self._positions, self._floor = positions, floor
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self.all, self.last = Compared(), Compared()

    def report(self, delta: float) -> NextTokenReport:
        """The results so far, with bounds at confidence 1 − δ."""
        with self._lock:
            every, kl = self.all, self.all.kl
            bound = None
            if kl.largest <= LARGEST and not every.undefined:
                bound = mean_upper(kl.mean, kl.variance, kl.count, delta, LARGEST)
            different = every.positions - every.same
            return NextTokenReport(
                prompts=self.inputs,
                audited=self.audited,
                skipped=self.skipped,
                positions=every.positions,
                undefined=every.undefined,
                kl=kl.mean if kl.count else None,
                kl_bound=bound,
                agreement=every.same / every.positions if every.positions else None,
                agreement_bound=1 - share_upper(different, every.positions, delta) if every.positions else None,
                last_kl=self.last.kl.mean if self.last.kl.count else None,
                last_agreement=self.last.same / self.last.positions if self.last.positions else None,
                floor=None if self._floor is None else str(self._floor),
                evidence=self.evidence,
                alarm=self.alarm,
            )

    def _is_input(self, inputs: Mapping[str, Any]) -> bool:
        """True if a call reads more than one token and continues no cache."""
        tokens = token_input(inputs)
        return tokens is not None and super()._is_input(inputs) and tokens.shape[1] > 1

    def _compare(self, inputs: Mapping[str, Any], valid: Bool[Tensor, "B N"]) -> None:
        """Read a prompt again, twice, and add the results of its positions; those of the last tokens come last."""
        with self._lock:
            items, at = _sampled(valid, self._positions, self._generator)
        mine, exact = self._both(lambda: self._log_probabilities(inputs, items, at))
        kls = F.kl_div(mine, exact, reduction="none", log_target=True).sum(-1).tolist()
        same = (mine.argmax(-1) == exact.argmax(-1)).tolist()
        sampled = len(at) - len(valid.any(1).nonzero())
        with self._lock:
            of_prompt = Compared()
            of_prompt.add(kls[:sampled], same[:sampled])
            self.all.add(kls[:sampled], same[:sampled])
            self.last.add(kls[sampled:], same[sampled:])
            kl = math.inf if of_prompt.undefined else of_prompt.kl.mean
            self._bet_on(0.0 if self._floor is None else self._floor.loss(kl, 1 - of_prompt.same / sampled))

    def _message(self) -> str:
        return (
            f"the next tokens are further from the exact model's than {self._floor} accepts: mean KL "
            f"{self.all.kl.mean:.3g}, same top token {self.all.same / self.all.positions:.3g} at {self.all.positions} "
            "positions; use closer methods, or plan again on what it reads"
        )

    def _log_probabilities(self, inputs: Mapping[str, Any], items: Tensor, at: Tensor) -> Tensor:
        """log p of the next token (rows, V) at these positions of these items."""
        kept, row = at.unique(return_inverse=True)
        if "logits_to_keep" in self._names:
            logits = self._read(inputs, use_cache=False, logits_to_keep=kept).logits
        else:
            logits = self._read(inputs, use_cache=False).logits[:, kept]
        return logits[items, row].float().log_softmax(-1)


def causal_lm_in(module: nn.Module) -> nn.Module | None:
    """The transformers causal language model in a module; None where there is none."""
    return next((part for part in module.modules() if _is_causal_lm(part)), None)


def _is_causal_lm(part: Any) -> bool:
    """Recognised by its class, because transformers is not imported here."""
    can_generate = getattr(type(part), "can_generate", None)
    return can_generate is not None and bool(can_generate()) and not part.config.is_encoder_decoder


def _sampled(valid: Bool[Tensor, "B N"], positions: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Items and positions of real tokens, sampled with replacement, and behind them of each item's last one."""
    item, at = valid.nonzero(as_tuple=True)
    drawn = torch.randint(len(item), (positions,), generator=generator, device="cpu")
    some = valid.any(1).nonzero()[:, 0]
    last = valid.shape[1] - 1 - valid.flip(1).int().argmax(1)
    return torch.cat([item[drawn], some]), torch.cat([at[drawn], last[some]])
