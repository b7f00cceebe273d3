"""A swapped model on tokens that are split over ranks.

Before each forward pass every rank sends all others a few numbers (`passes.PassMetadata`). From these come the
sequence, the positions of this rank's tokens and its share of the loss. For a model to be right on a part of its
tokens, everything in it but attention must treat each token by itself, given its position: `split_trial` finds that
out when the model is swapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from subquad.distributed import Ranks, Sequence
from subquad.distributed.shares import even_shares
from subquad.hf.passes import MARK, NOT_A_LABEL, NOW, OF_TOKENS, Pass, PassMetadata, check_metadata, pass_metadata
from subquad.hf.token_positions import counted, positions, tokens_of
from subquad.hf.unwrapping import AnyModel, transformers_model

ATTRIBUTE = "_subquad_split"  # on a swapped model: its `Split`
_TRANSPARENT = ("PeftModel", "DistributedDataParallel", "OptimizedModule")


@dataclass(frozen=True)
class SplitFit:
    """The way in which a model runs on a part of its tokens, found by the trial.

    Attributes:
        positions: the rule of its positions; None: it has no such argument.
        loss: "shifted" and "plain" losses are sums divided by a number that is given, the first of next tokens; "mean"
            is a mean over the labels that the model sees; None: labels are refused.
        dropped: outputs that have no axis of tokens.
    """

    positions: str | None
    loss: str | None = None
    dropped: tuple[str, ...] = ()


class Split:
    """The ranks that a model's tokens are split over, and hooks around its forward pass."""

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        fixed: Sequence | None,
        fit: SplitFit,
        active: str,
        from_first_valid_token: bool,
    ):
        self.ranks, self.fit, self._active, self._fixed = ranks, fit, active, fixed
        self._from_first_valid_token = from_first_valid_token  # positions start there in each item: see `left_padding`
        self._root, self._last = model, fixed
        self._inside: list[nn.Module] = []  # the hooked modules that run
        self._hooks: list[Any] = []
        for part in hooked(model):
            self._hooks.append(part.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._hooks.append(part.register_forward_hook(self._leave, with_kwargs=True, always_call=True))

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def sequence(self, label: str, mask: Tensor | None) -> Sequence:
        """The sequence of the forward pass that runs, or that a backward pass computes again, with the same mask."""
        now = NOW.value
        if now is not None:
            return now.sequence
        if self._last is None or torch._C._current_graph_task_id() == -1:
            raise ValueError(
                f"layer {label} runs outside of its model's forward pass, where this rank's tokens are not "
                f"known; call the whole {type(self._root).__name__}, or swap without `parallel`"
            )
        current: Sequence = getattr(mask, MARK, self._last)  # others may have run since
        return current

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._root.config._attn_implementation != self._active:
            return None
        arguments = by_name(module, args, kwargs)
        now = NOW.value if self._inside else self._begin(arguments)
        assert now is not None
        self._inside.append(module)
        fill(module, arguments, now.positions)
        if module is self._root and "labels" in arguments:
            now.prepare_labels(arguments, self.fit.loss)
        return (), arguments

    def _begin(self, inputs: Mapping[str, Any]) -> Pass:
        """Exchange between ranks what a forward pass needs to know, before it runs."""
        metadata = pass_metadata(inputs, self.fit.loss)
        device = tokens_of(inputs).device
        every = [PassMetadata(*each) for each in self.ranks.gathered(torch.tensor(metadata, device=device)).tolist()]
        check_metadata(every, self.fit.loss, "labels" in inputs)
        sequence = self._agreed([other.tokens for other in every])
        labels = metadata.labels, sum(other.labels for other in every)
        now = Pass(sequence, any(other.mask == 2 for other in every), labels)
        if self.fit.positions is not None and "position_ids" not in inputs:
            now.positions = self._positions(self.fit.positions, inputs, sequence)
        NOW.value = now
        self._last = sequence
        return now

    def _agreed(self, lengths: list[int]) -> Sequence:
        if self._fixed is None:
            return self.ranks.sequence(lengths)
        if self._fixed.lengths != tuple(lengths):
            raise ValueError(
                f"the ranks have {tuple(lengths)} tokens, but the model was swapped for {self._fixed.lengths}; swap "
                "with parallel=group for batches of any length"
            )
        return self._fixed

    def _positions(self, rule: str, inputs: Mapping[str, Any], sequence: Sequence) -> Tensor:
        valid, before = counted(rule, inputs, self._root.config), None
        if valid is not None:
            every = self.ranks.gathered(valid.sum(1))
            before = every[: sequence.rank].sum(0)
        start, mask = sequence.local_tokens.start, inputs.get("attention_mask")
        made = positions(rule, inputs, start, before, self._root.config)
        if self._from_first_valid_token and rule == "places" and mask is not None:
            made = made - self._first_valid_tokens(mask.bool(), start)[:, None]
        return made

    def _first_valid_tokens(self, valid: Tensor, start: int) -> Tensor:
        """The place of each item's first real token among those of all ranks, (B,); 0 in an item without any."""
        none = torch.iinfo(torch.int64).max
        local = (start + valid.int().argmax(1)).masked_fill(~valid.any(1), none)
        first = self.ranks.gathered(local).amin(0)
        return first.masked_fill(first == none, 0)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._inside or self._inside[-1] is not module:
            return None
        self._inside.pop()
        now = NOW.value
        if not self._inside:
            NOW.value = None
        if output is None or now is None:  # an error is on its way
            return None
        if not isinstance(output, ModelOutput):
            raise ValueError(
                f"{type(module).__name__} returned a {type(output).__name__}, which does not show what belongs to "
                "this rank's tokens; leave out return_dict=False"
            )
        kept = {name: x for name, x in output.items() if name not in self.fit.dropped}
        if module is self._root and now.share is not None and "loss" in kept:
            kept["loss"] = kept["loss"] * now.share
        return type(output)(**kept)


def hooked(model: PreTrainedModel) -> list[nn.Module]:
    """The model, and the one inside of it that makes its hidden states."""
    return [model] if model.base_model is model else [model, model.base_model]


def by_name(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a forward pass that are not None, by their names."""
    bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    variadic = [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind is p.VAR_KEYWORD]
    values = {**bound, **(bound.pop(variadic[0], {}) if variadic else {})}
    return {name: x for name, x in values.items() if x is not None and name not in variadic}


def takes(module: nn.Module, name: str) -> bool:
    """True if the forward pass of a module has a parameter of this name."""
    return name in inspect.signature(module.forward).parameters


def fill(module: nn.Module, arguments: dict[str, Any], at: Tensor | None) -> None:
    """Add what the module would work out from its own tokens alone, in place."""
    if at is not None and takes(module, "position_ids"):
        arguments.setdefault("position_ids", at)
    if takes(module, "use_cache"):
        arguments["use_cache"] = False


def ranks_of(parallel: Any) -> tuple[Ranks, Sequence | None]:
    """The ranks of what `swap` was given as `parallel`, and the sequence where the lengths are fixed.

    Raises:
        TypeError: it is none of what can be given.
        ValueError: a mesh of several dimensions, or a sequence with keys of its own.
    """
    if isinstance(parallel, Ranks):
        return parallel, None
    if isinstance(parallel, Sequence):
        if parallel.keys is not None:
            raise ValueError("the sequence has `keys`, but a Hugging Face model is split in self-attention only")
        return Ranks(parallel.group, mode=parallel.mode), parallel
    if not hasattr(parallel, "get_group") and not isinstance(parallel, torch.distributed.ProcessGroup):
        raise TypeError(
            f"`parallel` is a {type(parallel).__name__}, but it must be a dimension of a DeviceMesh, a process group, "
            "a sq.distributed.Ranks or a sq.distributed.Sequence"
        )
    return Ranks(parallel), None


def refuse_holder(wrapped: AnyModel, model: PreTrainedModel) -> None:
    """Raise ValueError for what reads more of a model's outputs than the tokens of one rank."""
    kinds = {cls.__name__ for cls in type(wrapped).__mro__}
    if wrapped is not model and not kinds & set(_TRANSPARENT):
        raise ValueError(
            f"a {type(wrapped).__name__} reads the outputs of all tokens, but with `parallel` the model has those of "
            "one rank; swap the model in it, sq.hf.transformers_model(…), and gather its outputs with sequence.unshard"
        )


def shard(model: AnyModel, batch: Mapping[str, Any], sequence: Sequence | None = None) -> dict[str, Any]:
    """Return this rank's part of a batch, for a model swapped with `parallel`, without communication.

        part = sq.hf.shard(model, tokenizer(texts, return_tensors="pt", padding=True))
        loss = model(**part).loss

    Args:
        model: the swapped model.
        batch: the model's inputs, the same on all ranks: (batch, tokens) of input_ids, attention_mask,
            token_type_ids, position_ids, labels and shift_labels, inputs_embeds, and values that are not tensors.
        sequence: the split of the tokens over the ranks; None: an even split.

    Labels of a causal language model are shifted before they are cut, as `shift_labels`, because the label of a rank's
    last token is the first token of the next rank.

    Raises:
        ValueError: the model was not swapped with `parallel`, the batch has other tensors, or fewer tokens than ranks;
            `sequence` is split over other processes than the model.
    """
    inner = transformers_model(model)
    split = vars(inner).get(ATTRIBUTE)
    if split is None:
        raise ValueError(
            f"this {type(inner).__name__} was not swapped with `parallel`; call sq.hf.swap(model, method, "
            "parallel=mesh['sp']) first"
        )
    present = {name: x for name, x in batch.items() if x is not None}
    tokens = tokens_of(present).shape[1]
    sequence = sequence or split.ranks.sequence(even_shares(tokens, split.ranks.ranks))
    _check_group(sequence, split.ranks)
    tensors = {name: x for name, x in present.items() if isinstance(x, Tensor) and name != "num_items_in_batch"}
    for name, x in tensors.items():
        if name not in OF_TOKENS or x.shape[1:2] != (tokens,):
            raise ValueError(
                f"{name!r}, {tuple(x.shape)}, cannot be cut: a split batch has tensors (batch, {tokens}) of "
                f"{', '.join(sorted(OF_TOKENS))}"
            )
    if split.fit.loss == "shifted" and "labels" in tensors:
        tensors.setdefault("shift_labels", F.pad(tensors["labels"], (0, 1), value=NOT_A_LABEL)[:, 1:])
    return present | {name: sequence.shard(x).contiguous() for name, x in tensors.items()}


def _check_group(sequence: Sequence, ranks: Ranks) -> None:
    """ValueError where a sequence is split over other processes than a model."""
    have, want = (dist.get_process_group_ranks(each.group) for each in (sequence, ranks))
    if have != want:
        raise ValueError(
            f"the sequence is split over the processes {have[:5]}, but the model over {want[:5]}; make it with the "
            "group that the model was swapped with"
        )
