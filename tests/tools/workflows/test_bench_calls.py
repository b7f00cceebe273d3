"""The calls that are measured, and their memory in a process of its own."""

import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import subquad as sq
from subquad.tools.bench import calls as bench_calls
from subquad.tools.bench.calls import Calls, Load, threads
from subquad.tools.bench.extra_memory import extra_memory

LOAD = Load(length=32, dtype="float32", passes="forward", batch=2, heads=3, head_dim=8, device="cpu", seed=0)
BOTH = replace(LOAD, passes="forward+backward")


def test_inputs_follow_the_load():
    for tensor in Calls(replace(LOAD, dtype="bfloat16")).inputs:
        assert (tensor.shape, tensor.dtype) == ((2, 3, 32, 8), torch.bfloat16)
    same, other = Calls(LOAD).inputs, Calls(replace(LOAD, seed=1)).inputs
    torch.testing.assert_close(same, Calls(LOAD).inputs, rtol=0, atol=0)
    assert not torch.equal(same[0], other[0])
    assert not torch.equal(same[0], same[1])


def test_forward_is_the_method_without_a_graph():
    calls = Calls(LOAD)
    out = calls.call_of("clustered:clusters=4")()
    torch.testing.assert_close(out, sq.attention(*calls.inputs, method="clustered:clusters=4"))
    assert not out.requires_grad


def test_full_is_sdpa_itself(monkeypatch):
    monkeypatch.setattr(bench_calls, "attention", lambda *_, **__: pytest.fail("not ours"))
    calls = Calls(LOAD)
    torch.testing.assert_close(calls.call_of("full")(), F.scaled_dot_product_attention(*calls.inputs))


@pytest.mark.parametrize("method", ["full", "local:window=4", "lha:buckets=4"])
def test_a_causal_load_has_causal_calls(method):
    calls = Calls(replace(LOAD, causal=True))
    out = calls.call_of(method)()
    calls.inputs[2].data[:, :, 20:] += 1.0  # later values
    changed = (calls.call_of(method)() != out).any(-1).any(0).any(0)
    assert not changed[:20].any()
    assert changed[20:].all()
    if method == "full":
        torch.testing.assert_close(out[:, :, 0], Calls(LOAD).inputs[2][:, :, 0])


def test_gradients_of_learned_parameters_are_cleared():
    calls = Calls(BOTH)
    calls.call_of("sinkhorn:block=8")()
    assert any(parameter.grad is not None for parameter in calls.learned)
    calls.clear()
    assert all(parameter.grad is None for parameter in calls.learned)


@pytest.mark.parametrize("method", ["full", "i-clustered:clusters=4,topk=4"])
def test_forward_and_backward_leaves_the_gradients_of_one_call(method):
    calls = Calls(BOTH)
    expected = torch.autograd.grad(sq.attention(*calls.inputs, method=method), calls.inputs, calls.gradient)
    for _ in range(2):
        calls.clear()
        assert all(tensor.grad is None for tensor in calls.inputs)
        calls.call_of(method)()
        for tensor, gradient in zip(calls.inputs, expected, strict=True):
            torch.testing.assert_close(tensor.grad, gradient)


@pytest.mark.parametrize("load", [LOAD, BOTH], ids=["forward", "both"])
@pytest.mark.parametrize("method", ["lha:buckets=0,bucket_size=8", "lha:buckets=3,hash=linear"])
def test_learned_methods_run_bound_for_the_load_as_they_start(load, method):
    calls = Calls(load)
    bound = sq.parse_method(method).bind(heads=3, head_dim=8, max_length=32).eval()
    expected = bound(*calls.inputs)
    torch.testing.assert_close(calls.call_of(method)(), expected)
    if load is BOTH:
        gradients = torch.autograd.grad(expected, calls.inputs, calls.gradient)
        for tensor, gradient in zip(calls.inputs, gradients, strict=True):
            torch.testing.assert_close(tensor.grad, gradient)


def test_threads_are_set_and_restored():
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with threads(None):
        assert torch.get_num_threads() == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_memory_of_a_call_holds_its_output_and_its_gradients():
    long = replace(BOTH, batch=1, length=4096, heads=8, head_dim=128)  # each tensor has 16 MiB
    forward, both = (extra_memory(load, "full", threads=1) for load in (replace(long, passes="forward"), long))
    assert forward.method == both.method == "growth of the peak resident set"
    assert forward.bytes / 2**20 == pytest.approx(16, abs=6)
    assert 4 * 16 - 4 <= both.bytes / 2**20 <= 10 * 16


def test_a_process_that_fails_says_why():
    peak = extra_memory(LOAD, "nosuch")
    assert peak.bytes is None
    assert peak.method.startswith("the process failed: ")
    assert "no method 'nosuch'" in peak.method
