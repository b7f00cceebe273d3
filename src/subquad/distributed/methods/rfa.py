"""Random feature attention over ranks: sums over the keys, and under a causal mask those before each rank's own."""

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.distributed.collectives import add
from subquad.distributed.rows import combine_together, of_earlier
from subquad.distributed.strategies import Strategy, register
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.attention.products.gated import gated_product
from subquad.kernels.tokens.heads import repeat_heads
from subquad.methods.core.call import Call, Partial
from subquad.methods.rfa import RandomFeature, normalised


def attend(method: RandomFeature, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit) -> Partial:
    """Map queries and keys to features, sum over the keys (or recurrently, with gates), and read the sums."""
    of_query, of_key, value, log_gate = method.mapped(query, key, value, call)
    if not call.mask.is_causal:
        sums = add(of_key.mT @ value, split.group)
        return normalised(of_query @ repeat_heads(sums, query.shape[1])), None
    earlier = sums_of_earlier(of_key, value, log_gate, split)
    return normalised(gated_product(of_query, of_key, value, log_gate, earlier)[0]), None


def sums_of_earlier(
    of_key: Float[Tensor, "B G N R"],
    value: Float[Tensor, "B G N F"],
    log_gate: Float[Tensor, "B G N"],
    split: TokenSplit,
) -> Float[Tensor, "B G R F"]:
    """S and z before this rank's first token, by one exchange: each rank's own, which the ranks between have shrunk."""
    to_end = (log_gate.sum(2, keepdim=True) - log_gate.cumsum(2)).exp()
    local = (of_key * to_end.unsqueeze(-1)).mT @ value
    gate = log_gate.sum(2)[..., None, None].expand(*local.shape[:3], 1)
    (combined,) = combine_together([of_earlier(torch.cat([local, gate], dim=3), _shrunk_and_added)], split.group)
    return combined[..., :-1]


def _shrunk_and_added(sums: Float[Tensor, "n F"], more: Float[Tensor, "n F"]) -> Float[Tensor, "n F"]:
    """The sums behind the tokens of a rank, whose last column is ln g of all its tokens."""
    return sums * more[:, -1:].exp() + more


register(RandomFeature, Strategy(kind="partials", attend=attend))
