"""The calls that a few ranks make together, by what the ranks send each other.

Each module lists CASES, whose results equal those of one process, REFUSED, and SENT: a method, a mode, and the number
of exchanges of a forward and a backward pass. LONG are more cases, which run with `pytest -m long` alone.
"""

from tests.library.distributed.cases import (
    by_heads,
    clusters,
    features,
    halo,
    hashed,
    kept,
    layers,
    near,
    ones,
    patterns,
    projections,
    registered,
    ring,
    shares,
    tails,
)

OF_ALL = (
    by_heads,
    clusters,
    features,
    halo,
    hashed,
    kept,
    layers,
    near,
    ones,
    patterns,
    projections,
    registered,
    ring,
    shares,
    tails,
)

CASES = [case for module in OF_ALL for case in module.CASES]
LONG = [case for module in OF_ALL for case in getattr(module, "LONG", ())]
REFUSED = [case for module in OF_ALL for case in module.REFUSED]
SENT = [sent for module in OF_ALL for sent in module.SENT]
