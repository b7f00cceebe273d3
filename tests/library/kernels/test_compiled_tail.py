"""The compiled kernels of clustered-tail equal plain PyTorch: clusters, cells, and attention with a tail."""

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import ClusteredTail, Mask
from subquad.kernels import native
from subquad.kernels.attention.tail.op import attend_with_tail
from subquad.kernels.native import interface
from subquad.kernels.selection.cells.op import key_cells
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.kernels.selection.nearest.op import nearest_clusters
from subquad.testing.oracle import gradients, normal, qkv, tracked
from subquad.tools.bench.calls import threads
from tests.library.kernels.test_compiled_clustered import CLOSE, SHAPES, assert_equal, holes, run

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")
METHODS = [
    ClusteredTail(clusters=7, topk=9, cells=3),
    ClusteredTail(clusters=30, topk=1, cells=1),
    ClusteredTail(clusters=7, topk=9, cells=3, window=5),
]
LISTS = ("order", "offsets", "key_order", "cell_offsets", "top")
SAVED = (*LISTS, "means", "cell_keys", "cell_values", "cell_lse", "cell_residual", "shifts", "kept", "residual")


@pytest.mark.covering
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_equals_the_reference(variant, poisoned, method, shape, padded):
    inputs = qkv(**shape)
    mask = holes(len(inputs[0]), inputs[0].shape[2], inputs[1].shape[2]) if padded else None
    assert_equal(run(method, inputs, mask=mask), run(method, inputs, "reference", mask=mask), 5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_equals_the_reference(variant, poisoned, dtype):
    inputs = qkv(70, 90, D=20, E=12, dtype=dtype)
    for method in METHODS:
        have, want = run(method, inputs), run(method, inputs, "reference")
        assert have[0].dtype == dtype
        assert_equal(have, want, CLOSE[dtype])


@pytest.mark.parametrize(
    ("topk", "cells"), [(1, 300), (15, 2), (16, 16), (17, 5), (100, 40), (299, 1), (300, 3), (500, 9)]
)
def test_any_number_of_top_keys_and_cells(variant, topk, cells):
    inputs = qkv(40, 300, B=1, D=8, E=6)
    for window in (0, 7):
        method = ClusteredTail(clusters=3, topk=topk, cells=cells, window=window)
        assert_equal(run(method, inputs), run(method, inputs, "reference"), 1e-5)


def test_long_sequences_cross_every_block():
    """More queries than a block of either direction, more keys than a block of logits, more means than its lanes."""
    inputs = qkv(2500, 9000, B=1, H=1, D=4, E=3)
    for window in (0, 300):
        method = ClusteredTail(clusters=150, topk=20, cells=5, window=window)
        assert_equal(run(method, inputs), run(method, inputs, "reference"), 2e-5)


@pytest.mark.parametrize("keys", range(2048, 2304, 32))
def test_a_list_that_is_full_takes_no_key_twice(variant, keys):
    """The first cluster's top keys are sought again, from the first key on, while the second one's list is nearly full.

    A bound is guessed from every eighth key. These are the first cluster's largest, so that its bound is too high, and
    the second one's smallest; its logits rise from key to key, so that each of the others joins its list.
    """
    at = torch.arange(keys) / keys
    guessed = torch.arange(keys) % 8 == 0
    first, second = torch.where(guessed, 3 + at, -at), torch.where(guessed, at - 3, at)
    far = 100.0 * (-1) ** torch.arange(keys)  # nearly the same distance from the cell's mean for all
    key = torch.stack([5 * first, 5 * second, far], 1)[None, None]
    query = torch.eye(3)[None, None, :2]
    value = normal(1, 1, keys, 3, seed=1)
    labels, cell = torch.arange(2)[None, None], torch.zeros(1, 1, keys, dtype=torch.long)
    sizes = {"clusters": 2, "topk": 32, "cells": 1}
    have, want = (with_lse(b, query, key, value, labels, cell, None, **sizes) for b in ("cpu", "reference"))
    assert_equal(have, want, 1e-5)


def with_lse(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    labels: Tensor,
    cell: Tensor,
    keys: Tensor | None,
    means: Tensor | None = None,
    around: Tensor | None = None,
    start: Tensor | None = None,
    **sizes,
):
    """Out, lse and the gradients of both."""
    q, k, v = inputs = tracked(q, k, v)
    others = {"start": start}
    if means is not None:
        inputs, others = [*inputs, means.requires_grad_()], {"means": means, "around": around, "start": start}
    with sq.use_backend(backend):
        out, lse = attend_with_tail(q, k, v, labels, cell, keys, **sizes, **others, scale=0.4)
        seen = lse.masked_fill(lse == -torch.inf, 0.0)
        return [out, seen, *torch.autograd.grad((out * normal(*out.shape, seed=8)).sum() + seen.square().sum(), inputs)]


@pytest.mark.covering
@pytest.mark.parametrize("of_others", [False, True], ids=["own means", "means of others"])
@pytest.mark.parametrize("listed", [False, True], ids=["chosen", "listed"])
@pytest.mark.parametrize("G", [1, 2])
@pytest.mark.parametrize(
    ("window", "start"),
    [
        (0, None),
        (6, None),
        (100, None),
        (6, [-9, 25]),
        (4, [-(2**62), 2**62]),
        (105, [-130, 140]),
        (2**61, [-99, 250]),
    ],
)
def test_log_sum_exps_and_listed_keys_equal_the_reference(variant, poisoned, listed, G, of_others, window, start):
    """Some queries and keys are in no cluster and no cell; a cell is empty, a cluster too, and slots of keys are."""
    q, k, v = qkv(50, 40, B=2, H=2, G=G, D=9, E=5)
    labels, cell = torch.arange(50).expand(2, 2, -1) % 6, (torch.arange(40).expand(2, G, -1) * 7) % 5
    labels, cell = torch.where(labels == 2, 5, labels), torch.where(cell == 1, 4, cell)
    keys = None
    if listed:
        keys = normal(2, 2, 5, 40).argsort(-1)[..., :6].sort(-1).values
        of_key = cell.repeat_interleave(2 // G, 1)[:, :, None].expand(2, 2, 5, 40)
        keys = torch.where(of_key.gather(3, keys) == 4, 40, keys)
        keys[:, :, 3] = 40
    sizes = {"clusters": 5, "topk": 6, "cells": 4, "window": window}
    others = {} if start is None else {"start": torch.tensor(start)}
    if of_others:
        spread = normal(2, 2, 9, 9, seed=5)
        others |= {"means": normal(2, 2, 5, 9, seed=4), "around": spread @ spread.mT / 9}
    have, want = (with_lse(backend, q, k, v, labels, cell, keys, **others, **sizes) for backend in ("cpu", "reference"))
    assert_equal(have, want, 1e-5)
    assert len(have) == (6 if of_others else 5)
    assert (have[0][:, :, labels[0, 0] == 5] == 0).all()


@pytest.mark.covering
@pytest.mark.parametrize("space", ["logits", "queries"])
@pytest.mark.parametrize("refine", [0, 3])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_clusters_and_cells_equal_the_reference(variant, space, refine, padded):
    """Up to rounding, which may turn a bit of a hash: here it turns none, or next to none."""
    q, k, v = qkv(700, 600, B=2, H=4, G=2, D=24, E=10)
    mask = Mask.padding(queries=[700, 300], keys=[600, 9]) if padded else Mask()
    valid = mask.query_padding(700), mask.key_padding(600)
    how = {"space": space, "clusters": 12, "bits": 63, "iterations": 3, "refine": refine, "seed": 3}
    both = []
    for backend in ("cpu", "reference"):
        with sq.use_backend(backend):
            both.append((query_clusters(q, k, *valid, **how), key_cells(k, v, valid[1], cells=5, seed=1)))
    for have, want in zip(*both, strict=True):
        assert (have != want).float().mean() < 2e-3
        assert have.unique().numel() == want.unique().numel()


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_nearest_clusters_equal_the_reference(variant, poisoned, padded, dtype):
    """Some clusters have no members, those of one head none at all. Rounding may decide between equally near ones."""
    q, k = (x.to(dtype) for x in qkv(300, 200, B=2, H=4, G=2, D=24, E=10)[:2])
    mask = Mask.padding(queries=[300, 77], keys=[200, 9]) if padded else Mask()
    sizes = (torch.arange(13) % 3).expand(2, 4, 13).clone()
    sizes[1, 2] = 0
    inputs = q, k, normal(2, 4, 13, 24, seed=6), sizes, mask.query_padding(300), mask.key_padding(200)
    both = []
    for backend in ("cpu", "reference"):
        with sq.use_backend(backend):
            both.append(nearest_clusters(*inputs))
    have, want = both
    assert (have != want).float().mean() < (2e-3 if dtype == torch.float32 else 1e-2)
    assert (have[1, 2] == 13).all()
    chosen = have[0, 0].unique()
    assert len(chosen) > 4
    assert (sizes[0, 0][chosen] > 0).all()
    if padded:
        assert (have[1, :, 77:] == 13).all()


def test_nearest_clusters_are_those_of_the_logits():
    """The mean whose products with all keys, less what these have in common, are nearest."""
    q, k, _ = qkv(50, 60, B=1, H=2, D=8)
    means = normal(1, 2, 7, 8, seed=3)
    apart = ((q[:, :, :, None] - means[:, :, None]) @ (k - k.mean(2, keepdim=True)).unsqueeze(2).mT).norm(dim=-1)
    labels = nearest_clusters(q, k, means, torch.ones(1, 2, 7, dtype=torch.int64), None, None)
    assert torch.equal(labels, apart.argmin(-1))


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_number_of_threads_changes_nothing(method, count, monkeypatch):
    monkeypatch.setattr(interface, "SMALL", 0)
    for shape in ({"N": 300, "B": 2, "H": 3}, {"N": 3000, "B": 1, "H": 1}):
        with threads(1):
            want = run(method, qkv(**shape))
        with threads(count):
            have = run(method, qkv(**shape))
        assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


def test_any_layout_of_the_inputs():
    q, k, v = qkv(40, D=8, E=8)
    want = run(METHODS[0], (q, k, v))
    for layout in (
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        [x.mT.contiguous().mT for x in (q, k, v)],
    ):
        assert all(torch.equal(a, b) for a, b in zip(run(METHODS[0], layout), want, strict=True))


@pytest.mark.covering
@pytest.mark.parametrize("side", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("window", [False, True], ids=["", "window"])
def test_nan_stays_with_its_head_and_pads_may_hold_it(variant, side, poison, window):
    inputs = dict(zip(("query", "key", "value"), qkv(30, 300), strict=True))
    method = METHODS[2] if window else METHODS[0]
    clean = run(method, inputs.values())[0]
    inputs[side] = inputs[side].clone()
    inputs[side][0, 0, 7] = poison
    out = run(method, inputs.values())[0]
    assert not out[0, 0].isfinite().all()
    assert torch.equal(out[0, 1:], clean[0, 1:])
    assert torch.equal(out[1], clean[1])
    pads = {"queries" if side == "query" else "keys": torch.arange(30 if side == "query" else 300).expand(2, -1) != 7}
    assert all(x.isfinite().all() for x in run(method, inputs.values(), mask=Mask.padding(**pads)))


@pytest.mark.parametrize("topk", [1, 8, 64, 300])
def test_values_near_the_end_of_fp32_stay_finite(variant, topk):
    q, k, v = qkv(60, 300, B=1)
    v = torch.full_like(v, 3e38) * torch.where(normal(*v.shape[:3], 1) < 0.8, 1, -1)
    for window in (0, 20):
        method = ClusteredTail(clusters=5, topk=topk, cells=3, window=window)
        have, want = (run(method, (q, k, v), backend)[0] / 1e38 for backend in ("cpu", "reference"))
        assert want.isfinite().all()
        torch.testing.assert_close(have, want, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("E", [17, 1100])
def test_a_value_that_is_not_finite_stays_in_its_column_of_wide_values(variant, E):
    """Also with more columns than there is scratch for the means of a block."""
    q, k, v = qkv(60, 80, B=1, H=1, G=1, D=12, E=E, dtype=torch.bfloat16)
    v[0, 0, 5, 0] = torch.inf
    method = ClusteredTail(clusters=2, topk=3, cells=2)
    have, want = (run(method, (q, k, v), backend)[0][..., 1:] for backend in ("cpu", "reference"))
    torch.testing.assert_close(have, want, atol=3e-2, rtol=3e-2)


DEGENERATE = {
    "equal keys": lambda q, k, v: (q, k[:, :, :1].expand_as(k), v),
    "equal queries": lambda q, k, v: (q[:, :, :1].expand_as(q), k, v),
    "all zero": lambda q, k, v: (0 * q, 0 * k, v),
    "huge keys and queries": lambda q, k, v: (1e18 * q, 1e-18 * k, v),
    "equal values": lambda q, k, v: (q, k, v[:, :, :1].expand_as(v)),
}


@pytest.mark.covering
@pytest.mark.parametrize("case", DEGENERATE.values(), ids=DEGENERATE)
@pytest.mark.parametrize("M", [1, 3, 40])
@pytest.mark.parametrize("window", [False, True], ids=["", "window"])
def test_degenerate_inputs_equal_the_reference_and_what_is_exact_there(variant, case, M, window):
    """One key, fewer keys than components, a covariance of zero: a number everywhere, and the right one."""
    q, k, v = case(*qkv(30, M, D=8, E=5))
    method = METHODS[2] if window else METHODS[0]
    have, want = (run(method, (q, k, v), backend) for backend in ("cpu", "reference"))
    assert all(x.isfinite().all() for x in have)
    torch.testing.assert_close(have[0], want[0], atol=1e-5, rtol=1e-5)
    if case in (
        DEGENERATE["equal keys"],
        DEGENERATE["equal queries"],
        DEGENERATE["all zero"],
        DEGENERATE["equal values"],
    ):
        torch.testing.assert_close(have[0], sq.attention(q, k, v, method="full"), atol=2e-5, rtol=1e-4)


SETTINGS = 7, 5, 3, 0.3, 4  # clusters, topk, cells, scale, window


def forward(q: Tensor, k: Tensor, v: Tensor, labels: Tensor, cell: Tensor):
    return torch.ops.subquad.tail_forward("cpu", q, k, v, labels, cell, *[None] * 6, *SETTINGS)


def listed() -> tuple[list[Tensor], Tensor, Tensor]:
    return qkv(30, 30, B=1), torch.arange(30).expand(1, 2, -1) % 7, torch.arange(30).expand(1, 2, -1) % 3


@pytest.mark.covering
@pytest.mark.parametrize("which", ["labels", "cell"])
@pytest.mark.parametrize("number", [-1, 8, 2**40])
def test_labels_that_do_not_exist_are_refused(variant, which, number):
    inputs, labels, cell = listed()
    labels, cell = labels.clone(), cell.clone()
    (labels if which == "labels" else cell)[0, 1, 3] = number
    with pytest.raises(ValueError, match="lists that do not fit its tensors"):
        forward(*inputs, labels, cell)


@pytest.mark.covering
@pytest.mark.parametrize("spoil", LISTS)
@pytest.mark.parametrize("number", [-2, -(2**31), 2**31 - 1, 30])
def test_lists_that_the_forward_pass_did_not_make_are_refused(variant, spoil, number):
    inputs, labels, cell = listed()
    out, lse, *saved = forward(*inputs, labels, cell)
    rest = labels, cell, *[None] * 6, *SETTINGS
    grads = (out, *[None] * 14)
    torch.ops.subquad.tail_backward("cpu", *grads, out, lse, *saved, *inputs, *rest)
    broken = saved[SAVED.index(spoil)]
    broken[0, 1].flatten()[-1 if "offsets" in spoil else 3] = number + (number == 30 and "offsets" in spoil)
    with pytest.raises(ValueError, match="lists that do not fit its tensors"):
        torch.ops.subquad.tail_backward("cpu", *grads, out, lse, *saved, *inputs, *rest)


@pytest.mark.parametrize("at", range(13), ids=SAVED)
def test_saved_tensors_of_other_shapes_and_types_are_refused(at):
    inputs, labels, cell = listed()
    out, lse, *saved = forward(*inputs, labels, cell)
    for broken in (saved[at][:, :1], saved[at].to(torch.int64 if at < 5 else torch.float64)):
        lists = (*saved[:at], broken, *saved[at + 1 :])
        with pytest.raises(ValueError, match=r"tail_backward: `\w+` is \(.*, but the other tensors go with \("):
            torch.ops.subquad.tail_backward(
                "cpu", out, *[None] * 14, out, lse, *lists, *inputs, labels, cell, *[None] * 6, *SETTINGS
            )


def test_gradients_flow_through_the_cells(variant):
    """A key that no query meets exactly has a gradient, as a part of its cell."""
    q, k, v = tracked(*qkv(40, 60, B=1, H=1))
    method = ClusteredTail(clusters=4, topk=1, cells=3)
    grads = gradients(method(q, k, v), q, k, v)
    assert all((grad != 0).any(-1).all() for grad in grads)
