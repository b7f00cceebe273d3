"""What clustered attention does to queries before it clusters them."""

import torch

from subquad.ops.choose.hashing.reference import centred
from subquad.ops.parts.clustered.reference import cluster_queries
from tests.oracle import normal


def test_centring_leaves_padding_out_of_the_mean():
    query = normal(2, 3, 10, 4)
    real = torch.arange(10) < torch.tensor([10, 6])[:, None]
    out = centred(query, real)
    torch.testing.assert_close(out[0].mean(1), torch.zeros(3, 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(out[1, :, :6].mean(1), torch.zeros(3, 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(centred(query[1:, :, :6], None)[0], out[1, :, :6])


def test_a_common_offset_of_all_queries_changes_no_cluster():
    query, offset = normal(1, 2, 40, 8), 5 * normal(1, 2, 1, 8, seed=1)
    plain, shifted = (
        cluster_queries(q, None, clusters=6, bits=63, iterations=10, seed=0) for q in (query, query + offset)
    )
    assert (plain == shifted).float().mean() > 0.99  # rounding may turn a bit
    assert plain.unique().numel() == 6
