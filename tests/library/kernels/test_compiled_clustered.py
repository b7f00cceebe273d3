"""The compiled kernels equal plain PyTorch: every instruction-set variant, dtype and direction, on poisoned memory."""

import threading
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Clustered, ImprovedClustered, Mask
from subquad.kernels import native
from subquad.kernels.attention.clustered.op import clustered_attention
from subquad.kernels.native import interface
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.methods import clustered
from subquad.testing.oracle import gradients, normal, qkv, tracked
from subquad.tools.bench.calls import threads
from tests.forks import output_of

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")
METHODS = [Clustered(clusters=7), ImprovedClustered(clusters=7, topk=9)]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # one rounding of outputs near 1

SHAPES = {
    "square": {"N": 61, "D": 64, "E": 64},
    "cross, shared key heads": {"N": 45, "M": 131, "H": 4, "G": 2, "D": 24, "E": 40},
    "odd widths": {"N": 37, "M": 20, "D": 5, "E": 3},
    "one head": {"N": 150, "B": 1, "H": 1, "D": 8, "E": 17},
    "wide": {"N": 20, "M": 23, "B": 1, "D": 128, "E": 96},
    "one key": {"N": 20, "M": 1, "D": 8, "E": 6},
    "one query": {"N": 1, "M": 30, "D": 8, "E": 6},
}


def run(method, inputs, backend: str = "cpu", **options) -> list[Tensor]:
    """Output and gradients."""
    inputs = tracked(*inputs)
    with sq.use_backend(backend):
        out = method(*inputs, enable_gqa=inputs[0].shape[1] != inputs[1].shape[1], **options)
        return [out, *gradients(out, *inputs)]


def run_with_lse(method, inputs, backend: str = "cpu", read: str = "both", **options) -> list[Tensor]:
    """Output, log-sum-exp, and the gradients of a loss that reads both of them or one."""
    inputs = tracked(*inputs)
    with sq.use_backend(backend):
        out, lse = method(*inputs, enable_gqa=inputs[0].shape[1] != inputs[1].shape[1], return_lse=True, **options)
    seen = torch.where(lse.isneginf(), 0.0, lse)
    loss = {"both": torch.cat([out.float(), seen[..., None]], -1), "lse": seen, "out": out}[read]
    return [out, lse, *gradients(loss, *inputs)]


def holes(mask_of: int, N: int, M: int) -> Mask:
    """Padding anywhere on both sides; the last item has no key."""
    valid = [normal(mask_of, n, seed=n) > -0.5 for n in (N, M)]
    valid[1][-1] = False
    return Mask.padding(queries=valid[0], keys=valid[1])


def assert_equal(have: list[Tensor], want: list[Tensor], tolerance: float):
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.covering
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_equals_the_reference(variant, poisoned, method, shape, padded):
    inputs = qkv(**shape)
    mask = holes(len(inputs[0]), inputs[0].shape[2], inputs[1].shape[2]) if padded else None
    assert_equal(run(method, inputs, mask=mask), run(method, inputs, "reference", mask=mask), 5e-6)


