"""Products of one row with weights, written as sums, for which Inductor generates code at the speed of memory."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def write_as_sums(graph: fx.Graph) -> None:
    """Replace each product of one row `x` with weights `W` on a CPU by a sum, in place.

    What `torch.nn.Linear` computes for one token is y_n = Σ_k x_k W_nk + b_n, and nearly all of its time goes into
    reading `W`, which no other row shares. The libraries behind `linear` arrange weights for products of many rows; of
    the sum, Inductor makes a loop over `W` as it is stored, with products and sums in fp32 that are rounded once.

    Products of several rows stay, and so do those on another device, with quantised weights or a single vector of them,
    and with inputs that autocast converts.
    """
    for node in graph.find_nodes(op="call_function", target=torch._C._nn.linear):
        if _has_one_row(_value(node), *map_arg(node.args, _value), **map_arg(node.kwargs, _value)):
            with graph.inserting_before(node):
                product = _product(*map_arg(node.args, _proxy), **map_arg(node.kwargs, _proxy))
            product.node.meta["example_value"] = _value(node)  # which the next product may ask for
            node.replace_all_uses_with(product.node)
            graph.erase_node(node)


def _value(node: fx.Node) -> Any:
    """The tensor that Dynamo has traced the node with, which has its shape and dtype alone."""
    return node.meta.get("example_value")


def _proxy(node: fx.Node) -> Any:
    """The node as a tensor, whose operators are written into the graph."""
    return fx.Proxy(node)


def _product(input: Any, weight: Any, bias: Any = None) -> Any:
    """`torch.nn.functional.linear` of one row; `weight` enters the product as it is, so that freezing keeps its dtype.

    A conversion of weights alone would be a constant, which Inductor would store in fp32 and read instead.
    """
    product = torch.sum(torch.unsqueeze(input, -2) * weight, -1)
    return product if bias is None else product + bias


def _has_one_row(product: Any, input: Any, weight: Any, bias: Any = None) -> bool:
    """True if a product is one of floating-point tensors on a CPU, all of one dtype, with one row."""
    tensors = [product, input, weight, *([] if bias is None else [bias])]
    if not all(isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x) for x in tensors):
        return False
    return (
        product.dtype.is_floating_point
        and all(x.dtype == product.dtype and x.device.type == "cpu" for x in tensors)
        and all(isinstance(size, int) and size == 1 for size in input.shape[:-1])
        and weight.ndim == 2
        and (bias is None or bias.ndim <= 1)
    )
