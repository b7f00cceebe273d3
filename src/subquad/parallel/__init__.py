"""Sequence parallelism: one sequence, whose tokens are split over the ranks of a process group.

ctx = sq.parallel.Sequence.even(tokens, group)        which rank has which tokens
q, k, v = (ctx.shard(x, dim=2) for x in (q, k, v))    each rank's own
out = sq.attention(q, k, v, method="performer", parallel=ctx)
"""

from subquad.parallel.collectives import Traffic, traffic
from subquad.parallel.current import use
from subquad.parallel.groups import MODES
from subquad.parallel.ranks import Ranks
from subquad.parallel.sequence import Sequence

__all__ = ["MODES", "Ranks", "Sequence", "Traffic", "traffic", "use"]
