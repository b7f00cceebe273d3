"""Capped logits and sinks: for a few queries by the compiled kernel, equal to the logits in plain PyTorch."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import subquad as sq
from subquad import Mask
from subquad.hf.caps_and_sinks import attend_with_caps_and_sinks
from subquad.kernels import native
from subquad.kernels.attention.steps.op import attend_few
from subquad.testing.oracle import qkv

MASKS = {
    "a step": Mask.causal(offset=49),
    "a window": Mask.causal(offset=47) & Mask.window(9),
    "padding": Mask.padding(keys=torch.tensor([50, 0])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, False), (None, True), (2.0, True)])
@pytest.mark.parametrize("name", MASKS)
def test_few_queries_equal_the_logits(name, softcap, sinks, dtype):
    q, k, v = (x.detach().to(dtype) for x in qkv(3, 50, B=2, H=4, D=16, E=16))
    tensors = q, k[:, :2], v[:, :2]
    options = {"softcap": softcap, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=dtype) if sinks else None}
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        have = attend_with_caps_and_sinks(*tensors, MASKS[name], **options)
    few = "subquad::steps_forward" in {event.key for event in trace.key_averages()}
    assert few == native.is_vectorised()
    query = tensors[0].clone().requires_grad_()  # which the kernel does not take
    want = attend_with_caps_and_sinks(query, *tensors[1:], MASKS[name], **options).detach()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(have, want, atol=tolerance, rtol=tolerance)
    with sq.use_backend("reference"):
        torch.testing.assert_close(
            attend_with_caps_and_sinks(*tensors, MASKS[name], **options), want, atol=2e-2, rtol=2e-2
        )


def test_the_number_of_sinks_is_that_of_heads():
    q, k, v = (x.detach() for x in qkv(3, 50, B=2, H=4, D=16, E=16))
    with pytest.raises(ValueError, match="there are 4 heads"):
        attend_with_caps_and_sinks(q, k, v, MASKS["a step"], sinks=torch.zeros(3))


@pytest.mark.parametrize("softcap", [-2.0, 0.0])
def test_a_cap_that_is_not_positive_is_left_to_plain_pytorch(softcap):
    """c·tanh(x/c) is the same for −c, and NaN for c = 0, as in the models' own code."""
    q, k, v = (x.detach() for x in qkv(3, 50, B=2, H=4, D=16, E=16))
    have = attend_with_caps_and_sinks(q, k, v, MASKS["a step"], softcap=softcap)
    if softcap:
        want = attend_with_caps_and_sinks(q, k, v, MASKS["a step"], softcap=-softcap)
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)
    else:
        logits = (q @ k.mT / 4.0 / softcap).tanh() * softcap
        assert torch.equal(have.isnan(), (logits.softmax(-1) @ v).isnan())
    if native.refusal() is None:
        with (
            sq.use_backend("cpu"),
            pytest.raises(ValueError, match=f"softcap is {softcap}, and the kernel knows positive"),
        ):
            attend_few(q, k, v, None, causal=True, offset=47, scale=0.25, softcap=softcap)
