"""The contract of a batch: an item has the outputs and gradients that it has alone, whatever is next to it.

Sizes that a method derives from a length (clusters, top keys, cells, buckets, landmarks, blocks) must be those of each
item. So the lengths of a batch lie on both sides of the steps of such sizes, and methods run at their defaults too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from subquad import Mask, Method
from subquad.methods.core.halves import ByHalves
from subquad.testing.contract import UNUSED, Contract, close, lengths_to_bool, once, pad, where
from subquad.testing.oracle import hidden_for, qkv, tracked

LENGTHS = (160, 140, 110, 70, 37, 5)  # √n, √2n, √8n and √32n differ between any two of them
PACKED = (110, 70, 45, 5)
BLOCK, LAST = 64, 3  # of causal attention by halves: the last rectangle of an item has 12 to 64 queries here
LONGEST = sum(PACKED)  # for which learned parameters are made

on_each_side = pytest.mark.parametrize("side", ["left", "right"])


def at_defaults(method: Method) -> Method:
    """The class's default settings, with rectangles of a few tokens if it is causal by halves."""
    default = type(method)()
    return replace(default, block=BLOCK, last=LAST) if isinstance(default, ByHalves) else default


def masks_of(method: Method) -> list[Mask]:
    """No mask, and a causal one if the method supports it."""
    return [mask for mask in (Mask(), Mask.causal()) if method.refuses(mask) is None]


def items_of(lengths: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """An item of each length, with logits that are large enough for weights to differ."""
    made = (qkv(n, B=1, seed=number) for number, n in enumerate(lengths))
    return [(2 * query, key, value) for query, key, value in made]


def results(method: Method, inputs: Sequence[Tensor], mask: Mask) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    leaves = tracked(*inputs)
    bound = method.bind(heads=2, kv_heads=2, head_dim=8, max_length=LONGEST).eval()
    out = bound(*leaves, mask=mask, **hidden_for(method, leaves[0]))
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves, **UNUSED)]


def assert_as_alone(
    method: Method, items: Sequence[Sequence[Tensor]], together: Sequence[Tensor], mask: Mask, of_item: Callable
) -> None:
    """Each item's part of these results is what the item has alone."""
    for number, item in enumerate(items):
        alone = results(method, item, mask)
        for name, whole, want in zip(("out", "query", "key", "value"), together, alone, strict=True):
            what = f"{method}, {mask}, {name} of {item[0].shape[2]} tokens"
            close(of_item(whole, number), want[0], msg=lambda m, what=what: f"{what}: {m}")


def assert_padding_changes_nothing(method: Method, lengths: Sequence[int], side: str, masks: Sequence[Mask]) -> None:
    """Items of these lengths have the same results padded to the longest one and alone."""
    items, valid = items_of(lengths), lengths_to_bool(lengths, max(lengths), side)
    batch = pad(items, valid, filler=30.0)
    for mask in masks:
        together = results(method, batch, mask & Mask.padding(valid))
        assert all((x.transpose(1, 2)[~valid] == 0).all() for x in together), f"{method}, {mask}: padding is not 0"
        assert_as_alone(method, items, together, mask, lambda x, number: x[number][:, valid[number]])


class BatchContract(Contract):
    """An item of a batch has the results that it has alone: one test for each way to put items together."""

    @on_each_side
    @where(lambda traits: traits.causal != "no")
    def test_padding_changes_no_causal_result(self, method: Method, side: str):
        assert_padding_changes_nothing(method, (24, 17, 9, 3), side, [Mask.causal()])

    @on_each_side
    @once
    def test_padding_changes_nothing_at_default_settings(self, method: Method, side: str):
        method = at_defaults(method)
        assert_padding_changes_nothing(method, LENGTHS, side, masks_of(method))

    @once
    def test_packing_changes_nothing_at_default_settings(self, method: Method):
        method = at_defaults(method)
        items = items_of(PACKED)
        packed = [torch.cat(parts, 2) for parts in zip(*items, strict=True)]
        ids = torch.arange(len(PACKED)).repeat_interleave(torch.tensor(PACKED))
        for mask in masks_of(method):
            together = results(method, packed, mask & Mask.segments(ids[None]))
            assert_as_alone(method, items, together, mask, lambda x, number: x[0][:, ids == number])
