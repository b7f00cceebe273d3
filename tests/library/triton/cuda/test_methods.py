"""Tests that need a GPU: no method waits for it, CUDA graphs capture all of them, and torch compiles them.

The default device is the CPU here, as it is for users: a method must put what it makes beside its inputs.
"""

import pytest
import torch

import subquad as sq
from subquad.testing.oracle import gradients, hidden_for
from tests.library.test_contract import OF_OTHER_CODE
from tests.library.triton.devices import DEVICE

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
B, H, G, N, D = 2, 4, 2, 200, 32
REDRAWS = "performer:features=16,inputs=learned,redraw=3"  # a redraw reads how many calls there were
METHODS = [
    *(sq.from_dict({"name": name, **sq.METHODS[name].traits.example}) for name in sq.list_methods()),
    *map(sq.parse_method, (text for text in OF_OTHER_CODE if text != REDRAWS)),
]
every_method = pytest.mark.parametrize("method", METHODS, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def tensors_on_the_cpu():
    before = torch.get_default_device()
    torch.set_default_device(None)
    yield
    torch.set_default_device(before)


def inputs(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(B, heads, N, D, generator=generator) for heads in (H, G, G))
    return [x.to(DEVICE, dtype).requires_grad_() for x in made]


def bound(method: sq.Method) -> sq.BoundMethod:
    return method.bind(heads=H, kv_heads=G, head_dim=D, max_length=N).eval().to(DEVICE)


@dtypes
@every_method
def test_output_and_gradients_are_on_the_device_and_finite(method, dtype):
    q, k, v = inputs(dtype)
    out = bound(method)(q, k, v, **hidden_for(method, q))
    assert out.device == q.device
    assert out.dtype == dtype
    (out.float() ** 2).sum().backward()
    assert out.isfinite().all()
    for x in (q, k, v):
        assert x.grad is None or x.grad.isfinite().all()  # None: a method may share keys with queries, or use no key


@every_method
def test_nothing_waits_for_the_device(method):
    if method.name == "adaptive-span":
        pytest.skip("it reads its largest span: `Spans.reach`")
    layer, tensors = bound(method), inputs()
    hidden = hidden_for(method, tensors[0].detach())
    gradient = torch.ones_like(tensors[0])
    layer(*tensors, **hidden).backward(gradient)  # compiles, and makes what is kept
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(*tensors, **hidden).backward(gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_method
def test_a_cuda_graph_captures_a_forward_pass(method):
    layer, tensors = bound(method), [x.detach() for x in inputs()]
    others = [x.detach() for x in inputs(seed=1)]
    with torch.no_grad():
        want = layer(*others, **hidden_for(method, others[0])).clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(*tensors, **hidden_for(method, tensors[0]))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(*tensors, **hidden_for(method, tensors[0]))
        for x, other in zip(tensors, others, strict=True):
            x.copy_(other)
        graph.replay()
    torch.testing.assert_close(out, want)


@pytest.mark.skipif(TORCH < (2, 13), reason="torch.compile cannot trace torch.sym_min before torch 2.13")
@every_method
def test_torch_compiles_it_as_one_graph(method):
    torch._dynamo.reset()
    layer, compiled_inputs, eager_inputs = bound(method), inputs(torch.float32), inputs(torch.float32)
    want = layer(*eager_inputs, **hidden_for(method, eager_inputs[0]))
    run = torch.compile(lambda q, k, v: layer(q, k, v, **hidden_for(method, q)), fullgraph=True, backend="aot_eager")
    out = run(*compiled_inputs)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    torch.set_default_device(DEVICE)  # of the loss's weights
    for a, b in zip(gradients(out, *compiled_inputs), gradients(want, *eager_inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
