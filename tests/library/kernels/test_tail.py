"""The tail of a bucket: equal to its formula written out in loops, and exact where the formula is."""

import pytest
import torch

from subquad import Mask
from subquad.kernels.attention.tail import op
from subquad.kernels.selection.balanced import best_bucket
from subquad.kernels.selection.cells.op import key_cells
from subquad.kernels.selection.group_means import group_mean
from subquad.kernels.tokens.slots import members
from subquad.testing.oracle import gradients, naive, normal, tracked
from tests.library.methods.dense import with_tail

SCALE = 0.8


def made(B=2, H=2, G=2, N=9, M=14, D=3, E=2) -> list[torch.Tensor]:
    shapes = (B, H, N, D), (B, G, M, D), (B, G, M, E)
    return tracked(*(normal(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)))


def scores(B=2, H=2, N=9, M=14, C=3) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(B, H, N, C, seed=5), normal(B, H, M, C, seed=6)


def bucketed(scored, mask: Mask, keys: int):
    """Buckets with so many keys, and the same as a label for each query and the keys chosen by each bucket."""
    of_query, of_key = scored
    N, M = of_query.shape[2], of_key.shape[2]
    valid, valid_keys = mask.query_padding(N), mask.key_padding(M)
    lengths = torch.full((of_key.shape[0],), M) if valid_keys is None else valid_keys.sum(1)
    buckets = best_bucket(of_query, of_key, mask, lengths.clamp(max=keys), keys)
    label = of_query.argmax(-1)
    label = label if valid is None else torch.where(valid[:, None], label, -1)
    return buckets, label, members(buckets.keys, M).mT


def attend_with_tail(query, key, value, buckets, cell, cells: int, **near):
    """The op, with the exact keys of these buckets."""
    sizes = {"clusters": buckets.keys.shape[2], "topk": buckets.keys.shape[3], "cells": cells, **near}
    labels = buckets.labels(query.shape[2])
    return op.attend_with_tail(query, key, value, labels, cell, buckets.keys, **sizes, scale=SCALE)


def cells_of(B: int, G: int, M: int, cells: int, mask: Mask) -> torch.Tensor:
    cell = normal(B, G, M, seed=7).mul(100).long() % cells
    valid = mask.key_padding(M)
    return cell if valid is None else torch.where(valid[:, None], cell, cells)


@pytest.mark.parametrize("G", [1, 2])
@pytest.mark.parametrize("mask", [Mask(), Mask.padding(keys=[14, 5], queries=[4, 9])], ids=["whole", "padded"])
@pytest.mark.parametrize(("keys", "cells"), [(1, 1), (4, 3), (4, 20), (13, 2), (14, 2), (30, 2)])
def test_equals_its_formula_bucket_by_bucket(G, mask, keys, cells):
    inputs = made(G=G)
    buckets, label, chosen = bucketed(scores(), mask, keys)
    cell = cells_of(2, G, 14, cells, mask)
    out, _ = attend_with_tail(*inputs, buckets, cell, cells)
    wanted = with_tail(*inputs, label, chosen, torch.where(cell < cells, cell, -1), SCALE)
    torch.testing.assert_close(out, wanted)
    assert (out != 0).any(-1).sum() == (label >= 0).sum()
    torch.testing.assert_close(gradients(out, *inputs), gradients(wanted, *inputs))


@pytest.mark.parametrize("start", [0, -4, 9])
@pytest.mark.parametrize("mask", [Mask(), Mask.padding(keys=[14, 5], queries=[4, 9])], ids=["whole", "padded"])
@pytest.mark.parametrize(("keys", "cells"), [(1, 1), (4, 3), (13, 2)])
@pytest.mark.parametrize("window", [1, 3, 20])
def test_near_keys_are_exact_and_their_cells_do_not_count_them(window, keys, cells, mask, start):
    inputs = made(G=1)
    buckets, label, chosen = bucketed(scores(), mask, keys)
    cell = cells_of(2, 1, 14, cells, mask)
    out, _ = attend_with_tail(*inputs, buckets, cell, cells, window=window, start=torch.full((2,), start))
    wanted = with_tail(*inputs, label, chosen, torch.where(cell < cells, cell, -1), SCALE, window, start)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(gradients(out, *inputs), gradients(wanted, *inputs))


def test_a_window_over_all_keys_is_exact():
    inputs = made(N=14)
    buckets, *_ = bucketed(scores(N=14), Mask(), 2)
    out, lse = attend_with_tail(*inputs, buckets, cells_of(2, 2, 14, 3, Mask()), 3, window=13)
    torch.testing.assert_close(out, naive(*inputs, scale=SCALE))
    torch.testing.assert_close(lse, (inputs[0] @ inputs[1].mT * SCALE).logsumexp(-1))


def test_each_item_has_its_own_place_among_the_keys():
    inputs = [x.detach() for x in made()]
    buckets, *_ = bucketed(scores(), Mask(), 2)
    cell = cells_of(2, 2, 14, 3, Mask())
    both = attend_with_tail(*inputs, buckets, cell, 3, window=2, start=torch.tensor([1, 5]))[0]
    for item, start in enumerate((1, 5)):
        alone = attend_with_tail(*inputs, buckets, cell, 3, window=2, start=torch.full((2,), start))[0]
        torch.testing.assert_close(both[item], alone[item])


