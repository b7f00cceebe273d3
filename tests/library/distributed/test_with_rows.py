"""Rows of a tensor that one op takes whole."""

import pytest
import torch

from subquad.distributed.with_rows import WholeAndRows

B, G, M, D = 2, 3, 11, 4
LAYOUTS = {
    "heads first": lambda: torch.randn(B, G, M, D, dtype=torch.double),
    "tokens first": lambda: torch.randn(B, M, G, D, dtype=torch.double).transpose(1, 2),
    "one of three": lambda: torch.randn(B, M, 3, G, D, dtype=torch.double)[:, :, 1].transpose(1, 2),
    "columns": lambda: torch.randn(B, G, D, M, dtype=torch.double).mT,
    "expanded": lambda: torch.randn(1, G, M, D, dtype=torch.double).expand(B, -1, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("whole", [True, False], ids=["with the whole", "rows alone"])
def test_rows_and_gradients_are_those_of_indexing(layout: str, whole: bool):
    x, weights = (LAYOUTS[layout]() for _ in range(2))
    x.requires_grad_()
    lists = [torch.randint(0, M, (B, G, *shape)) for shape in ((7,), (2, 3))]  # a row may be asked for twice
    of = WholeAndRows(x)
    both = [of.rows(at) for at in lists]
    expected = [x.gather(2, at.flatten(2)[..., None].expand(-1, -1, -1, D)).view(*at.shape, D) for at in lists]
    assert all(torch.equal(*pair) for pair in zip(both, expected, strict=True))
    loss, of_indexing = (sum(rows.square().sum() for rows in each) for each in (both, expected))
    if whole:
        loss, of_indexing = loss + (of.whole * weights).sum(), of_indexing + (x * weights).sum()
    (wanted,) = torch.autograd.grad(of_indexing, x)
    for again in (True, False):
        torch.testing.assert_close(*torch.autograd.grad(loss, x, retain_graph=again), wanted)


def test_no_gradient_is_made_where_none_is_wanted():
    of = WholeAndRows(torch.randn(B, G, M, D))
    assert not of.whole.requires_grad
    assert not of.rows(torch.zeros(B, G, 1, dtype=torch.long)).requires_grad
