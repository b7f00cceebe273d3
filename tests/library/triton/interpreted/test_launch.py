from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.kernels.attention.clustered.op import clustered_attention
from subquad.kernels.attention.features.op import feature_attention
from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.selection.blocks.op import sorted_blocks
from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.tokens.slots import Buckets
from subquad.kernels.triton.launch import around_launches
from subquad.testing.oracle import normal

X = torch.zeros(1).expand(70_000, 1, 2, 4)  # 70,000 items of one head
TOKENS = torch.arange(2).expand(70_000, 1, 1, 2)
CALLS = {
    "attend_pairs": lambda: attend_pairs(X, X, X, Buckets(TOKENS, TOKENS), Mask(), scale=1.0),
    "clustered_attention": lambda: clustered_attention(
        X, X, X, None, None, clusters=1, topk=0, bits=4, iterations=1, scale=1.0, seed=0
    ),
    "feature_attention": lambda: feature_attention(X, X, X),
    "hash_codes": lambda: hash_codes(X, 7, seed=0),
    "sorted_blocks": lambda: sorted_blocks(TOKENS[:, :, 0], 2, 2),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_more_heads_than_a_grid_has_programs_along_an_axis_are_refused(call):
    reason = "there are 70,000 heads of all items, and the kernels take at most 65,535"
    with sq.use_backend("triton"), pytest.raises(ValueError, match=reason):
        call()


def test_every_launch_runs_between_the_two_halves():
    seen = []

    @contextmanager
    def around(name):
        seen.append(f"before {name}")
        yield
        seen.append(f"after {name}")

    x = normal(1, 1, 20, 4)
    with sq.use_backend("triton"), around_launches(around):
        have = hash_codes(x, 7, seed=0)
    assert "before sign_words" in seen
    assert seen[::2] == [f"before {name.removeprefix('after ')}" for name in seen[1::2]]
    count = len(seen)
    with sq.use_backend("triton"):
        assert torch.equal(hash_codes(x, 7, seed=0), have)
    assert len(seen) == count


def test_launches_of_a_backward_pass_in_another_thread_are_seen():
    """On a GPU, autograd runs backward passes in a thread of its own."""
    names = []

    @contextmanager
    def around(name):
        names.append(name)
        yield

    x = normal(1, 1, 20, 4).requires_grad_()
    with sq.use_backend("triton"):
        out = sq.attention(x, x, x, method="linear")
    with around_launches(around), ThreadPoolExecutor() as pool:
        pool.submit(out.sum().backward).result()
    assert names
    assert x.grad is not None
