"""The next-token distributions of a causal language model, compared with those of the exact model.

A prefill, as `generate` runs it, computes the logits of the last token alone, and is timed so. The logits of all
positions are made from its last hidden states afterwards, for some positions at a time: all at once would be N·V.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.measure.prefix import giving

POSITIONS = 512  # whose logits are in memory at a time
LAST = 4  # the last quarter of an item's positions is counted apart: what is read there has the most text before it
QUARTERS = 4  # in which perplexities show whether a model bears a length


@dataclass(frozen=True)
class Prefill:
    """The result of a prefill: the last hidden states, or the logits of models that have none apart."""

    states: Float[Tensor, "B N width"]
    head: Callable[[Tensor], Tensor] | None = None  # from hidden states to logits; None: these are logits
    valid: Bool[Tensor, "B M"] | None = None  # True for positions of the whole prompts that are not padding

    def every(self, step: int) -> "Prefill":
        """One of each `step` positions, the last one among them."""
        valid = None if self.valid is None else one_of_each(step, self.valid)
        return replace(self, states=one_of_each(step, self.states), valid=valid)


@dataclass
class NextTokens:
    """Sums over the positions of some texts whose next token is known. KL(exact ‖ this) and losses are in nats."""

    count: float = 0.0
    nll: float = 0.0  # negative log-likelihood of the next token
    kl: float = 0.0
    same: float = 0.0  # positions at which the most likely token is the exact model's
    last_count: float = 0.0  # the same, over the last quarter of each text
    last_kl: float = 0.0
    last_same: float = 0.0

    def __add__(self, other: "NextTokens") -> "NextTokens":
        return NextTokens(*(a + b for a, b in zip(self.sums(), other.sums(), strict=True)))

    def sums(self) -> tuple[float, ...]:
        """All of them, in the order of the fields."""
        return self.count, self.nll, self.kl, self.same, self.last_count, self.last_kl, self.last_same

    @property
    def perplexity(self) -> float:
        """e to the mean negative log-likelihood of the next token."""
        return math.exp(self.nll / self.count)

    @property
    def mean_kl(self) -> float:
        """Mean KL(exact ‖ this) in nats, 0 where rounding makes it less."""
        return max(self.kl / self.count, 0.0)

    @property
    def agreement(self) -> float:
        """Share of the positions with the exact model's most likely token."""
        return self.same / self.count


