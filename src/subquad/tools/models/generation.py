"""Time what a request costs after its prompt: each generated token is a step on the cache that the prefill filled.

A request of n new tokens is the prefill, which gives the first of them, and n − 1 steps. The steps of all rows are
timed in rounds on one cache, which exact attention's prefill filled: how long a step takes depends on the number of
tokens in the cache, and not on what they are. The cache forgets each step, so that all steps have the same number of
tokens before them.
"""

import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from subquad.core.errors import InputError
from subquad.core.versions import NAMES_OF_CACHE, name_of_cache
from subquad.methods import BoundMethod, Method
from subquad.methods.core.mixture import is_mixture
from subquad.tools.measure.timing import one_round, stopwatch
from subquad.tools.models.dtypes import short_name
from subquad.tools.models.pretrained import Pretrained, running

NEW_TOKENS = 128  # of a request, by default
SHORTENED = 0.9  # of a prompt, after which steps are timed if the whole of it leaves no positions for new tokens
ROUNDS = 5  # of timing, through all rows
STEPS_IN_ROUND = 2  # of each row: the first is not timed, because methods were just put into the model
LAST = "logits_to_keep"

Run = tuple[Pretrained, Any]  # a model, and the methods that run in it, as `running` takes them


@dataclass
class RowSteps:
    """The steps of one row."""

    seconds: list[float] = field(default_factory=list)  # the times of a step, round by round
    kl: float | None = (
        None  # KL(exact ‖ this) of the next token after one step, in nats; None of exact attention itself
    )
    reason: str | None = None  # the reason why there are no steps


@dataclass
class StepTimes:
    """The steps of all rows after prompts of one length."""

    rows: dict[str, RowSteps]
    cache_mib: dict[str, float]  # the keys and values of the prompts, by the dtype of the model


