"""Sequence parallelism: one sequence, whose tokens are split over the ranks of a process group.

ctx = sq.distributed.Sequence.even(tokens, group)        which rank has which tokens
q, k, v = (ctx.shard(x, dim=2) for x in (q, k, v))    each rank's own
out = sq.attention(q, k, v, method="performer", parallel=ctx)

How the ranks run a method is registered for its class (`strategies`); without a strategy it runs by heads.
"""

import subquad.distributed.methods  # noqa: F401  (registers the strategies of this package's methods)
from subquad.distributed.collectives import Traffic, traffic
from subquad.distributed.current import use
from subquad.distributed.process_group import MODES
from subquad.distributed.ranks import Ranks
from subquad.distributed.sequence import Sequence
from subquad.distributed.strategies import Strategy, register

__all__ = ["MODES", "Ranks", "Sequence", "Strategy", "Traffic", "register", "traffic", "use"]
