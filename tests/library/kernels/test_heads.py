import torch

from subquad.kernels.tokens.heads import repeat_heads
from subquad.testing.oracle import normal


def test_head_h_reads_group_h_times_groups_over_heads():
    x = normal(2, 3, 4, 5)
    out = repeat_heads(x, 6)
    assert all(torch.equal(out[:, h], x[:, h * 3 // 6]) for h in range(6))


def test_as_many_heads_as_groups_is_no_copy():
    x = normal(2, 3, 4, 5)
    assert repeat_heads(x, 3) is x
