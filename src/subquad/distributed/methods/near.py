"""Methods whose queries see near keys: each rank gets those around its own."""

from subquad.distributed.by_halo import by_distance, by_position
from subquad.distributed.strategies import register
from subquad.methods.adaptive_span import AdaptiveSpan
from subquad.methods.bigbird import BigBird
from subquad.methods.fixed import Fixed
from subquad.methods.local import Local
from subquad.methods.longformer import Longformer
from subquad.methods.strided import Strided

register(Local, by_distance(Local.reach))
register(AdaptiveSpan, by_distance(AdaptiveSpan.reach, loss_reads_tokens=False))
# Distant keys and columns are all along the sequence, and random blocks may be on any rank.
register(Strided, by_distance(Strided.reach, fits=lambda method: method.sets == "near"))
register(Fixed, by_position(Fixed.reach, Fixed.globally_visible, fits=lambda method: method.sets == "near"))
register(Longformer, by_position(Longformer.reach, Longformer.globally_visible))
register(BigBird, by_position(BigBird.reach, BigBird.globally_visible, fits=lambda method: method.random == 0))