def new_cache(model: Any, swapped: bool) -> Any:
    """An empty cache for a model with its own attention, or with methods in it: what `generate` makes for both."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def takes_cache(model: Any) -> bool:
    """True if a model can run steps on a cache."""
    return not inspect.signature(model.forward).parameters.keys().isdisjoint(NAMES_OF_CACHE)


def has_exact_steps(method: Method | BoundMethod) -> bool:
    """True if a step on a cache is exact attention by construction.

    It is in the methods that are causal by halves, whose last queries meet every key.
    """
    method = method.method if isinstance(method, BoundMethod) else method
    if is_mixture(method):
        return all(has_exact_steps(part.method) for part in method.parts)
    return method.is_exact or (method.traits.by_halves and getattr(method, "last", 0) > 0)


def new_tokens_after(pretrained: Pretrained, length: int, named: int | None) -> int:
    """The new tokens of a request after a prompt of this length; 0 if no steps are measured there.

    `named` is the user's number. By default they are `NEW_TOKENS`, wherever the model has positions for them after
    `SHORTENED` of the prompt at least.
    """
    new = NEW_TOKENS if named is None else named
    able = pretrained.is_causal_lm and pretrained.group.count == 1 and takes_cache(pretrained.model)
    return new if able and prompt_tokens(pretrained, length, new) >= SHORTENED * length else 0


def prompt_tokens(pretrained: Pretrained, length: int, new_tokens: int) -> int:
    """The tokens of a prompt of this length after which steps are timed, so that the new ones have positions."""
    reach = pretrained.reach_after(length)
    return length if reach is None else min(length, reach - new_tokens)


def check_new_tokens(pretrained: Pretrained, named: int | None, lengths: Sequence[int]) -> None:
    """Check that the model can generate the tokens that the user asks for, after prompts of these lengths.

    Raises:
        InputError: it cannot.
    """
    if not named:
        return
    option, longest = f"--new-tokens {named}", max(lengths)
    limit = pretrained.reach_after(longest)
    if not pretrained.is_causal_lm:
        raise InputError(f"{option} is for causal language models, and {pretrained.name} is a {pretrained.kind}")
    if pretrained.group.count > 1:
        raise InputError(
            f"{option} needs a cache, which tokens split over {pretrained.group.count} processes do not have; give "
            "--new-tokens 0, or leave torchrun out"
        )
    if not takes_cache(pretrained.model):
        raise InputError(f"{option} needs a cache, which {pretrained.name} does not take; give --new-tokens 0")
    if limit is not None and prompt_tokens(pretrained, longest, named) < SHORTENED * longest:
        shorter = f"--lengths of at most {limit - named:,}, or " if named < limit else ""
        raise InputError(
            f"{option} after a prompt of {longest:,} tokens makes {longest + named:,}, past the {limit:,} positions of "
            f"{pretrained.name}; give {shorter}fewer new tokens"
        )


def request_seconds(prefills: Sequence[float], step: float, new_tokens: int) -> list[float]:
    """Seconds of a whole request for each prefill, from those of one step.

    >>> request_seconds([1.0, 1.5], step=0.25, new_tokens=3)
    [1.5, 2.0]
    """
    return [prefill + (new_tokens - 1) * step for prefill in prefills]


class Prompts:
    """Prompts in a model's cache, and one token after them."""

    def __init__(self, pretrained: Pretrained, items: Sequence[Sequence[int]], cache: Any):
        self.model = pretrained.model
        self.options = set(inspect.signature(self.model.forward).parameters)
        self.name_of_cache = name_of_cache(self.model.forward)
        ids, self.visible = _left_padded(pretrained, items)
        self.cache = cache
        with running(self.model, None):
            self.token = self._run(ids)[:, -1:].argmax(-1)
            self.cache_mib = _bytes_of(self.cache) / 2**20
            self.visible = F.pad(self.visible, (0, 1), value=1)
            self._run(self.token)  # a cache that grows in large pieces has room for the next token now
        self.visible = F.pad(self.visible, (0, 1), value=1)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Let the cache be as it was after the block. Keys and values are not copied: steps add to them elsewhere."""
        before = [_state_of(layer) for layer in self.cache.layers]
        try:
            yield
        finally:
            for layer, state in zip(self.cache.layers, before, strict=True):
                vars(layer).clear()
                vars(layer).update(state)

    def step(self) -> Float[Tensor, "B V"]:
        """The logits after one more token, which joins the cache."""
        return self._run(self.token)[:, -1].double()  # for differences far below those of fp32

    def timed_step(self) -> tuple[float, Float[Tensor, "B V"]]:
        """The seconds of a step that the cache forgets, and its logits."""
        with self.forgetting():
            return stopwatch(self.step, self.model.device)

    def _run(self, ids: Tensor) -> Tensor:
        more: dict[str, Any] = {self.name_of_cache: self.cache}
        if LAST in self.options:
            more[LAST] = 1
        if "position_ids" in self.options:
            more["position_ids"] = (self.visible.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return self.model(input_ids=ids, attention_mask=self.visible, use_cache=True, **more).logits


@torch.inference_mode()
def time_steps(
    runs: Mapping[str, Run], items: Sequence[Sequence[int]], draw: random.Random, rounds: int = ROUNDS
) -> StepTimes:
    """Seconds of a step after these prompts, of every row in each round, and how close the steps are to exact ones.

    Each round has an order of its own. Rows of one model with caches of one type share the prompts.
    """
    by_cache: dict[tuple[int, type], Prompts] = {}
    exact, sizes = dict[int, Tensor](), dict[str, float]()
    rows, steps = {name: RowSteps() for name in runs}, dict[str, partial[tuple[float, None] | None]]()
    for name, (model, methods) in runs.items():
        cache = new_cache(model.model, swapped=methods is not None)
        at = id(model), type(cache)
        if at not in by_cache:
            by_cache[at] = Prompts(model, items, cache)
        prompts = by_cache[at]
        sizes.setdefault(short_name(model.model.dtype), prompts.cache_mib)
        if at[0] not in exact:
            with running(model.model, None):
                exact[at[0]] = prompts.timed_step()[1].log_softmax(-1)
        steps[name] = partial(_second_step, rows[name], prompts, methods, exact[at[0]])
    for _ in range(rounds):
        for name, seconds in one_round(steps, lambda step: step(), draw)[0].items():
            rows[name].seconds.append(seconds)
    return StepTimes(rows, sizes)


def _second_step(row: RowSteps, prompts: Prompts, methods: Any, exact: Tensor) -> tuple[float, None] | None:
    """Seconds of the second step of a row in a round; None from the round on in which it is refused."""
    if row.reason is not None:
        return None
    with running(prompts.model, methods):
        try:
            _, logits = prompts.timed_step()
        except ValueError as refusal:
            row.reason = " ".join(str(refusal).split())
            return None
        if not row.seconds and methods is not None:
            kl = F.kl_div(logits.log_softmax(-1), exact, reduction="none", log_target=True).sum(-1).mean()
            row.kl = max(float(kl), 0.0)
        return prompts.timed_step()[0], None


def _left_padded(pretrained: Pretrained, items: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The ids of prompts and the mask of their tokens, padded on the left, as generation needs them."""
    batch = pretrained.batch(items)
    shifts = [batch["input_ids"].shape[1] - len(item) for item in items]
    ids, mask = (
        torch.stack([row.roll(shift) for row, shift in zip(batch[name], shifts, strict=True)])
        for name in ("input_ids", "attention_mask")
    )
    return ids, mask


def _state_of(layer: Any) -> dict[str, Any]:
    """The attributes of a layer of a cache, which do not change with it.

    Steps change states of a fixed size in place, and dicts of them, as in layers of linear attention and convolutions.
    """
    return {name: each if name in ("keys", "values") else _kept(each) for name, each in vars(layer).items()}


def _kept(attribute: Any) -> Any:
    if isinstance(attribute, dict):
        return {key: _kept(each) for key, each in attribute.items()}
    return attribute.clone() if isinstance(attribute, Tensor) else attribute


def _bytes_of(cache: Any) -> int:
    """The bytes of the keys and values in a cache."""
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(each.nbytes for each in tensors if isinstance(each, Tensor))
