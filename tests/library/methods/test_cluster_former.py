"""Tests of Cluster-Former: a window and a chunk of similar tokens, each key counted as often as they reach it."""

import pytest
import torch

from subquad import ClusterFormer, Mask
from subquad.methods.cluster_former import sorted_chunks
from subquad.testing.oracle import normal, qkv
from tests.library.methods.dense import weighted_softmax


def parts(method: ClusterFormer, q: torch.Tensor, k: torch.Tensor, mask: Mask | None = None) -> list[torch.Tensor]:
    """The number of times that each query meets each key in the window, and in the chunk."""
    N = q.shape[2]
    call = method.prepare(q, k, k, mask=mask)[3]
    return [part.multiplicity(N, N, call.mask) for part in method.meetings(q, k, call)]


@pytest.mark.parametrize("mask", [Mask(), Mask.padding([24, 11]), Mask.causal() & Mask.padding([24, 11])], ids=str)
def test_the_window_is_exact(mask):
    q, k, _ = qkv()
    near, _ = parts(ClusterFormer(window=3, chunk=4, clusters=2), q, k, mask)
    wanted = (mask & Mask.window(3)).to_dense(24, 24).expand(2, 2, 24, 24)
    assert torch.equal(near, wanted.float())


def test_chunks_partition_the_real_tokens():
    q, k, _ = qkv(22)
    _, far = parts(ClusterFormer(window=3, chunk=5, clusters=3), q, k, Mask.padding([22, 12]))
    for item, n, sizes in ((0, 22, [5, 5, 5, 5, 2]), (1, 12, [5, 5, 2])):
        rows = far[item, 0, :n, :n]
        assert torch.equal(rows, rows.T)
        assert (rows.diagonal() == 1).all()
        assert sorted(len(row.nonzero()) for row in rows.unique(dim=0)) == sorted(sizes)
        assert far[item, 0].sum() == rows.sum()


def test_chunks_are_cut_from_the_tokens_sorted_by_label_and_position():
    labels = torch.tensor([[[1, 0, 3, 1, 0, 2, 1, 3]]])  # 3: in no cluster
    valid = labels[0] < 3
    chunks = sorted_chunks(labels, Mask.padding(valid), valid, 2)
    assert chunks.queries[0, 0].tolist() == [[1, 4], [0, 3], [6, 5], [8, 8]]
    assert torch.equal(chunks.keys, chunks.queries)


def test_a_key_that_both_parts_reach_counts_twice():
    q, k, v = qkv(dtype=torch.float64)
    method = ClusterFormer(window=3, chunk=6, clusters=3)
    near, far = parts(method, q, k)
    assert ((near > 0) & (far > 0)).sum() > 2 * 2 * 24  # more than each token with itself
    out = method(q, k, v)
    torch.testing.assert_close(out, weighted_softmax(q, k, v, (near + far).double(), 8**-0.5))
    once = weighted_softmax(q, k, v, (near + far).clamp(max=1).double(), 8**-0.5)
    assert (out - once).abs().max() > 1e-2


def test_similar_tokens_meet_wherever_they_stand():
    order = normal(256, seed=7).argsort()
    topics = (4 * normal(1, 2, 8, 16, seed=3)).repeat_interleave(32, dim=2)[:, :, order]
    q, k = (topics + 0.3 * normal(1, 2, 256, 16, seed=seed) for seed in (1, 2))
    of_topic = (torch.arange(256) // 32)[order]
    same = (of_topic[:, None] == of_topic).float()
    _, far = parts(ClusterFormer(window=0, chunk=32, clusters=8), q, k)
    assert (far * same).sum() / far.sum() > 0.4  # 1/8 by chance


def test_the_keys_have_a_part_in_the_clusters():
    q, k, _ = qkv(40)
    method = ClusterFormer(window=0, chunk=8, clusters=5)
    assert not torch.equal(parts(method, q, k)[1], parts(method, q, -k)[1])
