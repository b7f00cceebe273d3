"""Checks of the sizes that `subquad bench` and `subquad doctor --measure` are given."""

import math

from subquad.core.errors import InputError, check_device
from subquad.core.spelling import instead
from subquad.tools.bench.calls import DTYPES
from subquad.tools.bench.settings import PASSES, BenchSettings

MOST_NUMBERS = 2**50  # of a tensor: a thousand times the memory of the largest machines
MOST_THREADS = 4096


def check_sizes(s: BenchSettings) -> None:
    """Raise InputError if settings do not work together; the message names both sides."""
    assert s.heads is not None  # `resolved`
    assert s.head_dim is not None
    for option, values in (("methods", s.methods), ("lengths", s.lengths)):
        if not values:
            raise InputError(f"nothing to measure: --{option} names none")
    for option, values, known in (("pass", s.passes, PASSES), ("dtype", s.dtypes, tuple(DTYPES))):
        if not values:
            raise InputError(f"nothing to measure: no {option} is named; there are {', '.join(known)}")
        for name in values:
            if name not in known:
                raise InputError(f"no {option} {name!r}{instead(name, known, '')}")
    sizes = [("length", n) for n in s.lengths] + [("batch", s.batch), ("heads", s.heads)]
    sizes += [("head-dim", s.head_dim)] + ([] if s.threads is None else [("threads", s.threads)])
    sizes += [] if s.kv_heads is None else [("kv-heads", s.kv_heads)]
    if s.kv_heads is not None and not s.steps:
        raise InputError(f"--kv-heads {s.kv_heads} is for --steps, which is not given")
    for what, size in sizes:
        if size < 1:
            raise InputError(f"{what} {size} must be at least 1")
    numbers = s.batch * s.heads * max(s.lengths) * s.head_dim
    if numbers > MOST_NUMBERS:
        raise InputError(
            f"batch {s.batch}, heads {s.heads}, length {max(s.lengths)} and head-dim {s.head_dim} make "
            f"{numbers:,} numbers; no memory has room for more than {MOST_NUMBERS:,}"
        )
    if s.threads is not None and s.threads > MOST_THREADS:
        raise InputError(f"threads {s.threads} must be at most {MOST_THREADS:,}")
    if not 0 < s.call_limit < math.inf:
        raise InputError(f"call-limit {s.call_limit:g} must be above 0 seconds and finite")
    if s.seed < 0:
        raise InputError(f"seed {s.seed} must be at least 0")
    if s.seed >= 2**63:
        raise InputError(f"seed {s.seed} must be less than 2⁶³")
    if s.device.partition(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"cannot time device {s.device!r}: only cpu and cuda devices are waited for")
    check_device(s.device)
