"""Soft permutations."""

import itertools

import torch

from subquad.kernels.attention.soft_permutations import sinkhorn
from subquad.testing.oracle import normal

ALL = torch.ones(2, 6, dtype=torch.bool)


def test_rows_and_columns_sum_to_one():
    logits = normal(2, 3, 6, 6, dtype=torch.float64)
    one, many = (sinkhorn(logits, ALL, iterations) for iterations in (1, 60))
    torch.testing.assert_close(one.sum(-1), torch.ones(2, 3, 6, dtype=torch.float64))
    torch.testing.assert_close(many.sum(-2), torch.ones(2, 3, 6, dtype=torch.float64), atol=1e-6, rtol=0)
    assert (one.sum(-2) - 1).abs().max() > 1e-2


def test_it_is_the_textbook_iteration():
    logits = normal(2, 3, 6, 6, dtype=torch.float64)
    wanted = logits.exp()
    for _ in range(7):
        wanted = wanted / wanted.sum(-2, keepdim=True)
        wanted = wanted / wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(sinkhorn(logits, ALL, 7), wanted)


def test_sharp_logits_give_the_best_permutation():
    logits = normal(1, 1, 5, 5, dtype=torch.float64)
    best = max(itertools.permutations(range(5)), key=lambda p: sum(logits[0, 0, i, j] for i, j in enumerate(p)))
    found = sinkhorn(logits / 0.01, torch.ones(1, 5, dtype=torch.bool), 500)
    torch.testing.assert_close(found[0, 0], torch.eye(5, dtype=torch.float64)[list(best)], atol=1e-2, rtol=0)


def test_what_does_not_exist_counts_for_nothing():
    logits = normal(2, 3, 6, 6, dtype=torch.float64).requires_grad_()
    exists = torch.arange(6) < torch.tensor([6, 4])[:, None]
    out = sinkhorn(logits, exists, 8)
    torch.testing.assert_close(out[1:, :, :4, :4], sinkhorn(logits[1:, :, :4, :4], ALL[1:, :4], 8))
    assert (out[1, :, 4:] == 0).all()
    assert (out[1, :, :, 4:] == 0).all()
    (grad,) = torch.autograd.grad(out.square().sum(), logits)
    assert grad.isfinite().all()
    assert (grad[1, :, 4:] == 0).all()


def test_large_logits_do_not_overflow():
    assert sinkhorn(1e4 * normal(2, 3, 6, 6), ALL, 8).isfinite().all()
    assert sinkhorn(normal(2, 3, 6, 6), torch.zeros(2, 6, dtype=torch.bool), 8).abs().max() == 0
