"""Products of one row with weights become sums in a graph, and no others do."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from subquad.hf import step_backend
from subquad.hf.products_of_one_row import write_as_sums

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def rewritten(model: nn.Module, x: Tensor, autocast: bool = False) -> tuple[Tensor, list[str]]:
    """The output of the graph with sums, and the names of the operators in it."""
    operators: list[str] = []

    def backend(graph, _):
        write_as_sums(graph.graph)
        graph.graph.lint()
        graph.recompile()
        operators.extend(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return torch.compile(model, fullgraph=True, backend=backend)(x), operators


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 1, 8)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_product_of_one_row_is_a_sum(shape, bias, dtype):
    layer, x = nn.Linear(8, 5, bias=bias, dtype=dtype), torch.randn(shape, dtype=dtype)
    y, operators = rewritten(layer, x)
    assert "linear" not in operators
    assert "sum" in operators
    eps = torch.finfo(dtype).eps  # without Inductor, each product is rounded
    torch.testing.assert_close(y, layer(x), atol=16 * eps, rtol=eps)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, weight: F.linear(x, weight, x),
        lambda x, weight: F.linear(x[:1, None], x[:1, None]),
        lambda x, weight: F.linear(bias=2 * x, weight=weight, input=x),
    ],
    ids=["bias is the input", "weights are the input", "keywords"],
)
def test_each_operand_is_where_it_was(product):
    class Layer(nn.Linear):
        def forward(self, x):
            return product(x, self.weight)

    layer, x = Layer(5, 5), torch.randn(5)
    y, operators = rewritten(layer, x)
    assert "linear" not in operators
    torch.testing.assert_close(y, layer(x))


def test_products_of_products_are_sums():
    layers, x = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(5, 4)), torch.randn(1, 8)
    y, operators = rewritten(layers, x)
    assert "linear" not in operators
    torch.testing.assert_close(y, layers(x))


def test_a_product_whose_bias_would_add_an_axis_stays():
    class Layer(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight, self.bias[None])

    layer, x = Layer(8, 5), torch.randn(8)
    y, operators = rewritten(layer, x)
    assert "linear" in operators
    torch.testing.assert_close(y, layer(x))


def test_a_product_with_a_single_vector_of_weights_stays():
    class Layer(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight[0])

    layer, x = Layer(8, 5), torch.randn(1, 8)
    y, operators = rewritten(layer, x)
    assert "linear" in operators
    torch.testing.assert_close(y, layer(x))


def test_a_product_of_no_outputs_or_no_inputs_is_the_bias():
    for sizes in ((0, 3), (3, 0)):
        layer = nn.Linear(*sizes)
        y, _ = rewritten(layer, torch.ones(1, sizes[0]))
        torch.testing.assert_close(y, layer(torch.ones(1, sizes[0])))


@pytest.mark.parametrize("shape", [(2, 8), (1, 2, 8), (2, 1, 8), (0, 8)])
def test_a_product_of_several_rows_stays(shape):
    assert rewritten(nn.Linear(8, 5), torch.ones(shape))[1] == ["linear"]


def test_a_product_stays_on_another_device_under_autocast_and_of_quantised_weights():
    assert rewritten(nn.Linear(8, 5, device="meta"), torch.ones(1, 8, device="meta"))[1] == ["linear"]
    assert "linear" in rewritten(nn.Linear(8, 5), torch.ones(1, 8), autocast=True)[1]
    quantised = nn.Linear(8, 5, bias=False)
    quantised.weight = nn.Parameter(TwoTensor(*[quantised.weight.detach()] * 2))
    assert rewritten(quantised, torch.ones(1, 8))[1] == ["linear"]


def test_other_operators_stay():
    class Other(nn.Module):
        def forward(self, x):
            return F.softmax(x @ x.mT, -1)

    assert "sum" not in rewritten(Other(), torch.ones(1, 8))[1]


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
