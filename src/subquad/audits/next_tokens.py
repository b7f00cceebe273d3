"""How far the next tokens of a causal language model are from the exact model's, on a sample of its prompts.

A sampled prompt is read twice more, with the methods of its layers and with exact attention in all of them. The two
next-token distributions p_exact and p are compared at sampled positions, and at the last one:

    KL(exact ‖ method) = Σ_t p_exact(t) · (log p_exact(t) − log p(t))      in nats
    same top token     = [argmax p_exact = argmax p]
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor, nn

from subquad.audits.passes import running_exactly, running_method, uncounted
from subquad.audits.report import LARGEST, NextTokenReport
from subquad.audits.sampling import OneOfEvery
from subquad.audits.statistics import Betting, RunningMoments, mean_upper, share_upper
from subquad.kernels.transforms import transform

logger = logging.getLogger("subquad.audit")

LEFT_OUT = ("past_key_values", "cache_position", "labels", "use_cache", "logits_to_keep", "return_dict")


@dataclass(frozen=True)
class NextTokenFloor:
    """The largest mean KL in nats, or else the least share of exact top tokens."""

    max_kl: float | None = None
    min_agreement: float | None = None

    def betting(self) -> Betting:
        """The test of the floor: evidence that the expected loss of a prompt is above what is accepted."""
        return Betting(0.0, self.max_kl if self.max_kl is not None else 1.0 - (self.min_agreement or 0.0))

    def loss(self, kl: float, different: float) -> float:
        """The loss of a prompt in [0, 1], from its means: KL, at most 1 nat, or the share of other top tokens."""
        return min(kl, 1.0) if self.max_kl is not None else different

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


class PromptWatch:
    """Compares one prompt of every `every` that a causal language model reads, at a random place in each such block."""

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        positions: int,
        floor: NextTokenFloor | None,
        false_alarm: float,
        seed: int,
    ):
        self._model, self._positions, self._floor = model, positions, floor
        self._names = list(inspect.signature(model.forward).parameters)
        self._picked, self._lock = OneOfEvery(every, seed), threading.Lock()
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._bet, self._alarm_at = None if floor is None else floor.betting(), 1 / false_alarm
        self._alarmed = False
        self._handle: Any = None
        self.prompts = self.audited = self.skipped = 0
        self.all, self.last = Compared(), Compared()

    def start(self) -> None:
        """Watch the model's calls."""
        self._handle = self._model.register_forward_pre_hook(self._before, with_kwargs=True)

    def stop(self) -> None:
        """Leave the model alone."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def report(self, delta: float) -> NextTokenReport:
        """The results so far, with bounds at confidence 1 − δ."""
        with self._lock:
            every, kl = self.all, self.all.kl
            bound = None
            if kl.largest <= LARGEST and not every.undefined:
                bound = mean_upper(kl.mean, kl.variance, kl.count, delta, LARGEST)
            different = every.positions - every.same
            return NextTokenReport(
                prompts=self.prompts,
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
                evidence=None if self._bet is None else self._bet.peak,
                alarm=None if self._bet is None else self._bet.peak >= self._alarm_at,
            )

    @torch.compiler.disable(reason="an audited model is not compiled: it counts prompts, and reads some again")  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = dict(zip(self._names, args, strict=False)) | kwargs
        if uncounted() or not _is_prompt(inputs):
            return
        with self._lock:
            picked = self._picked(self.prompts)
            self.prompts += 1
        if not picked:
            return
        valid = _valid(inputs)
        if module.training or transform() is not None or valid is None or not valid.any():
            with self._lock:
                self.skipped += 1
            return
        with self._lock:
            items, at = _sampled(valid, self._positions, self._generator)
        self._compare(inputs, items, at, count_of_last=len(valid.any(1).nonzero()))

    def _compare(self, inputs: Mapping[str, Any], items: Tensor, at: Tensor, count_of_last: int) -> None:
        """Read a prompt again, twice, and add what the positions say; those of the last tokens come last."""
        with torch.no_grad(), running_method():
            mine = self._log_probabilities(inputs, items, at)
        with torch.no_grad(), running_exactly():
            exact = self._log_probabilities(inputs, items, at)
        kls = F.kl_div(mine, exact, reduction="none", log_target=True).sum(-1).tolist()
        same, sampled = (mine.argmax(-1) == exact.argmax(-1)).tolist(), len(at) - count_of_last
        with self._lock:
            self.audited += 1
            of_prompt = Compared()
            of_prompt.add(kls[:sampled], same[:sampled])
            self.all.add(kls[:sampled], same[:sampled])
            self.last.add(kls[sampled:], same[sampled:])
            if self._bet is not None and self._floor is not None:
                kl = 1.0 if of_prompt.undefined else of_prompt.kl.mean
                self._bet.add(self._floor.loss(kl, 1 - of_prompt.same / sampled))
            alarm = not self._alarmed and self._bet is not None and self._bet.peak >= self._alarm_at
            self._alarmed |= alarm
        if alarm:
            logger.warning(
                "the next tokens are further from the exact model's than %s accepts: mean KL %.3g, same top token %.3g "
                "at %d positions (evidence %.3g, alarm at %.3g); use closer methods, or plan again on what it reads",
                *(self._floor, self.all.kl.mean, self.all.same / self.all.positions, self.all.positions),
                *(self._bet.peak if self._bet else 1.0, self._alarm_at),
            )

    def _log_probabilities(self, inputs: Mapping[str, Any], items: Tensor, at: Tensor) -> Tensor:
        """log p of the next token (rows, V) at these positions of these items."""
        kept, row = at.unique(return_inverse=True)
        options = {name: value for name, value in inputs.items() if name not in LEFT_OUT}
        if "logits_to_keep" in self._names:
            logits = self._model(**options, use_cache=False, logits_to_keep=kept).logits
        else:
            logits = self._model(**options, use_cache=False).logits[:, kept]
        return logits[items, row].float().log_softmax(-1)


def causal_lm_in(module: nn.Module) -> nn.Module | None:
    """The transformers causal language model in a module; None where there is none."""
    return next((part for part in module.modules() if _is_causal_lm(part)), None)


def _is_causal_lm(part: Any) -> bool:
    """Recognised by its class, because transformers is not imported here."""
    can_generate = getattr(type(part), "can_generate", None)
    return can_generate is not None and bool(can_generate()) and not part.config.is_encoder_decoder


def _tokens(inputs: Mapping[str, Any]) -> Tensor | None:
    return next((inputs[n] for n in ("input_ids", "inputs_embeds") if inputs.get(n) is not None), None)


def _is_prompt(inputs: Mapping[str, Any]) -> bool:
    """Whether a call reads more than one token and continues no cache."""
    tokens, past = _tokens(inputs), inputs.get("past_key_values")
    if tokens is None or tokens.ndim < 2 or tokens.shape[1] < 2:
        return False
    return past is None or not int(past.get_seq_length())


def _valid(inputs: Mapping[str, Any]) -> Bool[Tensor, "B N"] | None:
    """The real tokens; None where a mask of another shape does not say it."""
    tokens, mask = _tokens(inputs), inputs.get("attention_mask")
    assert tokens is not None
    if mask is None:
        return torch.ones(tokens.shape[:2], dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape[:2]:
        return None
    return mask.cpu().bool()


def _sampled(valid: Bool[Tensor, "B N"], positions: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Items and positions of real tokens, sampled with replacement, and behind them of each item's last one."""
    item, at = valid.nonzero(as_tuple=True)
    drawn = torch.randint(len(item), (positions,), generator=generator)
    some = valid.any(1).nonzero()[:, 0]
    last = valid.shape[1] - 1 - valid.flip(1).int().argmax(1)
    return torch.cat([item[drawn], some]), torch.cat([at[drawn], last[some]])