def prefill(model: Any, batch: dict[str, Tensor], all_logits: bool = False, cached: bool = False) -> Prefill:
    """Run a causal language model over whole prompts, with the logits of the last token alone where it can do that.

    `cached`: fill a cache, as generation does.
    """
    if all_logits or not _has_states(model):
        return Prefill(model(**batch, use_cache=cached).logits)
    calls: list[Any] = []
    modules = dict.fromkeys((model.get_decoder(), model.base_model))  # OPT calls the first alone, others the second
    hooks = [
        each.register_forward_hook(lambda module, _inputs, output: calls.append((module, output))) for each in modules
    ]
    try:
        model(**batch, use_cache=cached, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    layers, output = calls[-1]  # the outer one
    return Prefill(output[0], partial(_logits_after, model, layers, type(output)))


def one_of_each(step: int, positions: Shaped[Tensor, "B N ..."]) -> Shaped[Tensor, "B n ..."]:
    """One of each `step` positions, the last one among them."""
    return positions[:, (positions.shape[1] - 1) % step :: step]


def _has_states(model: Any) -> bool:
    return model.base_model is not model and "logits_to_keep" in inspect.signature(model.forward).parameters


def logits_of(run: Prefill, positions: slice) -> Float[Tensor, "B n V"]:
    """The logits of some positions."""
    states = run.states[:, positions]
    return (states if run.head is None else run.head(states)).float()


def _logits_after(model: Any, layers: Any, output: Any, states: Float[Tensor, "B n width"]) -> Tensor:
    """The model's own forward pass, in which its layers give these hidden states, in an `output` of theirs."""
    with giving(layers, output(last_hidden_state=states)):
        tokens = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits


@torch.inference_mode()
def differences(
    runs: dict[str, Prefill],
    exact: str,
    tokens: Int64[Tensor, "B N"],
    counted: Bool[Tensor, "B N"],
    group: MeasuringGroup = ALONE,
) -> dict[str, NextTokens]:
    """Each run's next-token distributions against those of the run named `exact`.

    Args:
        tokens: the next token of each position.
        counted: the positions that have one.
        group: the processes that have the positions between them.
    """
    total, last = tokens.shape[1], _last_quarter(counted)
    tokens, counted, last = group.cut(tokens), group.cut(counted), group.cut(last)
    sums = {name: torch.zeros(7, dtype=torch.float64) for name in runs}
    for start in range(0, min(total, tokens.shape[1]), POSITIONS):
        at = slice(start, start + POSITIONS)
        its = logits_of(runs[exact], at).log_softmax(-1)
        top = its.argmax(-1)
        for name, run in runs.items():
            mine = its if name == exact else logits_of(run, at).log_softmax(-1)
            kl = F.kl_div(mine, its, reduction="none", log_target=True).sum(-1)
            nll = -mine.gather(-1, tokens[:, at, None])[..., 0]
            terms = torch.stack([torch.ones_like(kl), nll, kl, (mine.argmax(-1) == top).to(kl)]).double()
            of_all = torch.where(counted[:, at], terms, 0.0).sum((1, 2))
            of_last = torch.where(last[:, at], terms, 0.0).sum((1, 2))[[0, 2, 3]]
            sums[name] += torch.cat([of_all, of_last]).cpu()
    return {name: NextTokens(*group.sums(*each.tolist())) for name, each in sums.items()}


@torch.inference_mode()
def quarter_sums(
    run: Prefill, tokens: Int64[Tensor, "B N"], counted: Bool[Tensor, "B N"], group: MeasuringGroup = ALONE
) -> list[float]:
    """The sums of negative log-likelihoods in the quarters of each text, and how many positions these have: 4 and 4.

    Arguments as in `differences`.
    """
    number = counted.cumsum(1) - 1
    quarter = (QUARTERS * number // number[:, -1:].add(1).clamp(min=1)).clamp(0, QUARTERS - 1)
    tokens, counted, quarter = group.cut(tokens), group.cut(counted), group.cut(quarter)
    sums = torch.zeros(2, QUARTERS, dtype=torch.float64)
    for start in range(0, tokens.shape[1], POSITIONS):
        at = slice(start, start + POSITIONS)
        nll = -logits_of(run, at).log_softmax(-1).gather(-1, tokens[:, at, None])[..., 0].double()
        for each in range(QUARTERS):
            here = counted[:, at] & (quarter[:, at] == each)
            sums[:, each] += torch.stack([nll.where(here, 0.0).sum(), here.sum().double()]).cpu()
    return list(group.sums(*sums.flatten().tolist()))


def quarter_perplexities(parts: Sequence[Sequence[float]]) -> list[float]:
    """The perplexity of each quarter, from the sums of some texts as `quarter_sums` gives them."""
    sums = [sum(each) for each in zip(*parts, strict=True)]
    return [math.exp(nll / max(count, 1.0)) for nll, count in zip(sums[:QUARTERS], sums[QUARTERS:], strict=True)]


def _last_quarter(counted: Bool[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    number = counted.cumsum(1)
    return counted & (number > number[:, -1:] - number[:, -1:] // LAST)


def next_of(batch: dict[str, Tensor]) -> tuple[Int64[Tensor, "B N"], Bool[Tensor, "B N"]]:
    """The next token of each position, and which positions have one."""
    following = [F.pad(x[:, 1:], (0, 1)) for x in (batch["input_ids"], batch["attention_mask"])]
    return following[0], following[1].bool()


def summed(parts: Sequence[NextTokens]) -> NextTokens:
    """Over all texts."""
    return sum(parts, NextTokens())
