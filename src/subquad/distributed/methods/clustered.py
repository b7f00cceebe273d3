"""Clustered attention over ranks, whose clusters hold queries of all of them."""

from torch import Tensor

from subquad.distributed.attention.clustered_attention import clustered_attention_of_ranks
from subquad.distributed.attention.tail import tail_of_ranks
from subquad.distributed.selection.clusters import ClusterSettings
from subquad.distributed.strategies import Strategy, register
from subquad.distributed.token_split import TokenSplit
from subquad.methods.clustered import Clustered
from subquad.methods.clustered_tail import ClusteredTail
from subquad.methods.core.call import Call, Partial
from subquad.methods.i_clustered import ImprovedClustered


def attend_clustered(
    method: Clustered | ImprovedClustered,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    split: TokenSplit,
    topk: int = 0,
) -> Partial:
    """Attention of the centroids to the keys of all ranks; with `topk`, of each query to its cluster's top keys too."""
    clusters = min(method.clusters, split.tokens)
    settings = ClusterSettings(clusters, method.bits, method.iterations, call.seed, method.space, method.refine)
    valid = call.mask.query_padding(query.shape[2]), call.mask.key_padding(key.shape[2])
    return clustered_attention_of_ranks(query, key, value, *valid, split, settings, topk=topk, scale=call.scale)


def attend_improved(
    method: ImprovedClustered, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    """`attend_clustered` with the top keys of each cluster."""
    return attend_clustered(method, query, key, value, call, split, topk=method.topk)


def attend_with_tail(
    method: ClusteredTail, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    """Attention to the top keys of each cluster, and to cells that hold the other keys of all ranks."""
    clusters = min(method.clusters, split.tokens)
    settings = ClusterSettings(clusters, method.bits, method.iterations, call.seed, "logits", method.refine)
    valid = call.mask.query_padding(query.shape[2]), call.mask.key_padding(key.shape[2])
    topk, cells = method.topk, method.cells
    return tail_of_ranks(query, key, value, *valid, split, settings, topk=topk, cells=cells, scale=call.scale)


register(Clustered, Strategy(kind="partials", attend=attend_clustered))
register(ImprovedClustered, Strategy(kind="partials", attend=attend_improved))
register(
    ClusteredTail,
    Strategy(
        kind="partials",
        attend=attend_with_tail,
        fits=lambda method: method.clusters > 0 and method.topk > 0 and method.window == 0,
        needs="numbers for `clusters` and `topk`, which 0 lets grow with the length, and window=0",
    ),
)
