"""NaN, infinity and too few finite keys in compiled clustered attention: the reference's values, in the item's memory."""

import subprocess
import sys

import pytest
import torch

from subquad import ImprovedClustered
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
        _, _, _, top, *_ = torch.ops.subquad.clustered_forward(q, k, v, None, None, 7, topk, 31, 3, 0.3, 5)
        assert (top >= 0).all()
        assert (top < M).all()
        assert (top.diff(dim=-1) > 0).all()
        if poison == -torch.inf:
            for of_cluster in top.flatten(0, 2):
                assert torch.isin(chosen[:finite], of_cluster).sum() == min(finite, topk)
