"""NaN, infinity and too few finite keys in compiled clustered attention, which equals the reference in them."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Clustered, ImprovedClustered, Mask
from subquad.kernels import native
from subquad.testing.oracle import gradients, normal, qkv, tracked

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


@pytest.mark.slow
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


@pytest.mark.covering
@pytest.mark.parametrize("topk", [1, 6, 40, 300, 700])
@pytest.mark.parametrize("finite", [0, 1, 5, 300, 690])
def test_saved_top_keys_are_ascending_and_distinct(variant, topk, finite):
    """The backward pass walks them so, whatever the logits are."""
    M = 700
    for poison in (torch.nan, -torch.inf):
        q, k, v = qkv(50, M, B=1, H=2)
        q, k, chosen = q.abs(), k.clone(), normal(M).argsort()
        k[:, :, chosen[finite:], 0] = poison
        _, _, _, top, *_ = torch.ops.subquad.clustered_forward(
            "cpu", q, k, v, None, None, None, 7, topk, 31, 3, 0.3, 5, False
        )
        assert (top >= 0).all()
        assert (top < M).all()
        assert (top.diff(dim=-1) > 0).all()
        if poison == -torch.inf:
            for of_cluster in top.flatten(0, 2):
                assert torch.isin(chosen[:finite], of_cluster).sum() == min(finite, topk)


REST = (None, None, None, 7, 5, 31, 3, 0.3, 5, True)  # of the arguments of the forward pass


@pytest.mark.covering
@pytest.mark.parametrize("spoil", ["order", "offsets", "top"])
@pytest.mark.parametrize("number", [-1, -(2**31), 2**31 - 1, 30])
def test_lists_that_the_forward_pass_did_not_make_are_refused(variant, spoil, number):
    q, k, v = qkv(30, 30, B=1)
    out, *saved = torch.ops.subquad.clustered_forward("cpu", q, k, v, *REST)
    grads = (out, *[None] * 9)
    torch.ops.subquad.clustered_backward("cpu", *grads, out, *saved, q, k, v, *REST)
    broken = saved[["order", "offsets", "top"].index(spoil)]
    broken[0, 1].flatten()[-1 if spoil == "offsets" else 3] = number - (spoil == "offsets" and number == 30)
    with pytest.raises(ValueError, match="lists that do not fit its tensors"):
        torch.ops.subquad.clustered_backward("cpu", *grads, out, *saved, q, k, v, *REST)


SAVED = "order", "offsets", "top", "centroids", "rest", "lse", "mass", "residual"


@pytest.mark.parametrize("at", range(8), ids=SAVED)
def test_saved_tensors_of_other_shapes_and_types_are_refused(at):
    q, k, v = qkv(30, 30, B=1)
    out, *saved = torch.ops.subquad.clustered_forward("cpu", q, k, v, *REST)
    for broken in (saved[at][:, :1], saved[at].to(torch.int64 if at < 3 else torch.float64)):
        lists = (*saved[:at], broken, *saved[at + 1 :])
        with pytest.raises(ValueError, match=r"clustered_backward: `\w+` is \(.*, but the other tensors go with \("):
            torch.ops.subquad.clustered_backward("cpu", out, *[None] * 9, out, *lists, q, k, v, *REST)


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


def run_with_lse(method, inputs, backend: str, mask: Mask | None = None) -> list[Tensor]:
    """Output and log-sum-exp, and the gradients of a loss that reads the latter where it is finite."""
    inputs = tracked(*inputs)
    with sq.use_backend(backend):
        out, lse = method(*inputs, mask=mask, return_lse=True)
    return [out, lse, *gradients(torch.where(lse.isneginf(), 0.0, lse), *inputs)]


def assert_same_nans(have: list[Tensor], want: list[Tensor]):
    for name, a, b in zip(("out", "dq", "dk", "dv"), have, want, strict=False):
        assert torch.equal(a.isnan(), b.isnan()), f"{name}: {a.isnan().sum()} NaNs, the reference has {b.isnan().sum()}"
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.covering
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


@pytest.mark.covering
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
    assert all((x[:, :, valid:] == 0).all() for x, valid in zip(have, (36, 36, 84, 84), strict=True))
    assert_same_nans(*([x[:, :, :valid] for x, valid in zip(of, (36, 36, 84, 84), strict=True)] for of in (have, want)))


@pytest.mark.covering
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


@pytest.mark.covering
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("method", [Clustered(clusters=12), ImprovedClustered(clusters=12, topk=30)], ids=str)
def test_log_sum_exps_are_finite_where_those_of_the_reference_are(variant, method, side, poison, place):
    """NaN and infinities may differ from the reference's. Values, which log-sum-exps do not read, get gradients of 0,
    and infinite logits may spoil more of their head's other gradients than in the reference, but nothing else.
    """
    for N, M in ((40, 90), (9, 20)):
        inputs = [x.clone() for x in qkv(N, M)]
        inputs[side == "key"][0, 0][place] = poison
        have, want = (run_with_lse(method, inputs, backend) for backend in ("cpu", "reference"))
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), have, want, strict=True):
            present = b.isfinite()
            if name in ("dq", "dk") and poison == poison:
                present = present & a.isfinite()
                assert present[1].all(), name
                assert present[0, 1].all(), name
            else:
                assert torch.equal(a.isfinite(), present), name
            torch.testing.assert_close(a[present], b[present], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("topk", [0, 20])
def test_the_log_sum_exp_of_logits_of_minus_infinity_hides_nothing(variant, topk):
    """With the same logits −∞ for every query and key, out is NaN and lse is not finite: −∞ where no mass is named."""
    q, k, v = qkv(30, 40, B=1, H=1, D=4)
    q, k = q.abs(), k.clone()
    k[..., 1] = -torch.inf
    method = ImprovedClustered(clusters=5, topk=topk) if topk else Clustered(clusters=5)
    out, lse = run_with_lse(method, (q, k, v), "cpu")[:2]
    assert out.isnan().all()
    assert (lse.isnan() if topk else lse.isneginf()).all()


@pytest.mark.parametrize("number", [-1, 7, 2**31, -(2**31), 2**32 + 3, -(2**63), 2**63 - 1])
def test_labels_that_name_no_cluster_are_refused(variant, number):
    q, k, v = qkv(30, 30)
    labels = torch.arange(30).expand(2, 2, -1) % 7
    given = "cpu", q, k, v, torch.arange(30).expand(2, -1) < 25, None
    broken = labels.clone()
    broken[1, 1, 24] = number
    with pytest.raises(ValueError, match="lists that do not fit its tensors"):
        torch.ops.subquad.clustered_forward(*given, broken, 7, 5, 31, 3, 0.3, 5, True)
    of_padding = labels.clone()
    of_padding[:, :, 25:] = number  # nobody reads them
    want, have = (
        torch.ops.subquad.clustered_forward(*given, given_labels, 7, 5, 31, 3, 0.3, 5, True)
        for given_labels in (labels, of_padding)
    )
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


@pytest.mark.parametrize("spoilt", [lambda x: x.int(), lambda x: x[:, :1], lambda x: x[..., :-1]])
def test_labels_of_another_shape_or_type_are_refused(spoilt):
    labels = spoilt(torch.zeros(2, 2, 30, dtype=torch.int64))
    with pytest.raises(ValueError, match="clustered_forward: `labels` is"):
        torch.ops.subquad.clustered_forward("cpu", *qkv(30, 30), None, None, labels, 7, 5, 31, 3, 0.3, 5, False)


@pytest.mark.covering
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
