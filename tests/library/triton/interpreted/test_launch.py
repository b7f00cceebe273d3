from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

import subquad as sq
from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.triton.launch import around_launches
from subquad.testing.oracle import normal


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
