"""Every bucketed method equals an N×N softmax with the counts of its own meetings, forward and backward."""

import pytest
import torch

from subquad.testing.oracle import normal
from tests.library.methods.dense import Bucketed, added, once_a_set, oracle, others_first, shared_keys, shared_unit_keys
from tests.library.methods.random_calls import assert_equal_both_ways, random_calls

SHAPES = 80
METHODS = [
    Bucketed("lha:buckets=4,hidden=8"),
    Bucketed("lha:buckets=3,hash=linear,merge=union", once_a_set),
    Bucketed("lha:buckets=3,hidden=8,selection=argmax"),
    Bucketed("lha:buckets=5,bucket_size=4,hidden=8"),
    Bucketed("smyrf:clusters=3,rounds=2"),
    Bucketed("smyrf:cluster_size=6,rounds=1"),
    Bucketed("reformer:rounds=3,chunk=5", others_first, shared_unit_keys),
    Bucketed("reformer:rounds=1,chunk=3,buckets=6", others_first, shared_unit_keys),
    Bucketed("cluster-former:window=3,chunk=6,clusters=4"),
    Bucketed("lsh:buckets=4"),
    Bucketed("local:window=5"),
    Bucketed("routing:clusters=4", keys=shared_keys),
    Bucketed("routing:clusters=3,cluster_size=4", keys=shared_keys),
]


@pytest.mark.parametrize("bucketed", METHODS, ids=lambda bucketed: bucketed.text)
def test_equals_dense_attention_with_the_same_meetings(bucketed: Bucketed):
    met = 0
    for call in random_calls(bucketed.method, SHAPES):
        *_, how = call.bound.prepare(*call.inputs, mask=call.mask)
        out = bucketed.method.run(*call.inputs, how)
        assert_equal_both_ways(call, out, oracle(bucketed, *call.inputs, how))
        met += int((out != 0).sum())
    assert met > 0


@pytest.mark.parametrize("counts", [added, once_a_set])
def test_the_oracle_tells_multiplicity_from_union(counts):
    bucketed = Bucketed("smyrf:clusters=2,rounds=3", counts)
    inputs = [normal(1, 1, 12, 4, seed=i, dtype=torch.float64) for i in range(3)]
    call = bucketed.method.prepare(*inputs)[3]
    same = torch.allclose(oracle(bucketed, *inputs, call), bucketed.method(*inputs), atol=1e-5)
    assert same == (counts is added)