@pytest.mark.covering
@pytest.mark.parametrize("method", [*METHODS, replace(METHODS[1], topk=500)], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("read", ["both", "lse"])
def test_the_log_sum_exp_equals_the_reference(variant, poisoned, method, shape, padded, read):
    inputs = qkv(**shape)
    mask = holes(len(inputs[0]), inputs[0].shape[2], inputs[1].shape[2]) if padded else None
    have, want = (run_with_lse(method, inputs, backend, read, mask=mask) for backend in ("cpu", "reference"))
    assert_equal(have, want, 1e-5)
    assert have[1].dtype == torch.float32
    if padded:
        assert have[1][-1].isneginf().all()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_log_sum_exp_changes_nothing_else(variant, poisoned, method):
    """Bit for bit, both ways, where nobody differentiates it."""
    plain, beside = run(method, qkv(70, 90)), run_with_lse(method, qkv(70, 90), read="out")
    assert all(torch.equal(a, b) for a, b in zip(plain, [beside[0], *beside[2:]], strict=True))


@pytest.mark.covering
@pytest.mark.parametrize("topk", [0, 9])
@pytest.mark.parametrize("read", ["both", "lse"])
def test_gradients_through_the_log_sum_exp_equal_those_of_fp64(variant, poisoned, topk, read):
    """With labels that are given, as rounding may turn a bit of a hash."""
    labels = normal(2, 4, 61, seed=3).mul(9).long().abs() % 7
    settings = {"clusters": 7, "topk": topk, "bits": 31, "iterations": 3, "scale": 0.3, "seed": 0, "labels": labels}
    results = []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        inputs = tracked(*(x.to(dtype) for x in qkv(61, 131, H=4, G=2, D=24, E=40)))
        with sq.use_backend(backend):
            out, lse = clustered_attention(*inputs, None, None, **settings, wants_lse=True)
        loss = torch.cat([out, lse[..., None]], -1) if read == "both" else lse
        results.append([x.double() for x in (out, lse, *gradients(loss, *inputs))])
    assert_equal(*results, 1e-5)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_log_sum_exp_of_half_precision_is_wide(variant, poisoned, method, dtype):
    inputs = qkv(70, 90, D=20, E=12, dtype=dtype)
    have, want = run_with_lse(method, inputs), run_with_lse(method, inputs, "reference")
    assert have[1].dtype == torch.float32
    torch.testing.assert_close(have[1], want[1], atol=1e-5, rtol=1e-5)
    assert_equal([have[0], *have[2:]], [want[0], *want[2:]], CLOSE[dtype])


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_log_sum_exp_crosses_every_block_on_any_number_of_threads(method, monkeypatch):
    monkeypatch.setattr(interface, "SMALL", 0)
    inputs = qkv(8500, 4200, B=1, H=1, D=4, E=3)
    with threads(1):
        have = run_with_lse(method, inputs)
    assert_equal(have, run_with_lse(method, inputs, "reference"), 5e-5)
    with threads(3):
        assert all(torch.equal(a, b) for a, b in zip(run_with_lse(method, inputs), have, strict=True))


@pytest.mark.covering
@pytest.mark.parametrize("settings", [{"space": "logits"}, {"refine": 2}, {"space": "logits", "refine": 1}], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_clusters_that_are_handed_over_equal_the_reference(variant, poisoned, method, settings, padded):
    """Both backends get the same labels, of plain PyTorch, or they might differ by rounding."""
    inputs = qkv(61, 90, H=4, G=2)
    mask = holes(2, 61, 90) if padded else None
    method = replace(method, **settings)
    with patch.object(clustered, "query_clusters", query_clusters.reference):
        assert_equal(
            run_with_lse(method, inputs, mask=mask), run_with_lse(method, inputs, "reference", mask=mask), 1e-5
        )


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_half_precision_equals_the_reference(variant, poisoned, method, dtype):
    inputs = qkv(70, 90, D=20, E=12, dtype=dtype)
    have, want = run(method, inputs), run(method, inputs, "reference")
    assert have[0].dtype == dtype
    assert_equal(have, want, CLOSE[dtype])


@pytest.mark.covering
@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 65504.0, 1e-7, 6e-5, 0.0, -0.0, 3e-8, 1e38])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_values_of_every_kind_come_through(variant, special, dtype):
    """A single key has weight 1: its value comes out as it went in, through fp32 and back."""
    value = torch.full((1, 1, 1, 21), min(special, torch.finfo(dtype).max) if special < torch.inf else special).to(
        dtype
    )
    value[..., ::2] = -value[..., ::2] / 3
    q, k = normal(1, 1, 3, 4, dtype=dtype), normal(1, 1, 1, 4, dtype=dtype)
    out = sq.attention(q, k, value, method="clustered")
    torch.testing.assert_close(out, value.expand_as(out), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("method", [Clustered(clusters=6), ImprovedClustered(clusters=6, topk=20)], ids=str)
def test_long_sequences_cross_every_block(method):
    """More keys than a chunk of either direction, more queries than a block of the mean and of k-means."""
    inputs = qkv(8500, 4200, B=1, H=1, D=4, E=3)
    assert_equal(run(method, inputs), run(method, inputs, "reference"), 2e-5)


@pytest.mark.parametrize("topk", [1, 15, 16, 17, 64, 100, 300, 500])
def test_any_number_of_top_keys(variant, topk):
    inputs = qkv(40, 300, B=1, D=8, E=6)
    method = ImprovedClustered(clusters=3, topk=topk)
    assert_equal(run(method, inputs), run(method, inputs, "reference"), 1e-5)


@pytest.mark.parametrize("order", ["rising", "falling", "equal"])
def test_top_keys_in_any_order_of_logits(variant, order):
    """Rising logits make every key a candidate; equal ones leave only ties, of which any may be chosen."""
    steps = {"rising": torch.arange(700.0), "falling": -torch.arange(700.0), "equal": torch.zeros(700)}[order]
    q = torch.ones(1, 1, 20, 4) + 0.01 * normal(1, 1, 20, 4)
    k = (0.01 * steps)[None, None, :, None].expand(1, 1, 700, 4)
    v = normal(1, 1, 1, 6).expand(1, 1, 700, 6) if order == "equal" else normal(1, 1, 700, 6)
    method = ImprovedClustered(clusters=3, topk=32)
    assert_equal(run(method, (q, k, v))[:1], run(method, (q, k, v), "reference")[:1], 1e-5)


@pytest.mark.parametrize("zero", ["query", "key"])
def test_logits_of_zero_are_among_the_top(variant, zero):
    q, k, v = qkv(20, 60, D=8, E=6)
    inputs = (0 * q, k, v) if zero == "query" else (q, 0 * k, v)
    method = ImprovedClustered(clusters=3, topk=4)
    have, want = run_with_lse(method, inputs), run_with_lse(method, inputs, "reference")
    assert_equal(have[:2], want[:2], 1e-5)  # gradients depend on which of equal keys are chosen, which any may be
    assert all(x.isfinite().all() for x in have)


def test_large_logits_neither_overflow_nor_lose_the_top(variant):
    q, k, v = qkv(50, 400, D=8, E=6)
    method = ImprovedClustered(clusters=5, topk=8)
    have, want = run(method, (60 * q, 60 * k, v)), run(method, (60 * q, 60 * k, v), "reference")
    assert_equal(have, want, 2e-3)  # logits near 30,000 have 11 bits behind the point
    assert all(x.isfinite().all() for x in have)


@pytest.mark.covering
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("side", ["query", "key", "value"])
def test_nan_stays_with_its_head_and_pads_may_hold_it(variant, method, side):
    inputs = dict(zip(("query", "key", "value"), qkv(30, 300), strict=True))
    clean = run(method, inputs.values())[0]
    inputs[side] = inputs[side].clone()
    inputs[side][0, 0, 7] = torch.nan
    out = run(method, inputs.values())[0]
    assert out[0, 0].isnan().any()
    assert torch.equal(out[0, 1:], clean[0, 1:])
    assert torch.equal(out[1], clean[1])
    pads = {"queries" if side == "query" else "keys": torch.arange(30 if side == "query" else 300).expand(2, -1) != 7}
    assert not run(method, inputs.values(), mask=Mask.padding(**pads))[0].isnan().any()


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_number_of_threads_changes_nothing(method, count, monkeypatch):
    """Bit for bit, with many heads and with one that is split along the sequence."""
    monkeypatch.setattr(interface, "SMALL", 0)
    for shape in ({"N": 300, "B": 2, "H": 3}, {"N": 5000, "B": 1, "H": 1}):
        with threads(1):
            want = run(method, qkv(**shape))
        with threads(count):
            have = run(method, qkv(**shape))
        assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


def test_little_work_stays_on_one_thread():
    with threads(4):
        assert interface.threads(interface.SMALL - 1) == 1
        assert interface.threads(interface.SMALL) == 4


def test_several_threads_may_call_at_once(monkeypatch):
    monkeypatch.setattr(interface, "SMALL", 0)
    inputs, method = qkv(200, D=16), ImprovedClustered(clusters=9, topk=5)
    want, got = run(method, inputs), []

    def work():
        got.extend(run(method, inputs) for _ in range(5))  # the backward pass too

    with threads(2):
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert len(got) == 20
    assert all(torch.equal(a, b) for result in got for a, b in zip(result, want, strict=True))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_any_layout_of_the_inputs(method):
    """Token-major as models have it, expanded, transposed rows, every second token: all as the packed copy."""
    q, k, v = qkv(40, D=8, E=8)
    token_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    transposed = [x.mT.contiguous().mT for x in (q, k, v)]
    spaced = [x.repeat_interleave(2, dim=2)[:, :, ::2] for x in (q, k, v)]
    assert not any(x.is_contiguous() for x in (*token_major, *transposed, *spaced))
    want = run(method, (q, k, v))
    for layout in (token_major, transposed, spaced):
        assert all(torch.equal(a, b) for a, b in zip(run(method, layout), want, strict=True))
    expanded = [x[:1].expand(2, -1, -1, -1) for x in (q, k, v)]
    assert torch.equal(method(*expanded), method(*(x.contiguous() for x in expanded)))


def test_heads_merge_without_a_copy():
    q, k, v = tracked(*qkv(40, D=8, E=8))
    out = sq.attention(q, k, v, method="clustered")
    assert out.transpose(1, 2).is_contiguous()
    out.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.long
def test_the_ops_keep_torchs_rules():
    """`torch.library.opcheck`, in a process of its own: the run-time type checks here know no symbolic sizes."""
    assert output_of("tests.library.kernels.opchecks").split() == ["checked", "55"]


def test_double_backward_is_refused_not_wrong():
    q, k, v = tracked(*qkv(20))
    out = sq.attention(q, k, v, method="clustered:clusters=3")
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(
        RuntimeError,
        match="cannot be differentiated again",
    ):
        grad.sum().backward()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_transforms_of_torch_func_run_on_the_reference(method):
    q, k, v = qkv(40)
    want = run(method, (q, k, v), "reference")[1]
    weights = normal(*method(q, k, v).shape, seed=99)
    grad = torch.func.grad(lambda query: (method(query, k, v).double() * weights.double()).sum())(q)
    torch.testing.assert_close(grad, want, atol=1e-5, rtol=1e-5)
    with sq.use_backend("cpu"), pytest.raises(ValueError, match=r"inside a transform of torch\.func"):
        torch.func.grad(lambda query: method(query, k, v).sum())(q)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"dropout_p": 0.1}, "no dropout"), ({"dtype": torch.float64}, "the dtype is torch.float64")],
    ids=["dropout", "fp64"],
)
def test_what_the_kernels_cannot_do_is_refused_when_forced_and_left_to_the_reference_otherwise(options, reason):
    inputs = qkv(20, dtype=options.pop("dtype", torch.float32))
    with sq.use_backend("cpu"), pytest.raises(ValueError, match=f"backend 'cpu' cannot run this call: .*{reason}"):
        sq.attention(*inputs, method="clustered", **options)
    torch.manual_seed(0)
    out = sq.attention(*inputs, method="clustered", **options)
    torch.manual_seed(0)
    with sq.use_backend("reference"):
        assert torch.equal(out, sq.attention(*inputs, method="clustered", **options))


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    B, H, N, M, D, E, C, K = 2, 2, 24, 30, 8, 6, 5, 4
    q, k, v = tracked(*qkv(N, M, B=B, H=H, D=D, E=E))
    with FlopCounterMode(display=False) as counter:
        out = sq.attention(q, k, v, method=ImprovedClustered(clusters=C, bits=15, topk=K))
    forward = 2 * B * H * (N * D * 15 + (C * M + N * K) * (D + E))
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * B * H * (C * M + N * K) * (3 * D + 2 * E)
