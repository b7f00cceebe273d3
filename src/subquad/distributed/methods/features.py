"""Linear attention and Performer over ranks: the sums that a rank's keys leave behind are combined."""

from functools import partial

from torch import Tensor

from subquad.distributed.attention.feature_attention import attend_features_of_ranks
from subquad.distributed.strategies import Strategy, register
from subquad.distributed.token_split import TokenSplit
from subquad.methods.core.call import Call, Partial
from subquad.methods.linear import LinearAttention
from subquad.methods.performer import Performer


def attend(
    method: LinearAttention | Performer, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    """Map, sum over the keys of all ranks, read."""
    return method.attend_by(partial(attend_features_of_ranks, split=split), query, key, value, call)


register(LinearAttention, Strategy(kind="partials", attend=attend))
register(Performer, Strategy(kind="partials", attend=attend))
