"""Messages between ranks before a forward pass of a split model, and their consequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.core.versions import cache_in
from subquad.distributed import Sequence
from subquad.hf.token_positions import tokens_of

NOT_A_LABEL = -100
MARK = "_subquad_sequence"  # on the mask of a forward pass: its sequence
_PLAIN = {"num_items_in_batch", "output_hidden_states", "return_dict", "use_cache"}
OF_TOKENS = {"attention_mask", "input_ids", "inputs_embeds", "labels", "position_ids", "shift_labels", "token_type_ids"}
_NO_SHARE = "the loss of a part is not its share of the loss of all; leave `labels` out, and compute it from the logits"


class PassMetadata(NamedTuple):
    """The numbers that a rank sends.

    Attributes:
        tokens: number of tokens on this rank.
        items: number of items of the batch.
        mask: 0: none is given; 1: it hides nothing; 2: it hides padding.
        positions: 0: none are given; 1: they grow by one; 2: at least between real tokens; 3: not even that.
        first: the first position.
        labels: the number of labels that count; −1: none are given.
        shifted: whether labels are given that are shifted already.
    """

    tokens: int
    items: int
    mask: int
    positions: int
    first: int
    labels: int
    shifted: int


def pass_metadata(inputs: Mapping[str, Any], loss: str | None) -> PassMetadata:
    """The numbers of this rank's inputs; ValueError for inputs that cannot be split."""
    _refuse_inputs(inputs)
    tokens = tokens_of(inputs)
    mask = inputs.get("attention_mask")
    kind, first = _kind_of_positions(inputs.get("position_ids"), mask)
    labels = inputs.get("shift_labels" if loss == "shifted" else "labels")
    return PassMetadata(
        tokens.shape[1],
        tokens.shape[0],
        0 if mask is None else 1 if bool(mask.bool().all()) else 2,
        kind,
        first,
        -1 if labels is None or "labels" not in inputs else int((labels != NOT_A_LABEL).sum()),
        int("shift_labels" in inputs or "labels" not in inputs),
    )


def check_metadata(every: list[PassMetadata], loss: str | None, labelled: bool) -> None:
    """Raise ValueError on all ranks where they have other inputs, or inputs that make no sequence."""
    for rank, metadata in enumerate(every):
        for name, kind in (("attention_mask", "mask"), ("position_ids", "positions"), ("labels", "labels")):
            have, want = (getattr(each, kind) > _NONE[kind] for each in (metadata, every[0]))
            if have != want:
                one, other = (rank, 0) if have else (0, rank)
                raise ValueError(f"rank {one} was given {name} but rank {other} was not; all ranks must make one call")
        if metadata.items != every[0].items:
            raise ValueError(f"rank {rank} has {metadata.items} items but rank 0 has {every[0].items}; they must match")
    if labelled and loss is None:
        raise ValueError(_NO_SHARE)
    if labelled and loss == "shifted" and not all(metadata.shifted for metadata in every):
        raise ValueError(
            "labels are those of the next token, which may be another rank's: cut the batch with sq.hf.shard(model, "
            "batch), or shift them before they are cut and give them as `shift_labels` too"
        )
    _check_positions(every)


_NONE = {"mask": 0, "positions": 0, "labels": -1}  # the number that means that there are none


def _check_positions(every: list[PassMetadata]) -> None:
    padded, start = any(metadata.mask == 2 for metadata in every), every[0].first
    for rank, metadata in enumerate(every):
        if metadata.positions > (2 if padded else 1):
            raise ValueError(
                f"position_ids of rank {rank} do not grow by 1 from token to token; packed sequences, and tokens in "
                "another order, as accelerate's context parallelism puts them, are not supported: leave position_ids "
                "out, and give each rank tokens that follow each other"
            )
        if metadata.positions and not padded and metadata.first != start:
            raise ValueError(
                f"position_ids of rank {rank} start at {metadata.first}, but {start} tokens come before its own; leave "
                "them out, or cut those of the whole sequence with sq.hf.shard(model, batch)"
            )
        start += metadata.tokens


def _kind_of_positions(ids: Tensor | None, mask: Tensor | None) -> tuple[int, int]:
    if ids is None:
        return 0, 0
    first = int(ids[0, 0])
    grow = ids.diff(dim=1) == 1
    if bool(grow.all()) and bool((ids[:, 0] == first).all()):
        return 1, first
    if mask is not None and bool((grow | ~(mask[:, 1:].bool() & mask[:, :-1].bool())).all()):
        return 2, first
    return 3, first


def _refuse_inputs(inputs: Mapping[str, Any]) -> None:
    if cache_in(inputs) is not None or inputs.get("use_cache"):
        raise ValueError(
            "a cache (generate, past_key_values, use_cache=True) is not supported with `parallel`: a new token would "
            "be on one rank and its keys on all; swap without `parallel` to generate"
        )
    for name, value in inputs.items():
        if name not in _PLAIN | OF_TOKENS and value is not None and not (isinstance(value, int) and value == 0):
            raise ValueError(f"{name!r} is not supported with `parallel`, which knows {', '.join(sorted(OF_TOKENS))}")
    shape = tuple(tokens_of(inputs).shape[:2])
    for name in sorted(OF_TOKENS & inputs.keys()):
        have = tuple(inputs[name].shape)
        if have[:2] != shape and not (name == "position_ids" and have == (1, shape[1])):
            raise ValueError(f"{name!r} is {have}, but this rank's tokens are {shape}; each rank gives its own part")
        if len(have) != 2 and name != "inputs_embeds":
            raise ValueError(f"{name!r} is {have}, but `parallel` accepts (batch, tokens)")


@dataclass
class Pass:
    """A forward pass that runs now.

    Attributes:
        sequence: the tokens on all ranks.
        padded: whether any rank has padding.
        labels: the numbers of labels of this rank, and of all.
        positions: the positions of this rank's tokens; None: the model has no such argument, or they are given.
        share: the factor of this rank's mean loss; None: it is a sum over a number that is given.
    """

    sequence: Sequence
    padded: bool
    labels: tuple[int, int]
    positions: Tensor | None = None
    share: Any = None

    def prepare_labels(self, inputs: dict[str, Any], loss: str | None) -> None:
        """Make the loss of the model this rank's share of the mean over the labels of all ranks."""
        local, total = self.labels
        if loss != "mean":
            inputs.setdefault("num_items_in_batch", torch.tensor(max(total, 1), device=tokens_of(inputs).device))
            return
        self.share = local / inputs.pop("num_items_in_batch", max(total, 1))
        if local == 0:  # a mean over nothing is NaN, also in the gradient: one label that counts 0
            inputs["labels"] = inputs["labels"].clone()
            inputs["labels"][:, 0] = 0


class Now:
    """The forward pass of a split model that runs in this process. Compiled code cannot read a `ContextVar`."""

    value: Pass | None = None


NOW = Now()
