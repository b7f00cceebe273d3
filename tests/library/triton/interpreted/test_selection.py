import pytest
import torch

from subquad.kernels.triton.selection import choose_top
from subquad.testing.oracle import normal
from tests.library.triton.interpreted.fences import fenced

MEANS, KEYS, BIAS = normal(2, 2, 3, 5), normal(2, 1, 90, 5, seed=1), normal(2, 2, 90, seed=2)
PRESENT = torch.arange(90).expand(2, 1, 90) % 3 != 1


def scores(bias, present):
    logits = MEANS @ KEYS.mT * 0.5 + (0 if bias is None else bias[:, :, None])
    return logits if present is None else logits.masked_fill(~present[:, :, None], -torch.inf)


def on_triton(K, bias=None, present=None, wanted=None, keys=KEYS):
    top, lse = torch.full((2, 2, 3, K), -5, dtype=torch.int32), torch.empty(2, 2, 3)
    given = (None if x is None else fenced(x) for x in (keys, bias, present))
    choose_top(fenced(MEANS), *given, 0.5, top, wanted, lse)
    return top, lse


@pytest.mark.parametrize("K", [1, 4, 70])
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("present", [None, PRESENT])
def test_the_largest_are_listed_in_ascending_order(poisoned, K, bias, present):
    top, lse = on_triton(K, bias, present)
    found = scores(bias, present).topk(K)
    want = found.indices.masked_fill(found.values.isneginf(), 90).sort().values
    assert torch.equal(top.long(), want)
    torch.testing.assert_close(lse, found.values.logsumexp(3))


def test_an_item_may_want_fewer():
    top, _ = on_triton(6, wanted=torch.tensor([6, 2]))
    found = scores(None, None).topk(6).indices
    assert torch.equal(top[0].long(), found[0].sort().values)
    assert torch.equal(top[1, ..., :2].long(), found[1, ..., :2].sort().values)
    assert (top[1, ..., 2:] == 90).all()


def test_of_no_keys_the_list_is_empty_and_nan_is_listed():
    top, lse = on_triton(3, present=torch.zeros_like(PRESENT))
    assert (top == 90).all()
    assert lse.isneginf().all()
    keys = KEYS.clone()
    keys[0, 0, 17] = torch.nan
    top, lse = on_triton(2, keys=keys)
    assert (top[0] == 17).any(-1).all()
    assert lse[0].isnan().all()
    assert torch.equal(top[1], on_triton(2)[0][1])
