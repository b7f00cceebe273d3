"""Products of one row with weights become sums in a graph, and no others do."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from subquad.hf import step_backend
from subquad.hf.products_of_one_row import SumsOfOneRow

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
PRODUCTS = {"mm.default", "addmm.default"}


def rewritten(model: nn.Module, x: Tensor, autocast: bool = False, freezing: bool = False) -> tuple[Tensor, set[str]]:
    """The output of the graph that Inductor would make code of, and the names of the operators in it."""
    operators: set[str] = set()

    def keep(graph, *_, **options):
        operators.update(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        patches = {"joint_custom_pre_pass": SumsOfOneRow()}
        return compile_fx.compile_fx(graph, inputs, inner_compile=keep, config_patches=patches)

    torch._dynamo.reset()
    with torch.no_grad(), inductor.patch(freezing=freezing), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return torch.compile(model, fullgraph=True, backend=backend)(x), operators


class Rounded(nn.Module):
    """A linear layer whose weights are integers with one scale for each output, computed with as torchao does."""

    def __init__(self, layer: nn.Linear, stored: torch.dtype = torch.int8):
        super().__init__()
        scale = layer.weight.detach().abs().amax(1) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale[:, None]).round().to(stored))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        product = torch.mm(x.reshape(-1, x.shape[-1]), self.weight.t().to(x.dtype)) * self.scale
        return product.reshape(*x.shape[:-1], product.shape[-1])


def layer_of(product) -> nn.Module:
    """A layer of 40 inputs and outputs that computes this of its input, weights and bias."""

    class Layer(nn.Linear):
        def forward(self, x):
            return product(x, self.weight, self.bias)

    return Layer(40, 40)


@pytest.mark.parametrize("freezing", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(40,), (1, 40), (1, 1, 40)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_product_of_one_row_is_a_sum(shape, bias, freezing, dtype):
    layer, x = nn.Linear(40, 30, bias=bias, dtype=dtype), torch.randn(shape, dtype=dtype)
    y, operators = rewritten(layer, x, freezing=freezing)
    assert not operators & PRODUCTS
    assert "sum.dim_IntList" in operators
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y, layer(x), atol=16 * eps, rtol=eps)


@pytest.mark.parametrize("shape", [(40,), (1, 40), (1, 1, 40)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_product_of_one_row_with_rounded_weights_is_a_sum(shape, dtype):
    layer, x = Rounded(nn.Linear(40, 30, dtype=dtype)), torch.randn(shape, dtype=dtype)
    y, operators = rewritten(layer, x)
    assert not operators & PRODUCTS
    assert "sum.dim_IntList" in operators
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y, layer(x), atol=16 * eps, rtol=2 * eps)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, weight, bias: F.linear(x, weight, x),
        lambda x, weight, bias: F.linear(bias=2 * x, weight=weight, input=x),
        lambda x, weight, bias: F.linear(x, weight, bias[3]),
        lambda x, weight, bias: torch.addmm(bias, x[None], weight.T)[0],
        lambda x, weight, bias: F.linear(x, weight, bias[:1]),
    ],
    ids=["bias is the input", "keywords", "bias without axes", "addmm", "bias of one number"],
)
def test_each_operand_is_where_it_was(product):
    layer, x = layer_of(product), torch.randn(40)
    y, operators = rewritten(layer, x)
    assert not operators & PRODUCTS
    torch.testing.assert_close(y, layer(x))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_that_is_not_contiguous_keeps_its_values(dtype):
    layer, x = nn.Linear(40, 30, dtype=dtype), torch.randn(40, 3, dtype=dtype)
    eps = torch.finfo(dtype).eps
    for row in (lambda x: x[:, 1], lambda x: x.T[2:], lambda x: x[:1, :1].expand(1, 40)):
        y, operators = rewritten(nn.Sequential(Taken(row), layer), x)
        assert not operators & PRODUCTS
        torch.testing.assert_close(y, layer(row(x)), atol=16 * eps, rtol=eps)


class Taken(nn.Module):
    """A view of the input."""

    def __init__(self, view):
        super().__init__()
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(x)


def test_products_of_products_are_sums():
    layers, x = nn.Sequential(nn.Linear(40, 36), nn.Linear(36, 25), nn.Linear(25, 24)), torch.randn(1, 40)
    y, operators = rewritten(layers, x)
    assert not operators & PRODUCTS
    torch.testing.assert_close(y, layers(x))


def test_gradients_are_those_of_the_layer():
    layer, x = nn.Linear(40, 30), torch.randn(1, 40)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(layer(x).square().sum(), [layer.weight, layer.bias])
    with inductor.patch(joint_custom_pre_pass=SumsOfOneRow()):
        found = torch.autograd.grad(compiled(x).square().sum(), [layer.weight, layer.bias])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(2, 40), (1, 2, 40), (2, 1, 40), (0, 40)])
def test_a_product_of_several_rows_stays(shape):
    for layer in (nn.Linear(40, 30), nn.Linear(40, 30, bias=False), Rounded(nn.Linear(40, 30))):
        assert "sum.dim_IntList" not in rewritten(layer, torch.ones(shape))[1]


@pytest.mark.parametrize(
    "product",
    [
        lambda x, weight, bias: F.linear(x, 2 * weight),
        lambda x, weight, bias: F.linear(x, weight[:30]),
        lambda x, weight, bias: F.linear(x, x[0, :, None] * x),
        lambda x, weight, bias: F.linear(x.bfloat16(), weight.bfloat16()),
        lambda x, weight, bias: F.linear(x, weight.to(torch.int8).float()),
        lambda x, weight, bias: torch.mm(x, weight),
        lambda x, weight, bias: torch.addmm(bias, x, weight.T, alpha=2, beta=3),
    ],
    ids=["computed", "some", "of the input", "converted", "converted twice", "stored the other way round", "scaled"],
)
def test_a_product_with_other_weights_stays(product):
    layer, x = layer_of(product), torch.randn(1, 40)
    y, operators = rewritten(layer, x)
    assert operators & PRODUCTS
    torch.testing.assert_close(y, layer(x))


def test_a_product_under_autocast_stays():
    assert rewritten(nn.Linear(40, 30), torch.ones(1, 40), autocast=True)[1] & PRODUCTS


@pytest.mark.parametrize(("device", "stays"), [("cpu", False), ("cuda", True)])
def test_only_products_on_a_cpu_are_sums(device, stays):
    with FakeTensorMode():  # which needs no GPU
        x, weight = torch.empty(1, 40, device=device), torch.empty(30, 40, device=device)
        graph = make_fx(lambda x, weight: torch.mm(x, weight.permute(1, 0)))(x, weight).graph
        SumsOfOneRow()(graph)
    assert ("mm.default" in {node.target.__name__ for node in graph.nodes if node.op == "call_function"}) is stays


def test_a_product_stays_where_its_rounded_weights_would_be_a_constant_in_floating_point():
    layer, x = Rounded(nn.Linear(40, 30)), torch.randn(1, 40)
    y, operators = rewritten(layer, x, freezing=True)
    assert "sum.dim_IntList" not in operators
    torch.testing.assert_close(y, layer(x))


def test_a_product_with_integers_of_another_width_stays():
    layer, x = Rounded(nn.Linear(40, 30), torch.int16), torch.randn(1, 40)
    y, operators = rewritten(layer, x)
    assert operators & PRODUCTS
    torch.testing.assert_close(y, layer(x))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_inductor_rounds_the_sum_of_one_row_once(dtype):
    """The products of each half nearly cancel those of the other, so a rounding before the end shows."""
    layer, x = nn.Linear(600, 70, bias=False, dtype=dtype), 1 + torch.rand(1, 600, dtype=dtype)
    with torch.no_grad():
        layer.weight[:, 300:] = -layer.weight[:, :300] * x[:, :300] / x[:, 300:]
    torch._dynamo.reset()
    with torch.no_grad():
        y = torch.compile(layer, fullgraph=True, backend=step_backend)(x)
        exact = layer.double()(x.double())
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    largest = (x.double().abs() @ layer.weight.abs().T).max()
    error = (y.double() - exact).abs().max()
    assert error <= torch.finfo(dtype).eps * exact.abs().max() / 2 + 600 * eps * largest
