"""Clustered and improved clustered attention in plain PyTorch, step by step as in the paper."""

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.core.versions import sym_min
from subquad.kernels.attention.softmax import hide, visible_logsumexp, visible_softmax
from subquad.kernels.precision import upcast
from subquad.kernels.selection.blocks.reference import sort_into_blocks
from subquad.kernels.selection.group_means import broadcast, group_mean
from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.selection.kmeans.op import hamming_kmeans
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.padding import cleared

BLOCK = 32  # slots a block: small enough to waste few, large enough for dense products


def cluster_queries(
    query: Float[Tensor, "B H N D"],
    valid: Bool[Tensor, "B N"] | None,
    *,
    clusters: int,
    bits: int,
    iterations: int,
    seed: int,
) -> Int64[Tensor, "B H N"]:
    """Cluster each head's queries: labels in [0, clusters), `clusters` for padded queries.

    As `query_clusters` with `space="queries"` and `refine=0`, which divides the queries by their largest number first:
    rounding may turn a bit of the hash there, and the compiled kernels hash the queries as they are.
    """
    codes = hash_codes(query, bits, seed, centre=True, valid=valid)
    return hamming_kmeans(codes, valid, clusters, bits, iterations)


def clustered_attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    query_valid: Bool[Tensor, "B N"] | None,
    key_valid: Bool[Tensor, "B M"] | None,
    *,
    clusters: int,
    topk: int,
    bits: int,
    iterations: int,
    scale: float,
    seed: int,
    labels: Int64[Tensor, "B H N"] | None = None,
    dropout_p: float = 0.0,
    wants_lse: bool = False,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"] | None]:
    """Clustered attention, equations 3 to 6 of Vyas et al. 2020, or improved with `topk` > 0, equations 9 to 17.

        Q^c_j = Σ_{i ∈ S_j} Q_i / |S_j|,   A^c = softmax(scale·Q^c Kᵀ),   V̂_i = (A^c V)_j for i ∈ S_j
        topk: A^c on the topk largest keys of j is replaced by its mass there times each member's own softmax on them

    S are at most `clusters` clusters of the queries by their sign hashes (`hash_codes`, `hamming_kmeans`), or what
    `labels` give: numbers in [0, clusters), read for queries that are not padding. Padded queries are in no cluster and
    get 0. lse_i = ln Σ_l e^{scale·Q^c_j·K_l}, or ln of the sum over its own top keys divided by their mass; None unless
    it is wanted. The gradient flows through the means, A^c and lse; the labels are constants. Compiled kernels never
    store the C×M weights of the centroids.
    """
    query, key, value = cleared(query, query_valid), cleared(key, key_valid), cleared(value, key_valid)
    if labels is None:
        settings = {"clusters": clusters, "bits": bits, "iterations": iterations, "seed": seed}
        labels = cluster_queries(query, query_valid, **settings)
    elif query_valid is not None:
        labels = labels.masked_fill(~query_valid[:, None], clusters)
    query, key, value = upcast(query)[0], *(repeat_heads(x, query.shape[1]) for x in upcast(key, value))
    visible = None if key_valid is None else key_valid[:, None, None, :]

    centroids = group_mean(query, labels, clusters)
    logits = centroids @ key.transpose(-1, -2) * scale
    of_centroids = visible_softmax(logits, visible)
    if topk == 0:
        lse = broadcast(visible_logsumexp(logits, visible)[..., None], labels)[..., 0]
        return broadcast(F.dropout(of_centroids, dropout_p) @ value, labels), lse if wants_lse else None

    # By logits, which order the keys as A^c does: weights that underflow to 0 would tie with those of hidden keys.
    top = hide(logits, visible).detach().topk(sym_min(topk, key.shape[2]), dim=-1).indices
    mass = of_centroids.gather(-1, top).sum(-1, keepdim=True)
    remaining = F.dropout(of_centroids.scatter(-1, top, 0.0), dropout_p) @ value

    blocks = sort_into_blocks(labels, clusters, BLOCK)
    top_keys, top_values = (blocks.of_group(_rows(x, top)) for x in (key, value))
    member_logits = blocks.gather(query) @ top_keys.transpose(-1, -2) * scale
    allowed = None if visible is None else blocks.of_group(_allowed(visible, top)[..., None]).transpose(-1, -2)
    of_members = blocks.scatter(F.dropout(visible_softmax(member_logits, allowed), dropout_p) @ top_values)
    mass = broadcast(mass, labels)
    # The top keys have m̂ of the whole weight.
    lse = blocks.scatter(visible_logsumexp(member_logits, allowed)[..., None]) - mass.masked_fill(mass == 0, 1.0).log()
    return mass * of_members + broadcast(remaining, labels), lse[..., 0] if wants_lse else None


def _rows(x: Float[Tensor, "B H M D"], top: Int64[Tensor, "B H C K"]) -> Float[Tensor, "B H C K D"]:
    picked = x.gather(2, top.flatten(2)[..., None].expand(-1, -1, -1, x.shape[3]))
    return picked.unflatten(2, top.shape[2:])


def _allowed(visible: Tensor, top: Int64[Tensor, "B H C K"]) -> Tensor:
    return visible.expand(*top.shape[:3], -1).gather(-1, top)
