"""A trial of whether a model is right on a part of its tokens, on a few random tokens in one process.

The model runs on all tokens with exact attention, and every layer's queries, keys, values and outputs are kept. Then it
runs on each part alone, and each layer's attention returns its part of what it returned for all, as it would if the
ranks had exchanged keys. The model is right on a part if every layer gets the same queries, keys and values as before,
and what comes out is the same: then only attention mixes tokens, and the positions are those of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from subquad.hf.example_inputs import example_inputs
from subquad.hf.layers import Attached, Layer, head_counts
from subquad.hf.passes import NOT_A_LABEL, OF_TOKENS
from subquad.hf.probe import mark_of_trial
from subquad.hf.split import SplitFit, fill, hooked, takes
from subquad.hf.token_positions import RULES, counted, positions, tokens_of
from subquad.hf.trial import TRIED, attaching, undisturbed
from subquad.masks import Mask
from subquad.methods import BoundMethod, Full

Batch = Mapping[str, Any]
Outputs = Mapping[str, Any]
_KNOWN: WeakKeyDictionary[PreTrainedModel, tuple[str, SplitFit]] = WeakKeyDictionary()
_ROUNDING = 1e-3, 5e-2  # of fp32 and of 16-bit models, relative to the largest number
_REMEDY = "run it on one rank, or swap without `parallel`"


@dataclass
class _Call:
    """Inputs and output of one layer in one call; axes 2 are tokens. `valid` (B,N) marks the real keys."""

    inputs: tuple[Tensor, Tensor, Tensor]
    valid: Tensor
    out: Tensor


class _Recording(Attached):
    """Exact attention that keeps what it is given and gives."""

    calls: list[_Call]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        out = super().forward(query, key, value, **options)
        self.calls.append(_Call((query, key, value), _valid(key, options), out))
        return out


class _Replaying(Attached):
    """Returns a part of what was kept, where the layer is given that part of what it was given."""

    expected: Iterator[_Call]
    part: slice

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        call = next(self.expected, None)
        if options.get("bias") is not None:
            raise ValueError(f"layer {self.label} adds a position bias to its logits")
        if call is None:
            raise ValueError(f"layer {self.label} attends more often on a part of the tokens")
        for name, have, whole in zip(("queries", "keys", "values"), (query, key, value), call.inputs, strict=True):
            if not _near(have, whole[:, :, self.part]):
                raise ValueError(f"layer {self.label} has other {name} on a part of the tokens than on all of them")
        if not torch.equal(_valid(key, options), call.valid[:, self.part]):
            raise ValueError(f"layer {self.label} hides other keys on a part of the tokens than on all of them")
        return call.out[:, :, self.part]


def fit_of(model: PreTrainedModel, layers: list[Layer], inputs: Batch | None = None) -> SplitFit:
    """Find how the model runs on a part of its tokens. Results are kept for as long as the model lives.

    Args:
        model: before anything is swapped in, or after.
        layers: its attention layers.
        inputs: a small batch, where none can be made for this architecture.

    Raises:
        ValueError: it does not, with the first layer or output that differs.
    """
    if getattr(model.config, "layerdrop", None):
        raise ValueError(
            f"{type(model).__name__} leaves layers out at random (layerdrop={model.config.layerdrop:g}), each rank "
            "others; set layerdrop=0 in its config"
        )
    mark = mark_of_trial(model, layers)
    known = _KNOWN.get(model)
    if known is not None and known[0] == mark and inputs is None:
        return known[1]
    fit = _tried(model, layers, inputs)
    _KNOWN[model] = mark, fit
    return fit


def _tried(model: PreTrainedModel, layers: list[Layer], inputs: Batch | None) -> SplitFit:
    """The first rule of positions under which the model is right; ValueError where there is none."""
    wholes = [_run_whole(model, layers, batch) for batch in _batches(model, inputs)]
    rules: tuple[str | None, ...] = RULES if any(takes(part, "position_ids") for part in hooked(model)) else (None,)
    reasons = []
    for rule in rules:
        try:
            dropped = {name for whole in wholes for name in whole.dropped(rule)}
        except (ValueError, RuntimeError) as error:  # also those of the model's own code for unknown positions
            reasons.append(str(error))
            continue
        losses = {whole.loss(rule) for whole in wholes}
        return SplitFit(rule, losses.pop() if len(losses) == 1 else None, tuple(sorted(dropped)))
    if any("for each token" in reason for reason in reasons):
        raise ValueError(f"{type(model).__name__} cannot run on tokens that are split over ranks: {reasons[0]}")
    why = "takes no position_ids, and its positions may be counted from its own input" if rules == (None,) else (
        "is not right under any rule of positions that subquad knows, or mixes tokens outside of attention"
    )  # fmt: skip
    raise ValueError(
        f"{type(model).__name__} cannot run on tokens that are split over ranks: {reasons[0]} (it {why}); {_REMEDY}"
    )


@dataclass
class _Whole:
    """A run of a model on all tokens of a batch."""

    model: PreTrainedModel
    layers: list[Layer]
    batch: dict[str, Any]
    calls: dict[nn.Module, list[_Call]]
    outputs: Outputs
    parts: tuple[slice, ...] = field(default=())

    def dropped(self, rule: str | None) -> set[str]:
        """The outputs that no part has; ValueError where a part differs."""
        names: set[str] = set()
        for part in self.parts:
            outputs = self.run(rule, part, {})
            for number, (name, whole) in enumerate(self.outputs.items()):
                wholes, haves = list(_tensors(whole)), list(_tensors(outputs.get(name)))
                tokens = self.parts[-1].stop
                if len(wholes) != len(haves) or any(x.shape[1:2] != (tokens,) for x in wholes):
                    if number == 0:
                        raise ValueError(
                            f"its output {name!r} is not one for each token, but made of tokens of all ranks: swap "
                            "the model in it (model.base_model), gather the hidden states with of.unshard, and run "
                            "what comes after on them"
                        )
                    names.add(name)
                elif not all(_near(have, x[:, part]) for have, x in zip(haves, wholes, strict=True)):
                    raise ValueError(f"its output {name!r} is another one on a part of the tokens than on all of them")
        return names

    def loss(self, rule: str | None) -> str | None:
        """The kind of the loss, of which parts of the tokens have shares; None if it is not a known kind."""
        main = next(iter(self.outputs.values()))
        if not (takes(self.model, "labels") and isinstance(main, Tensor) and main.ndim == 3):
            return None
        labels = torch.arange(main.shape[0] * main.shape[1], device=main.device).view(main.shape[:2]) % main.shape[2]
        labels[:, 2] = NOT_A_LABEL
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=NOT_A_LABEL)
        try:
            whole = self.run_loss(None, slice(None), {"labels": labels})
        except Exception:  # labels of another kind
            return None
        for kind, counted_labels in (("shifted", shifted), ("plain", labels), ("mean", labels)):
            try:
                shares = [self._share(rule, part, kind, labels, counted_labels) for part in self.parts]
            except Exception:  # a loss with other arguments
                continue
            if whole is not None and None not in shares and _near(sum(shares), whole):
                return kind
        return None

    def _share(self, rule: str | None, part: slice, kind: str, labels: Tensor, all_labels: Tensor) -> Tensor | None:
        total, local = (all_labels != NOT_A_LABEL).sum(), (all_labels[:, part] != NOT_A_LABEL).sum()
        inputs: dict[str, Any] = {"labels": labels[:, part].contiguous()}
        if kind == "shifted":
            inputs["shift_labels"] = all_labels[:, part].contiguous()
        if kind != "mean":
            inputs["num_items_in_batch"] = total
        loss = self.run_loss(rule, part, inputs)
        return loss * local / total if kind == "mean" and loss is not None else loss

    def run_loss(self, rule: str | None, part: slice, inputs: dict[str, Any]) -> Tensor | None:
        """The loss of a part, or of all tokens."""
        return self.run(rule, part, inputs).get("loss")

    def run(self, rule: str | None, part: slice, inputs: dict[str, Any]) -> Outputs:
        """The outputs for a part of the tokens, with the attention of all."""

        def make(layer: Layer) -> Attached:
            made = _Replaying(layer, _full(layer))
            made.expected, made.part = iter(self.calls.get(layer.module, [])), part
            return made

        local = {name: x[:, part].contiguous() if name in OF_TOKENS else x for name, x in self.batch.items()} | inputs
        at = None if rule is None else self._positions(rule)[:, part]
        with _filled(self.model, at), attaching(self.layers, make), undisturbed(self.model, TRIED):
            return _as_dict(self.model(**local))

    def _positions(self, rule: str) -> Tensor:
        valid = counted(rule, self.batch, self.model.config)
        return positions(rule, self.batch, 0, None if valid is None else valid.new_zeros(len(valid)), self.model.config)


def _run_whole(model: PreTrainedModel, layers: list[Layer], batch: Batch) -> _Whole:
    calls: dict[nn.Module, list[_Call]] = {}

    def make(layer: Layer) -> Attached:
        made = _Recording(layer, _full(layer))
        made.calls = calls.setdefault(layer.module, [])
        return made

    with _filled(model, None), attaching(layers, make), undisturbed(model, TRIED):
        outputs = _as_dict(model(**batch))
    N = tokens_of(batch).shape[1]
    parts = slice(0, N // 2), slice(N // 2, N - 1), slice(N - 1, N)
    return _Whole(model, layers, dict(batch), calls, outputs, parts)


def _batches(model: PreTrainedModel, inputs: Batch | None) -> Iterator[Batch]:
    """Small batches: as given, or without padding and with padding on either side."""
    if inputs is not None:
        yield {name: x for name, x in inputs.items() if x is not None}
        return
    plain = example_inputs(model)
    other = sorted(plain.keys() - OF_TOKENS)
    if other or not plain.keys() & {"input_ids", "inputs_embeds"}:
        raise ValueError(
            f"{type(model).__name__} reads {(other or sorted(plain))[0]!r}, but only models of text alone run on "
            f"tokens that are split over ranks; {_REMEDY}"
        )
    yield plain
    for side in ("right", "left"):
        try:
            yield example_inputs(model, padding=side)
        except ValueError:  # a model without a mask
            continue


@contextmanager
def _filled(model: PreTrainedModel, at: Tensor | None) -> Iterator[None]:
    """Give the model positions, and no cache, as `Split` does."""

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        fill(module, kwargs, at)
        return args, kwargs

    hooks = [part.register_forward_pre_hook(enter, with_kwargs=True) for part in hooked(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _full(layer: Layer) -> BoundMethod:
    heads, kv_heads, width = head_counts(layer)
    return BoundMethod(Full(), heads=heads, kv_heads=kv_heads, head_dim=width)


def _valid(key: Tensor, options: Mapping[str, Any]) -> Tensor:
    """The keys that are real by the options of a layer's call."""
    valid: Tensor | None = options.get("valid")
    mask: Mask = options["mask"]
    visible = valid if valid is not None else mask.key_padding(key.shape[2])
    return torch.ones(len(key), key.shape[2], dtype=torch.bool, device=key.device) if visible is None else visible


def _as_dict(outputs: Any) -> Outputs:
    if not isinstance(outputs, ModelOutput):
        raise ValueError(f"its forward pass returns a {type(outputs).__name__}, whose parts have no names")
    return {name: x for name, x in outputs.items() if name == "loss" or next(_tensors(x), None) is not None}


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        yield from chain.from_iterable(map(_tensors, x))


def _near(have: Any, want: Any) -> bool:
    if have.shape != want.shape:
        return False
    finite = want.isfinite()
    exact = want.dtype in (torch.float32, torch.float64)
    apart = (have.float() - want.float()).where(finite, 0.0).abs().amax()
    return bool(apart <= _ROUNDING[not exact] * want.float().where(finite, 0.0).abs().amax().clamp(min=1e-6))
