"""The inputs of one length that a plan is measured on, their model, and how far outputs are from exact."""

import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad import hf
from subquad.core.errors import InputError
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.measure.fidelity import cosine
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.measure.metrics import Judge
from subquad.tools.measure.module_calls import device_of
from subquad.tools.measure.prefix import Chain, chain
from subquad.tools.models.generation import StepTimes, new_tokens_after, prompt_tokens, time_steps
from subquad.tools.models.next_tokens import POSITIONS, Prefill, differences, one_of_each
from subquad.tools.models.passages import FEWEST_PASSAGES, TokenizedText
from subquad.tools.models.pretrained import Pretrained, running
from subquad.tools.plan.effort import MOST, divided
from subquad.tools.plan.schema import BatchSizes
from subquad.tools.plan.subject import PlanSubject
from subquad.tools.runs.floor import Figure

Batch = list[list[int]]  # token ids of texts that are read together, special tokens included
Loss = Callable[[Any, Any], float]  # of an output, and of the exact model's; 0 if they are equal
TOKENS = 12_288  # of the passages on which losses are measured
FEWEST = 3  # passages for losses
SAMPLED_POSITIONS = 128  # of a passage, whose next tokens the losses of single layers compare
ROUNDING = 1e-3  # of a metric that compares an output with itself
GROUPS = 3  # lengths that are planned for a text's batches, at most
HELD_OUT = 8  # passages to verify on, at least; and at least twice as many as for losses


@dataclass(frozen=True)
class PlanInputs(PlanSubject):
    """Inputs of one length for one model."""

    length: int
    model: Any
    run: Callable[[Any], Any]  # one input through the model
    loss: Loss
    items: Sequence[Any]  # the inputs on which losses are measured
    held_out: Sequence[Any]  # the inputs on which the plan is verified
    group: MeasuringGroup = ALONE  # the processes that split the tokens of an input
    may_be_binary: bool = False  # whether the loss is of the user's metric or score, which may be right or wrong
    sampled_loss: Loss | None = None  # a cheaper estimate of the loss, for single layers
    pooling: str | None = None  # the pooling of embeddings whose cosine is the loss; None for other losses
    new_tokens: int = 0  # new tokens of a request after an input; 0: no steps are timed
    steps: Callable[[Any, Mapping[str, Any]], StepTimes] | None = (
        None  # after an input, with several choices of methods
    )
    batches: BatchSizes | None = None  # sizes of batches of texts with lengths of their own; None if all have one

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return device_of(hf.transformers_model(self.model))

    def running(self, methods: Any) -> AbstractContextManager[None]:
        """Run methods, as `hf.swap` takes them, in the model; its own attention if it is None."""
        return running(self.model, methods, self.group)

    def recorded(self) -> AbstractContextManager[list[LayerInputs]]:
        """Collect the inputs of every attention call inside."""
        return recorded(self.model, self.group)

    def chain(self) -> Chain | None:
        """The blocks of the model, if they are a chain."""
        return chain(self.model, hf.find_layers(self.model))

    @property
    def noun(self) -> str:
        """The name of the inputs in reports."""
        return "passages" if self.batches is None else "batches"

    @property
    def single_loss(self) -> Loss:
        """The loss of outputs with a method in single layers."""
        return self.sampled_loss or self.loss


