"""The op `attend_with_tail`: the exact keys of a cluster, and all other keys as a few cells."""

from jaxtyping import Float, Int64
from torch import Tensor

from subquad.ops.backends import Op, Operator
from subquad.ops.parts.tail import reference


@Op
def attend_with_tail(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    labels: Int64[Tensor, "B H N"],
    cell: Int64[Tensor, "B G M"],
    keys: Int64[Tensor, "B H C K"] | None,
    *,
    clusters: int,
    topk: int,
    cells: int,
    scale: float,
    dropout_p: float = 0.0,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Each query's attention in one softmax over the exact keys of its cluster and a tail of cells: (out, lse).

    With q̄ the mean of a cluster's queries, T its exact keys, and w the softmax of scale·q̄·k_j over those keys of a cell
    that are not in T:

        k̄ = Σ_j w_j k_j,   v̄ = Σ_j w_j v_j,   ln Σ_j e^{scale·q·k_j} ≈ scale·(q − q̄)·k̄ + ln Σ_j e^{scale·q̄·k_j}

    This is the first-order expansion at q = q̄, and exact there: a query that is alone in its cluster has exact
    attention. At q̄ = 0 it would be a plain mean and + ln n.

    Args:
        labels: the cluster of each query; `clusters` for none: out 0, lse −inf.
        cell: the cell of each key; `cells` for none: no query meets such a key, whatever it holds.
        keys: T of each cluster; M where a slot is empty. None: the `topk` keys with the largest logits scale·q̄·k_j.

    The gradient flows through the means q̄, the cells and the exact keys; labels, cells and T are constants.
    """
    return reference.attend_with_tail(
        query,
        key,
        value,
        labels,
        cell,
        keys,
        clusters=clusters,
        topk=topk,
        cells=cells,
        scale=scale,
        dropout_p=dropout_p,
    )
