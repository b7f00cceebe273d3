"""Products of one row with weights, written as sums, for which Inductor generates code at the speed of memory."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def write_as_sums(graph: fx.Graph) -> None:
    """Replace each product of one row `x` with weights `W` on a CPU by a sum, in place.

    What `torch.nn.Linear` computes for one token is y_n = Σ_k x_k W_nk + b_n, and nearly all of its time goes into
    reading `W`, which no other row shares. The libraries behind `linear` arrange weights for products of many rows; of
    the sum, Inductor makes a loop over `W` as it is stored, with products and sums in fp32 that are rounded once.

    Products of several rows stay, and so do those on another device, with quantised weights, and with inputs that
    autocast converts.
    """
    for node in graph.find_nodes(op="call_function", target=torch._C._nn.linear):
        if _has_one_row(node):
            with graph.inserting_before(node):
                product = _product(*(fx.Proxy(x) for x in node.all_input_nodes))
            node.replace_all_uses_with(product.node)
            graph.erase_node(node)


def _product(x: Any, weight: Any, bias: Any = None) -> Any:
    """`torch.nn.functional.linear` of one row; `weight` enters the product as it is, so that freezing keeps its dtype.

    A conversion of weights alone would be a constant, which Inductor would store in fp32 and read instead.
    """
    product = torch.sum(torch.unsqueeze(x, -2) * weight, -1)
    return product if bias is None else product + bias


def _has_one_row(node: fx.Node) -> bool:
    """True if a product is one of floating-point tensors on a CPU, all of one dtype, with one row."""
    operands = [operand.meta.get("example_value") for operand in (node, *node.all_input_nodes)]
    tensors = [x for x in operands if isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x)]
    if len(tensors) < len(operands):
        return False
    product, x = tensors[:2]
    return (
        product.dtype.is_floating_point
        and all(each.dtype == product.dtype and each.device.type == "cpu" for each in tensors)
        and all(isinstance(size, int) and size == 1 for size in x.shape[:-1])
    )