def text_load(
    pretrained: Pretrained,
    reading: TokenizedText,
    length: int,
    figure: Figure = "fidelity",
    new_tokens: int | None = None,
) -> PlanInputs:
    """Passages of exactly `length` tokens of a text: a third of them or fewer for losses, the others held out.

    Raises:
        InputError: the text has fewer than five passages of that length.
    """
    content = length - len(pretrained.wrap([], length))
    if content < 1:
        raise InputError(f"a length of {length} leaves no token besides the special ones")
    few, wanted = _counts(length)
    count = min(wanted, len(reading.tokens) // content)
    if count < FEWEST_PASSAGES:
        raise InputError(
            f"the text has {len(reading.tokens):,} tokens, which is less than five passages of {length:,}; a plan for "
            "that length needs two to measure and three to verify on: give more text, or shorter --lengths"
        )
    items, held_out = divided(reading.sequences(pretrained, length, count), few)
    return _inputs(pretrained, length, [[item] for item in items], [[item] for item in held_out], figure, new_tokens)


def batch_load(
    pretrained: Pretrained,
    batches: Sequence[Batch],
    shorter: int,
    length: int,
    figure: Figure,
    new_tokens: int | None = None,
) -> PlanInputs:
    """Batches that are padded to more than `shorter` and at most `length` tokens: few for losses, the others held out.

    The widest of those for losses is the first, on which times are measured.

    Raises:
        InputError: there are fewer than five such batches.
    """
    size = len(batches[0])
    batches = [batch for batch in batches if padded_length(batch) > shorter]
    if len(batches) < FEWEST_PASSAGES:
        raise InputError(
            f"{len(batches)} batches of {size} of the text are padded to {shorter + 1:,} to {length:,} tokens, but a "
            "plan for that length needs five: two to measure and three to verify on; give more text, a smaller --batch "
            "or --lengths from-text"
        )
    few, wanted = _counts(size * length)
    items, held_out = divided(batches[:wanted], few)
    items.sort(key=padded_length, reverse=True)
    tokens = statistics.fmean(len(text) for batch in held_out for text in batch)
    sizes = BatchSizes(batch=size, tokens=tokens, padded=statistics.fmean(map(padded_length, held_out)))
    return replace(_inputs(pretrained, length, items, held_out, figure, new_tokens), batches=sizes)


def batches_by_length(batches: Sequence[Batch]) -> dict[int, list[Batch]]:
    """Batches in up to three groups of about equal numbers, by the most tokens to which a batch of a group is padded.

    Each group has five batches or more, if there are five. Batches keep their order.
    """
    widths = sorted(map(padded_length, batches))
    size, groups, before, begin = max(len(widths) // GROUPS, FEWEST_PASSAGES), {}, 0, 0
    while begin < len(widths):
        length = widths[min(begin + size, len(widths)) - 1]
        end = bisect_right(widths, length)
        if len(widths) - end < FEWEST_PASSAGES:
            length, end = widths[-1], len(widths)
        groups[length] = [batch for batch in batches if before < padded_length(batch) <= length]
        before, begin = length, end
    return groups


def padded_length(batch: Batch) -> int:
    """The number of tokens to which a batch is padded: those of its longest text."""
    return max(map(len, batch))


def _counts(tokens: int) -> tuple[int, int]:
    """The number of inputs of this many tokens that losses are measured on, and the number with those held out."""
    few = min(max(TOKENS // tokens, FEWEST), MOST)
    return few, few + max(2 * few, HELD_OUT)


def _inputs(
    pretrained: Pretrained,
    length: int,
    items: list[Batch],
    held_out: list[Batch],
    figure: Figure,
    new_tokens: int | None,
) -> PlanInputs:
    """Batches of a text model, and their losses."""
    model, new = pretrained.reaching(length), new_tokens_after(pretrained, length, new_tokens)
    prompt = prompt_tokens(pretrained, length, new)
    return PlanInputs(
        length=length,
        model=model.model,
        run=model.forward,
        loss=loss_of(model, figure),
        items=items,
        held_out=held_out,
        group=pretrained.group,
        sampled_loss=next_token_loss(model, figure, SAMPLED_POSITIONS) if model.is_causal_lm else None,
        pooling=pretrained.pooling if pretrained.kind == "embedding" else None,
        new_tokens=new,
        steps=partial(_steps, model, prompt) if new else None,
    )


def _steps(model: Pretrained, most: int, item: Batch, choices: Mapping[str, Any]) -> StepTimes:
    """Generated tokens after at most `most` tokens of each text of a batch, with each choice of methods in turn."""
    runs = {name: (model, methods) for name, methods in choices.items()}
    return time_steps(runs, [text[:most] for text in item], random.Random(0))


def cosine_loss(output: Tensor, exact: Tensor) -> float:
    """1 − cosine of the embeddings."""
    return float(1 - cosine(output, exact).mean())


def perplexity_loss(output: tuple[float, int], exact: tuple[float, int]) -> float:
    """1 − the exact model's perplexity divided by this one's, of (sum of negative log-likelihoods, tokens)."""
    return -math.expm1(exact[0] / exact[1] - output[0] / output[1])


def loss_of(pretrained: Pretrained, figure: Figure) -> Loss:
    """The loss of a text model of this kind."""
    if pretrained.is_causal_lm:
        return next_token_loss(pretrained, figure)
    return cosine_loss if pretrained.kind == "embedding" else perplexity_loss


def next_token_loss(pretrained: Pretrained, figure: Figure, positions: int = POSITIONS) -> Loss:
    """1 − e^{−KL} of next-token distributions, or under the figure "agreement" the share of other top tokens.

    At most `positions` of a text are compared, evenly spaced and without padding: the logits of all of them would take
    longer than the layers do.
    """

    def loss(output: Prefill, exact: Prefill) -> float:
        assert exact.valid is not None
        # Of split tokens, a process has its own.
        step = -(-exact.valid.shape[1] // positions) if pretrained.group.count == 1 else 1
        runs = {"exact": exact.every(step)} | ({} if output is exact else {"this": output.every(step)})
        counted = one_of_each(step, exact.valid)
        compared = differences(runs, "exact", torch.zeros_like(counted, dtype=torch.long), counted, pretrained.group)
        mine = compared.get("this", compared["exact"])
        return 1.0 - mine.agreement if figure == "agreement" else -math.expm1(-mine.mean_kl)

    return loss


# ---------------------------------------------------------------------- of a module of the user's


def input_loads(model: Any, inputs: Sequence[Any], judge: Judge | None) -> list[PlanInputs]:
    """Loads of inputs that a module takes as keywords, grouped by the number of tokens that attention sees.

    Raises:
        ValueError: there are fewer than five inputs of a length.
    """
    inputs = list(inputs)
    if not inputs:
        raise ValueError("there are no inputs to plan on; give five or more of each length")
    if not all(isinstance(item, Mapping) for item in inputs):
        kind = next(type(item).__name__ for item in inputs if not isinstance(item, Mapping))
        raise TypeError(f"an input is a mapping of the model's keywords to tensors, got {kind}")
    run = partial(_run, model, judge)
    tokens: dict[Any, int] = {}  # by the shapes of an input: counting them takes a pass
    groups: dict[int, list[Any]] = {}
    for item in inputs:
        shapes = tuple((name, value.shape if isinstance(value, Tensor) else None) for name, value in item.items())
        if shapes not in tokens:
            tokens[shapes] = _tokens(model, item)
        groups.setdefault(tokens[shapes], []).append(item)
    for length, items in groups.items():
        if len(items) < FEWEST_PASSAGES:
            raise ValueError(
                f"{len(items)} inputs have {length:,} tokens, but a plan needs five of each length: two to measure "
                "and three to verify on"
            )
    measure = output_loss if judge is None else score_loss if judge.is_score else partial(metric_loss, judge)
    pooling = "mean" if measure is output_loss and not _has_logits(model) else None
    loads, binary = [], judge is not None and judge.may_be_binary
    for length, items in sorted(groups.items()):
        few, held_out = divided(items, MOST)
        loads.append(PlanInputs(length, model, run, measure, few, held_out, may_be_binary=binary, pooling=pooling))
    return loads


@torch.inference_mode()
def _run(model: Any, judge: Judge | None, item: Mapping[str, Any]) -> Any:
    """The output of the model on an input, together with both; or its score."""
    inner = hf.transformers_model(model)
    output = inner(**item)
    if judge is not None and judge.is_score:
        return judge.number(output, item)
    return _Read(output, item, inner)


@dataclass(frozen=True)
class _Read:
    output: Any
    item: Mapping[str, Any]
    model: Any

    def weights(self, rows: Tensor) -> Tensor:
        """0 for each row (batch, tokens, …) of the output that is padding, 1 for the others.

        Of a decoder, its own mask counts, and of speech that of the frames. All rows count where no mask is of them.
        """
        decodes = getattr(self.output, "encoder_last_hidden_state", None) is not None
        mask = self.item.get("decoder_attention_mask" if decodes else "attention_mask")
        of_frames = getattr(self.model, "_get_feature_vector_attention_mask", None)
        if isinstance(mask, Tensor) and of_frames is not None and mask.shape != rows.shape[:2]:
            mask = of_frames(rows.shape[1], mask)
        if isinstance(mask, Tensor) and mask.shape == rows.shape[:2]:
            return mask.to(rows)
        return torch.ones(rows.shape[:2]).to(rows)


def metric_loss(judge: Judge, read: _Read, exact: _Read) -> float:
    """1 − the metric, less what rounding leaves of that for the exact output itself.

    Raises:
        InputError: the metric is not 1 for the exact output.
    """
    most = judge.number(exact.output, exact.output)
    if not abs(most - 1) < ROUNDING:
        raise InputError(
            f"{judge.name} is {most:g} for an exact output compared with itself, but a plan needs a metric that is 1 "
            "there and smaller for outputs that are further away, such as 1 − error"
        )
    return most - judge.number(read.output, exact.output)


def output_loss(read: Any, exact: Any) -> float:
    """1 − cosine of the mean last hidden states, or the mean divergence KL(exact ‖ this) of the logits in nats.

    Rows of padding have no part in a mean.
    """
    mine, its = (x.output if isinstance(x, _Read) else x for x in (read, exact))
    weights_of = exact.weights if isinstance(exact, _Read) else lambda rows: torch.ones(rows.shape[:2]).to(rows)
    if getattr(its, "logits", None) is not None:
        p, q = (x.logits.double().log_softmax(-1) for x in (its, mine))
        kl = (p.exp() * (p - q)).sum(-1)
        if p.ndim != 3:
            return float(kl.mean())
        weights = weights_of(p)
        return float((kl * weights).sum() / weights.sum())
    pooled = []
    for x in (mine, its):
        hidden = x.last_hidden_state if hasattr(x, "last_hidden_state") else x[0]
        weights = weights_of(hidden)[..., None]
        pooled.append((hidden * weights).sum(1) / weights.sum(1))
    return cosine_loss(pooled[0], pooled[1])


def score_loss(value: float, exact: float) -> float:
    """The loss of a score, of which more is better."""
    return exact - value


def _has_logits(model: Any) -> bool:
    """True if a model has a head, so that its output is compared by its logits."""
    inner = hf.transformers_model(model)
    return inner.base_model is not inner


def _tokens(model: Any, item: Mapping[str, Any]) -> int:
    """The number of queries of the first attention layer for an input."""
    inner = hf.transformers_model(model)
    with torch.inference_mode(), recorded(inner) as calls:
        inner(**item)
    if not calls:
        raise ValueError("no attention layer of the model was called for an input")
    return int(calls[0].query.shape[2])
