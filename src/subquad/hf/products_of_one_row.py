"""Products of one row with weights, written as sums, for which Inductor generates code at the speed of memory.

What a linear layer computes for one token is y_n = Σ_k x_k W_nk + b_n, and nearly all of its time goes into reading
`W`, which no other row shares. The libraries behind `linear` arrange weights for products of many rows; of the sum,
Inductor makes a loop over `W` as it is stored, with products and sums in fp32 (in fp64 where `x` is) that are rounded
once.

Weights that torchao has rounded to int8, with one scale for each output, are converted to the dtype of `x` in the
graph, and the scale follows the product. In the sum, each of them is converted where it is read.
"""

import torch
from torch import Tensor, fx
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import Arg, CallFunction, Match, PatternMatcherPass, register_graph_pattern

mm, addmm, permute = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.permute.default
convert = torch.ops.prims.convert_element_type.default
_products = PatternMatcherPass()


class SumsOfOneRow(CustomGraphPass):
    """Replace each product of one row with weights on a CPU by a sum, in graphs that Inductor compiles.

    It is a pass for `torch._inductor.config.joint_custom_pre_pass`. The weights `W` (N, K) are an input or a constant
    of the graph, in floating-point numbers of the row's dtype or, unless weights are frozen, in int8. Other products
    stay: of several rows, on another device, scaled by a number, and with weights that are stored as (K, N) or that the
    graph computes, as under autocast.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Replace the products in place."""
        _products.apply(graph)

    def uuid(self) -> bytes:
        """The name of this version of the pass in Inductor's cache of compiled graphs."""
        return get_hash_for_files((__file__,))


def _is_of_one_row(match: Match) -> bool:
    """True if a product is one of a single row with weights `W` (N, K), on a CPU, and no number scales it."""
    row, matrix = match.args[-2:]
    x = row.meta["val"]
    return (
        x.device.type == "cpu"
        and x.dtype.is_floating_point
        and isinstance(x.shape[0], int)
        and x.shape[0] == 1
        and _weights(matrix) is not None
        and not match.output_node().kwargs
    )


def _weights(matrix: fx.Node) -> fx.Node | None:
    """The weights `W` (N, K) of which a matrix is the transpose, in the graph's inputs or constants; None if it is not.

    Between them there may be a conversion from int8.
    """
    node, transposed, converted = matrix, False, 0
    while node.target in (permute, convert):
        transposed ^= node.target is permute and node.args[1] == [1, 0]
        converted += node.target is convert
        node = node.all_input_nodes[0]
    if not transposed or node.op not in ("placeholder", "get_attr"):
        return None
    if node.meta["val"].dtype == torch.int8:  # frozen, converted weights would be a constant of four times their size
        return node if converted == 1 and not inductor.freezing else None
    return None if converted else node


@register_graph_pattern(CallFunction(mm, Arg(), Arg()), extra_check=_is_of_one_row, pass_dict=_products)
def _without_bias(match: Match, row: fx.Node, matrix: fx.Node) -> None:
    match.replace_by_example(lambda x, w: _sum(x, w).to(x.dtype), [row, _weights(matrix)])


@register_graph_pattern(CallFunction(addmm, Arg(), Arg(), Arg()), extra_check=_is_of_one_row, pass_dict=_products)
def _with_bias(match: Match, bias: fx.Node, row: fx.Node, matrix: fx.Node) -> None:
    match.replace_by_example(lambda b, x, w: (_sum(x, w) + b).to(x.dtype), [bias, row, _weights(matrix)])


def _sum(row: Tensor, weights: Tensor) -> Tensor:
    """Σ_k x_k W_nk of `row` (1, K) and `weights` (N, K), in fp32 or wider: (1, N).

    Weights in floating point are not converted by an operator of their own, because it would be a constant in fp32
    where they are frozen.
    """
    dtype = torch.promote_types(row.dtype, torch.float32)
    x = row.to(dtype)
    if row.dtype != dtype:
        x = x.as_strided(x.shape, (x.shape[1], 1))  # Inductor stores it for this, and the loop over W reads it in fp32
    return torch.sum(x * (weights.to(dtype) if weights.dtype == torch.int8 else weights), -1).unsqueeze(0)
