"""NaN, infinity and too few finite keys in compiled clustered attention, which equals the reference in them."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Clustered, ImprovedClustered, Mask
from subquad.ops import native
from tests.oracle import gradients, normal, qkv, tracked

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")

FEWER_FINITE_KEYS_THAN_TOPK = """
import torch, subquad as sq
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 1, 2000, 8)
k[:, :, 5:36] = float("nan")
for i in range(40):
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with sq.use_backend("cpu"):
        sq.attention(*inputs, method="i-clustered").sum().backward()
    assert all(x.grad.isnan().all() for x in inputs)
print("alive")
"""


def test_fewer_finite_keys_than_topk_do_not_end_the_process():
    """In a process of its own, which a write outside of the buffers would end."""
    done = subprocess.run([sys.executable, "-c", FEWER_FINITE_KEYS_THAN_TOPK], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]


@pytest.mark.parametrize("poisoned_keys", [slice(5, 36), slice(None), slice(0, None, 2)], ids=["some", "all", "half"])
def test_gradients_of_clean_items_do_not_change(variant, poisoned_keys):
    q, k, v = qkv(300, B=3, H=1)
    method, clean = ImprovedClustered(), tracked(q, k, v)
    want = gradients(method(*clean), *clean)
    k = k.clone()
    k[0, :, poisoned_keys] = torch.nan
    for _ in range(3):
        inputs = tracked(q, k, v)
        for have, whole in zip(gradients(method(*inputs), *inputs), want, strict=True):
            assert have[0].isnan().all()
            assert torch.equal(have[1:], whole[1:])


@pytest.mark.parametrize("topk", [1, 6, 40, 300, 700])
@pytest.mark.parametrize("finite", [0, 1, 5, 300, 690])
def test_saved_top_keys_are_ascending_and_distinct(variant, topk, finite):
    """The backward pass walks them so, whatever the logits are."""
    M = 700
    for poison in (torch.nan, -torch.inf):
        q, k, v = qkv(50, M, B=1, H=2)
        q, k, chosen = q.abs(), k.clone(), normal(M).argsort()
        k[:, :, chosen[finite:], 0] = poison
        _, _, _, top, *_ = torch.ops.subquad.clustered_forward("cpu", q, k, v, None, None, 7, topk, 31, 3, 0.3, 5)
        assert (top >= 0).all()
        assert (top < M).all()
        assert (top.diff(dim=-1) > 0).all()
        if poison == -torch.inf:
            for of_cluster in top.flatten(0, 2):
                assert torch.isin(chosen[:finite], of_cluster).sum() == min(finite, topk)


REST = (None, None, 7, 5, 31, 3, 0.3, 5)  # of the arguments of the forward pass


@pytest.mark.parametrize("spoil", ["order", "offsets", "top"])
@pytest.mark.parametrize("number", [-1, -(2**31), 2**31 - 1, 30])
def test_lists_that_the_forward_pass_did_not_make_are_refused(variant, spoil, number):
    q, k, v = qkv(30, 30, B=1)
    out, *saved = torch.ops.subquad.clustered_forward("cpu", q, k, v, None, None, 7, 5, 31, 3, 0.3, 5)
    grads = (out, *[None] * 7)
    torch.ops.subquad.clustered_backward("cpu", *grads, out, *saved, q, k, v, *REST)
    broken = saved[["order", "offsets", "top"].index(spoil)]
    broken[0, 1].flatten()[-1 if spoil == "offsets" else 3] = number - (spoil == "offsets" and number == 30)
    with pytest.raises(ValueError, match="lists that do not fit its tensors: pass those that the forward pass made"):
        torch.ops.subquad.clustered_backward("cpu", *grads, out, *saved, q, k, v, *REST)


@pytest.mark.parametrize("at", range(7), ids=["order", "offsets", "top", "centroids", "rest", "lse", "mass"])
def test_saved_tensors_of_other_shapes_and_types_are_refused(at):
    q, k, v = qkv(30, 30, B=1)
    out, *saved = torch.ops.subquad.clustered_forward("cpu", q, k, v, None, None, 7, 5, 31, 3, 0.3, 5)
    for broken in (saved[at][:, :1], saved[at].to(torch.int64 if at < 3 else torch.float64)):
        lists = (*saved[:at], broken, *saved[at + 1 :])
        with pytest.raises(ValueError, match=r"clustered_backward: `\w+` is \(.*, but the other tensors go with \("):
            torch.ops.subquad.clustered_backward("cpu", out, *[None] * 7, out, *lists, q, k, v, *REST)


# ---------------------------------------------------------------------- the reference's NaNs

PLACES = {
    "one element": (3, 2),
    "one row": (3,),
    "most rows": (slice(2, -3),),
    "all rows": (slice(None),),
    "one column": (slice(None), 1),
}


def run(method, inputs, backend: str, mask: Mask | None = None) -> list[Tensor]:
    """Output and gradients."""
    inputs = tracked(*inputs)
    with sq.use_backend(backend):
        out = method(*inputs, mask=mask)
        return [out, *gradients(out, *inputs)]


def assert_same_nans(have: list[Tensor], want: list[Tensor]):
    for name, a, b in zip(("out", "dq", "dk", "dv"), have, want, strict=False):
        assert torch.equal(a.isnan(), b.isnan()), f"{name}: {a.isnan().sum()} NaNs, the reference has {b.isnan().sum()}"
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", range(3), ids=["query", "key", "value"])
def test_nan_and_infinity_reach_what_they_reach_in_the_reference(side, poison, place):
    """With more queries than clusters and fewer, with more keys than topk and fewer."""
    for N, M in ((40, 90), (9, 20)):
        inputs = [x.clone() for x in qkv(N, M)]
        inputs[side][0, 0][place] = poison
        method = ImprovedClustered(clusters=12, topk=30)
        assert_same_nans(run(method, inputs, "cpu"), run(method, inputs, "reference"))
        if poison != poison or side == 0:  # torch's fused attention has its own way with −∞ and overflows
            assert_same_nans(
                run(Clustered(clusters=12), inputs, "cpu"), run(Clustered(clusters=12), inputs, "reference")
            )


@pytest.mark.parametrize("place", [(3, 2), (3,), (slice(2, -3),)], ids=["one element", "one row", "most rows"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", range(3), ids=["query", "key", "value"])
def test_padded_items_equal_the_reference_in_their_real_tokens(side, poison, place):
    """Pads get no gradient in compiled code, whatever real tokens hold; in the reference 0·NaN."""
    N, M = 40, 90
    inputs = [x.clone() for x in qkv(N, M)]
    inputs[side][0, 0][place] = poison
    mask = Mask.padding(queries=(torch.arange(N) < 36).expand(2, -1), keys=(torch.arange(M) < 84).expand(2, -1))
    method = ImprovedClustered(clusters=12, topk=30)
    have, want = run(method, inputs, "cpu", mask), run(method, inputs, "reference", mask)
    assert all((x[:, :, real:] == 0).all() for x, real in zip(have, (36, 36, 84, 84), strict=True))
    assert_same_nans(*([x[:, :, :real] for x, real in zip(of, (36, 36, 84, 84), strict=True)] for of in (have, want)))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("M", [700, 5000])
def test_variants_equal_the_reference_where_few_keys_are_finite(variant, poison, M):
    """Infinite keys whose logits are −∞ weigh nothing, in whole tiles and chunks of keys too."""
    q, k, v = qkv(30, M, B=1, H=1, D=4)
    q, k = q.abs(), k.clone()
    k[:, :, : M - 10, 1] = poison
    method = ImprovedClustered(clusters=5, topk=20)
    have, want = run(method, (q, k, v), "cpu"), run(method, (q, k, v), "reference")
    if poison == -torch.inf:  # the reference's gradients are NaN there for the empty slots of its blocks: 0·∞
        have, want = have[:1], want[:1]
        assert have[0].isfinite().all()
    assert_same_nans(have, want)


def test_a_query_all_of_whose_logits_are_minus_infinity_is_nan(variant):
    q, k, v = qkv(30, 40, B=1, H=1, D=4)
    q, k = q.abs(), k.clone()
    k[..., 1] = -torch.inf
    for method in (
        ImprovedClustered(clusters=5, topk=20),
        ImprovedClustered(clusters=5, topk=50),
        Clustered(clusters=5),
    ):
        for mask in (None, Mask.padding(keys=torch.arange(40)[None] < 30)):
            assert run(method, (q, k, v), "cpu", mask)[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("topk", [1, 8, 64, 300])
def test_values_near_the_end_of_fp32_stay_finite(variant, dtype, topk):
    """Weighted means of finite values are finite, and so they are in the reference; their sums would not be."""
    q, k, v = qkv(60, 300, B=1, dtype=dtype)
    v = torch.full_like(v, 3e38) * torch.where(normal(*v.shape[:3], 1) < 0.8, 1, -1).to(dtype)
    method = ImprovedClustered(clusters=5, topk=topk)
    have, want = (run(method, (q, k, v), backend)[0].float() / 1e38 for backend in ("cpu", "reference"))
    assert want.isfinite().all()
    torch.testing.assert_close(have, want, atol=3e-5, rtol=3e-5 if dtype == torch.float32 else 1e-2)