def test_gradients_in_fp64():
    buckets, *_ = bucketed(scores(1, 1), Mask(), 4)
    inputs, cell = made(1, 1, 1), cells_of(1, 1, 14, 3, Mask())
    assert torch.autograd.gradcheck(
        lambda q, k, v: attend_with_tail(q, k, v, buckets, cell, 3)[0],
        inputs,
        fast_mode=True,
    )


@pytest.mark.parametrize("keys", [1, 5])
def test_exact_for_a_query_that_is_its_buckets_mean(keys):
    q, k, v = made()
    q = q[:, :, :1].expand(-1, -1, 9, -1)
    of_query = torch.tensor([[0.0, 1.0, 0.0]]).expand(2, 2, 9, -1)
    buckets, *_ = bucketed((of_query, scores()[1]), Mask(), keys)
    out, _ = attend_with_tail(3 * q, k, v, buckets, cells_of(2, 2, 14, 2, Mask()), 2)
    torch.testing.assert_close(out, naive(3 * q, k, v, scale=SCALE))


def test_exact_where_the_keys_of_a_cell_are_equal():
    q, k, v = made()
    buckets, *_ = bucketed(scores(), Mask(), 4)
    cell = cells_of(2, 2, 14, 3, Mask())
    alike = k[:, :, :3].gather(2, cell[..., None].expand(-1, -1, -1, 3))
    out, _ = attend_with_tail(q, alike, v, buckets, cell, 3)
    torch.testing.assert_close(out, naive(q, alike, v, scale=SCALE))


def test_near_its_mean_a_query_errs_by_the_square_of_the_distance():
    """First order: half of the distance, a quarter of the error, of the mass on the keys that are not in the tail."""
    q, k, _ = made(B=1, H=1, G=1)
    mean = q.mean(2, keepdim=True)
    buckets, _, chosen = bucketed((torch.zeros(1, 1, 9, 1), scores(1, 1, C=1)[1]), Mask(), 3)
    v = chosen[:, :, 0, :, None].double()
    cell, errors = cells_of(1, 1, 14, 2, Mask()), []
    for distance in (0.02, 0.01):
        near = mean + distance * (q - mean)
        out, _ = attend_with_tail(near, k, v, buckets, cell, 2)
        errors.append((out - naive(near, k, v, scale=SCALE)).abs().max())
    assert 3.5 < errors[0] / errors[1] < 4.5


def test_empty_buckets_have_a_mean_of_zero_and_do_no_harm():
    inputs = made()
    of_query = torch.full((2, 2, 9, 4), -1.0)
    of_query[..., 2] = 1.0
    buckets, label, chosen = bucketed((of_query, scores(C=4)[1]), Mask(), 4)
    means = group_mean(inputs[0], buckets.labels(9), 4)
    assert (means[:, :, [0, 1, 3]] == 0).all()
    torch.testing.assert_close(means[:, :, 2], inputs[0].mean(2))
    cell = cells_of(2, 2, 14, 3, Mask())
    out, _ = attend_with_tail(*inputs, buckets, cell, 3)
    torch.testing.assert_close(out, with_tail(*inputs, label, chosen, cell, SCALE))
    assert all(grad.isfinite().all() for grad in gradients(out, *inputs))


def test_large_inputs_stay_finite():
    inputs = [x.detach().float() * 100 for x in made()]
    buckets, *_ = bucketed(scores(), Mask(), 4)
    out, _ = attend_with_tail(*inputs, buckets, cells_of(2, 2, 14, 3, Mask()), 3)
    assert out.isfinite().all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_cells_are_each_items_own_and_padding_is_in_none(side):
    k, v = normal(2, 3, 20, 6), normal(2, 3, 20, 5, seed=1)
    valid = torch.arange(20) < torch.tensor([[20], [7]])
    valid = valid if side == "right" else valid.flip(1)
    cell = key_cells(k, v, valid, cells=4, seed=0)
    assert (cell[1][:, ~valid[1]] == 4).all()
    assert (cell[:, :, 7] < 4).any()
    assert cell.shape == (2, 3, 20)
    assert torch.equal(
        cell[1:][:, :, valid[1]], key_cells(k[1:][:, :, valid[1]], v[1:][:, :, valid[1]], None, cells=4, seed=0)
    )
    assert torch.equal(cell[:1], key_cells(k[:1], v[:1], None, cells=4, seed=0))


@pytest.mark.parametrize("split", [False, True], ids=["by keys", "by keys and values"])
def test_tokens_that_are_alike_share_a_cell(split):
    alike = torch.ones(1, 1, 40, 3)
    groups = torch.arange(40) % 4
    centres = 5 * torch.linalg.qr(normal(8, 4)).Q.T
    vectors = (centres[groups] + 0.1 * normal(40, 8))[None, None]
    cell = key_cells(vectors, vectors if split else alike, None, cells=4, seed=0)[0, 0]
    assert len(cell.unique()) > 1
    assert all(len(cell[groups == group].unique()) == 1 for group in range(4))
