"""`full:kernel=subquad` equals SDPA, and runs subquad's kernel where that takes the call."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import subquad as sq
from subquad import Mask
from subquad.kernels import native
from subquad.testing.oracle import normal, qkv

FAST = "full:kernel=subquad"
vectorised = pytest.mark.skipif(not native.is_vectorised(), reason="no compiled kernels for AVX2, better, or NEON")
LEFT = torch.arange(150) >= torch.tensor([[0], [31]])
MASKS = {
    "none": Mask(),
    "causal": Mask.causal(),
    "behind a cache": Mask.causal(offset=50),
    "lengths": Mask.padding(torch.tensor([150, 17])),
    "causal and padded": Mask.causal() & Mask.padding(LEFT),
    "an item without keys": Mask.padding(keys=torch.tensor([150, 0])),
    "window": Mask.causal() & Mask.window(20),
    "segments": Mask.causal() & Mask.segments((torch.arange(150) // 60).expand(2, -1)),
    "dense": Mask.dense(torch.rand(2, 1, 150, 150, generator=torch.Generator().manual_seed(1)) < 0.5),
}


def inputs(dtype: torch.dtype = torch.float32, N: int = 150, M: int = 150) -> list[Tensor]:
    q, k, v = qkv(N, M, B=2, H=4, D=16, E=16)
    return [x.to(dtype).requires_grad_() for x in (q, k[:, :2], v[:, :2])]


def operators(**options: object) -> set[str]:
    """The operators of a call."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        sq.attention(*inputs(), method=FAST, enable_gqa=True, **options)
    return {event.key for event in trace.key_averages()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_equals_sdpa_forward_and_backward(name: str, dtype: torch.dtype):
    M = 200 if name == "behind a cache" else 150
    results = []
    for method in (FAST, "full"):
        tensors = inputs(dtype, M=M)
        out = sq.attention(*tensors, method=method, mask=MASKS[name], enable_gqa=True)
        weights = normal(*out.shape, seed=4).to(dtype)
        results.append([out, *torch.autograd.grad((out * weights).sum(), tensors)])
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    for have, want in zip(*results, strict=True):
        assert have.dtype == want.dtype
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


@vectorised
def test_the_kernel_runs_where_it_takes_the_call():
    assert "subquad::exact_forward" in operators(is_causal=True)
    assert "subquad::exact_forward" in operators(mask=MASKS["lengths"])
    for others in ({"mask": MASKS["window"]}, {"bias": torch.zeros(2, 4, 150, 150)}, {"dropout_p": 0.1}):
        assert "subquad::exact_forward" not in operators(**others)
    with sq.use_backend("reference"):
        assert "subquad::exact_forward" not in operators(is_causal=True)


FEW = {
    "a step": (1, 700, Mask.causal(offset=699)),
    "a chunk": (7, 700, Mask.causal(offset=693)),
    "a static cache": (3, 700, Mask.causal(offset=torch.tensor(300))),
    "items of other lengths": (3, 700, Mask.causal(offset=torch.tensor([300, 20]))),
    "a window": (5, 700, Mask.causal(offset=600) & Mask.window(40)),
    "a window to both sides": (32, 32, Mask.window(5)),
    "padding on the left": (
        2,
        700,
        Mask.causal(offset=698) & Mask.padding(keys=torch.arange(700) >= torch.tensor([[0], [99]])),
    ),
    "cross-attention": (1, 700, Mask.padding(keys=torch.tensor([700, 31]))),
    "padded queries": (4, 700, Mask.padding(queries=torch.tensor([4, 2]))),
}


@vectorised
@pytest.mark.parametrize("wants_lse", [False, True])
@pytest.mark.parametrize("name", FEW)
def test_few_queries_run_their_own_kernel(name: str, wants_lse: bool):
    N, M, mask = FEW[name]
    q, k, v = (x.detach() for x in inputs(M=M, N=N))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        have = sq.attention(q, k, v, method=FAST, mask=mask, enable_gqa=True, return_lse=wants_lse)
    assert "subquad::steps_forward" in {event.key for event in trace.key_averages()}
    with sq.use_backend("reference"):
        want = sq.attention(q, k, v, method="full", mask=mask, enable_gqa=True, return_lse=wants_lse)
    torch.testing.assert_close(have, want)


@vectorised
def test_few_queries_and_keys_or_gradients_are_sdpas():
    q, k, v = (x.detach() for x in inputs(M=20, N=4))
    longer = inputs(M=700, N=4)
    for tensors, offset in (((q, k, v), 19), (longer, 696)):
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            out = sq.attention(*tensors, method=FAST, mask=Mask.causal(offset=offset), enable_gqa=True)
        assert not [event.key for event in trace.key_averages() if event.key.startswith("subquad::")]
        want = sq.attention(*tensors, method="full", mask=Mask.causal(offset=offset), enable_gqa=True)
        torch.testing.assert_close(out, want)


@vectorised
def test_later_values_that_are_not_finite_reach_no_query():
    q, k, v = (x.detach() for x in inputs())
    v[:, :, 100:] = torch.nan
    out = sq.attention(q, k, v, method=FAST, is_causal=True, enable_gqa=True)
    assert out[:, :, :100].isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.5])
@pytest.mark.parametrize("method", [FAST, "full"])
def test_scales_that_are_not_positive_hide_later_keys_too(method: str, scale: float):
    q, k, v = (x.detach() for x in inputs())
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    hidden = ~torch.ones(150, 150, dtype=torch.bool).tril()
    logits = (q @ keys.mT * scale).masked_fill(hidden, -torch.inf)
    want = logits.softmax(-1) @ values
    out = sq.attention(q, k, v, method=method, is_causal=True, scale=scale, enable_gqa=True)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    doubled = (x.double() for x in (q, k, v))  # which subquad's kernel does not take
    partial = sq.attention(*doubled, method=method, is_causal=True, scale=scale, enable_gqa=True, return_lse=True)
    torch.testing.assert_close(partial, (want, logits.logsumexp(-1)), rtol=1e-4, atol=1e-5, check_dtype=False)


def test_an_exported_graph_needs_no_subquad():
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sq.attention(q, k, v, method=FAST, is_causal=True)

    q, k, v = (normal(1, 2, 80, 16, seed=i) for i in range(3))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    exported = torch.export.export(Layer(), (q, k, v))
    assert not any("subquad" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(q, k, v), want)


def test_forward_mode_and_vmap_equal_sdpa():
    q, k, v = (normal(1, 2, 80, 16, seed=i) for i in range(3))
    for method in (FAST, "full"):
        _, tangent = torch.func.jvp(lambda x, m=method: sq.attention(x, k, v, method=m), (q,), (k,))
        assert tangent.isfinite().all()
    batched = torch.vmap(lambda x: sq.attention(x, k, v, method=FAST))(torch.stack([q, k]))
    torch.testing.assert_close(batched[0], sq.attention(q, k, v, method="full"))


def test_it_is_exact_but_not_the_baseline():
    fast = sq.parse_method(FAST)
    assert fast.is_exact
    assert not fast.traits.quadratic_baseline
    assert sq.Full().traits.quadratic_baseline
    with pytest.raises(ValueError, match="kernel='flash'"):
        sq.Full(kernel="flash")
