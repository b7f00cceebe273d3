"""The number of requests of a forward pass to the device: each launch costs the host some microseconds."""

import pytest

from subquad.kernels.attention.clustered.op import clustered_attention
from subquad.kernels.attention.tail.op import attend_with_tail
from subquad.kernels.selection.cells.op import key_cells
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.kernels.triton.recording import OtherCall, recording
from tests.library.triton.compiled.fits import meta

X = meta(1, 32, 4096, 64)


def clustered_tail() -> None:
    """The ops of the method with its defaults."""
    clustering = {"space": "logits", "clusters": 91, "bits": 63, "iterations": 1, "refine": 2, "seed": 0}
    labels, cell = query_clusters(X, X, None, None, **clustering), key_cells(X, X, None, cells=32, seed=0)
    attend_with_tail(X, X, X, labels, cell, None, clusters=91, topk=182, cells=32, scale=0.1)


def i_clustered() -> None:
    """The op of the method with its defaults."""
    sizes = {"clusters": 100, "topk": 32, "bits": 63, "iterations": 10, "scale": 0.1, "seed": 0}
    clustered_attention(X, X, X, None, None, **sizes)


# 33 of torch's calls are what the scores of keys have beside their logits (`terms_of_choice`), in plain PyTorch.
@pytest.mark.parametrize(("call", "kernels", "of_torch"), [(clustered_tail, 35, 35), (i_clustered, 27, 0)])
def test_launches_of_a_forward_pass(call, kernels, of_torch):
    with recording():  # the first call moves the directions of the hash to the device
        call()
    others: list[OtherCall] = []
    with recording(others) as launches:
        call()
    assert (len(launches), len(others)) == (kernels, of_torch), ([x.name for x in launches], [x.name for x in others])


def test_copies_are_counted_and_views_are_not():
    others: list[OtherCall] = []
    with recording(others):
        X.float()
        X.bfloat16()
        X.transpose(2, 3).contiguous()
        X.contiguous()
        X[0].unsqueeze(1)
        X.zero_()
    assert [x.name for x in others] == ["_to_copy", "clone", "zero_"]
