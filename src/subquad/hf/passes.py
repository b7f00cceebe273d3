"""What ranks tell each other before a forward pass of a split model, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.distributed import Sequence
from subquad.hf.token_positions import tokens_of

NOT_A_LABEL = -100
MARK = "_subquad_sequence"  # on the mask of a forward pass: its sequence
_PLAIN = {"num_items_in_batch", "output_hidden_states", "return_dict", "use_cache"}
OF_TOKENS = {"attention_mask", "input_ids", "inputs_embeds", "labels", "position_ids", "shift_labels", "token_type_ids"}
_NO_SHARE = "the loss of a part is not its share of the loss of all; leave `labels` out, and compute it from the logits"


class Facts(NamedTuple):
    """The numbers that a rank sends.

    Attributes:
        tokens: on this rank.
        items: of the batch.
        mask: 0: none is given; 1: it hides nothing; 2: it hides padding.
        positions: 0: none are given; 1: they grow by one; 2: at least between real tokens; 3: not even that.
        first: the first of them.
        labels: how many count; −1: none are given.
        shifted: whether labels are given that are shifted already.
    """

    tokens: int
    items: int
    mask: int
    positions: int
    first: int
    labels: int
    shifted: int


def facts_of(given: Mapping[str, Any], loss: str | None) -> Facts:
    """The numbers of this rank's inputs; ValueError for inputs that cannot be split."""
    _refuse_inputs(given)
    tokens = tokens_of(given)
    mask = given.get("attention_mask")
    kind, first = _kind_of_positions(given.get("position_ids"), mask)
    told = given.get("shift_labels" if loss == "shifted" else "labels")
    return Facts(
        tokens.shape[1],
        tokens.shape[0],
        0 if mask is None else 1 if bool(mask.bool().all()) else 2,
        kind,
        first,
        -1 if told is None or "labels" not in given else int((told != NOT_A_LABEL).sum()),
        int("shift_labels" in given or "labels" not in given),
    )


def check_facts(every: list[Facts], loss: str | None, labelled: bool) -> None:
    """Raise ValueError on all ranks where they have other inputs, or inputs that make no sequence."""
    for rank, facts in enumerate(every):
        for name, kind in (("attention_mask", "mask"), ("position_ids", "positions"), ("labels", "labels")):
            have, want = (getattr(each, kind) > _NONE[kind] for each in (facts, every[0]))
            if have != want:
                one, other = (rank, 0) if have else (0, rank)
                raise ValueError(f"rank {one} was given {name} but rank {other} was not; all ranks must make one call")
        if facts.items != every[0].items:
            raise ValueError(f"rank {rank} has {facts.items} items but rank 0 has {every[0].items}; they must match")
    if labelled and loss is None:
        raise ValueError(_NO_SHARE)
    if labelled and loss == "shifted" and not all(facts.shifted for facts in every):
        raise ValueError(
            "labels are those of the next token, which may be another rank's: cut the batch with sq.hf.shard(model, "
            "batch), or shift them before they are cut and give them as `shift_labels` too"
        )
    _check_positions(every)


_NONE = {"mask": 0, "positions": 0, "labels": -1}  # the number that says that there are none


def _check_positions(every: list[Facts]) -> None:
    padded, start = any(facts.mask == 2 for facts in every), every[0].first
    for rank, facts in enumerate(every):
        if facts.positions > (2 if padded else 1):
            raise ValueError(
                f"position_ids of rank {rank} do not grow by 1 from token to token; packed sequences, and tokens in "
                "another order, as accelerate's context parallelism puts them, are not supported: leave position_ids "
                "out, and give each rank tokens that follow each other"
            )
        if facts.positions and not padded and facts.first != start:
            raise ValueError(
                f"position_ids of rank {rank} start at {facts.first}, but {start} tokens come before its own; leave "
                "them out, or cut those of the whole sequence with sq.hf.shard(model, batch)"
            )
        start += facts.tokens


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


def _refuse_inputs(given: Mapping[str, Any]) -> None:
    if given.get("past_key_values") is not None or given.get("use_cache"):
        raise ValueError(
            "a cache (generate, past_key_values, use_cache=True) does not go with `parallel`: a new token would be on "
            "one rank and its keys on all; swap without `parallel` to generate"
        )
    for name, value in given.items():
        if name not in _PLAIN | OF_TOKENS and value is not None and not (isinstance(value, int) and value == 0):
            raise ValueError(f"{name!r} does not go with `parallel`, which knows {', '.join(sorted(OF_TOKENS))}")
    shape = tuple(tokens_of(given).shape[:2])
    for name in sorted(OF_TOKENS & given.keys()):
        have = tuple(given[name].shape)
        if have[:2] != shape and not (name == "position_ids" and have == (1, shape[1])):
            raise ValueError(f"{name!r} is {have}, but this rank's tokens are {shape}; each rank gives its own part")
        if len(have) != 2 and name != "inputs_embeds":
            raise ValueError(f"{name!r} is {have}, but `parallel` takes (batch, tokens)")


@dataclass
class Pass:
    """A forward pass that runs now.

    Attributes:
        of: the sequence.
        padded: whether any rank has padding.
        labels: how many labels this rank has, and all have.
        positions: of this rank's tokens; None: the model takes none, or they are given.
        share: what this rank's mean loss is multiplied with; None: it is a sum over a number that is given.
    """

    of: Sequence
    padded: bool
    labels: tuple[int, int]
    positions: Tensor | None = None
    share: Any = None

    def prepare_labels(self, given: dict[str, Any], loss: str | None) -> None:
        """Make the loss of the model this rank's share of the mean over the labels of all ranks."""
        own, total = self.labels
        if loss != "mean":
            given.setdefault("num_items_in_batch", torch.tensor(max(total, 1), device=tokens_of(given).device))
            return
        self.share = own / given.pop("num_items_in_batch", max(total, 1))
        if own == 0:  # a mean over nothing is NaN, also in the gradient: one label that counts 0
            given["labels"] = given["labels"].clone()
            given["labels"][:, 0] = 0


class Now:
    """The forward pass of a split model that runs in this process. Compiled code cannot read a `ContextVar`."""

    value: Pass | None = None


NOW = Now()
