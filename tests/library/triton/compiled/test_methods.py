"""Whole methods, forward and backward, at several lengths: nothing that they launch spills.

An op by itself is launched with sizes that a test chose; how long lists are, which of them there are, and which numbers
are 1 follows the length and the method.
"""

import pytest
import torch

import subquad as sq
from subquad.tools.measure.gpu_model import GpuLoad, launches_of_passes, methods
from tests.library.triton.compiled.fits import assert_all_fit, distinct

LENGTHS = 512, 1000, 4096, 16384
IN_CI = "clustered-tail", "i-clustered"  # which between them launch every kernel of clusters, members and cells


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("method", [m if m in IN_CI else pytest.param(m, marks=pytest.mark.long) for m in methods()])
def test_kernels_of_a_method(method, D, dtype):
    assert_all_fit(launches_of_passes(sq.parse_method(method), [GpuLoad(n, width=D, dtype=dtype) for n in LENGTHS]))


def test_most_kernels_are_compiled_once_for_all_lengths():
    """All that `launch.kernel` makes, unless constants differ."""
    method = sq.parse_method("clustered-tail")
    short, long = (launches_of_passes(method, [GpuLoad(length)]) for length in (1000, 4096))
    names = "cells_forward", "cells_to_keys", "members_forward", "members_to_queries", "order_members"
    for name in names:
        assert len(distinct([x for x in (*short, *long) if x.name == name])) == len(
            distinct([x for x in long if x.name == name])
        )
