"""Causal attention by halves in compiled graphs: one program for all lengths, with the outputs of eager code."""

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.testing.oracle import qkv

pytestmark = pytest.mark.usefixtures("unchecked")  # the lengths are symbolic
METHOD = "clustered-tail:clusters=3,topk=4,cells=2,block=16,last=3"


def heard(length: int, B: int, side: str) -> torch.Tensor:
    """Which tokens of items with padding on one side are real."""
    at, hidden = torch.arange(length), torch.arange(B)[:, None] * (length // 4)
    return at >= hidden if side == "left" else at < length - hidden


def compiled(attend, **options):
    """The function compiled as one graph."""
    torch._dynamo.reset()
    return torch.compile(attend, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_one_program_serves_all_lengths(dtype, side):
    def attend(q, k, v, valid):
        mask = Mask.causal() if side == "none" else Mask.causal() & Mask.padding(valid)
        return sq.attention(q, k, v, method=METHOD, mask=mask, return_lse=True)

    fast = compiled(attend, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for length in (40, 41, 97, 260):
            inputs = [x.to(dtype) for x in qkv(length, length, B=2, H=2, D=8, E=8)]
            valid = heard(length, 2, side)
            for have, want in zip(fast(*inputs, valid), attend(*inputs, valid), strict=True):
                assert torch.equal(have, want)
                assert have.dtype == want.dtype


def test_behind_a_cache_and_without_the_log_sum_exp():
    def attend(q, k, v, offset):
        return sq.attention(q, k, v, method=METHOD, mask=Mask.causal(offset=offset))

    fast = compiled(attend)
    with torch.no_grad():
        for start in (5, 70):
            inputs = qkv(50, 50 + start, B=2, H=2, D=8, E=8)
            for offset in (start, torch.tensor([start, start - 5])):
                assert torch.equal(fast(*inputs, offset), attend(*inputs, offset))


def test_gradients_are_those_of_eager_code():
    def attend(q, k, v):
        return sq.attention(q, k, v, method=METHOD, is_causal=True)

    fast = compiled(attend)
    inputs = [x.requires_grad_() for x in qkv(50, 50, B=2, H=2, D=8, E=8)]
    for have, want in zip(*(torch.autograd.grad(f(*inputs).sum(), inputs) for f in (fast, attend)), strict=True):
        torch.testing.assert_close(have, want)


def test_in_autocast_and_on_the_reference():
    def attend(q, k, v):
        return sq.attention(q, k, v, method=METHOD, is_causal=True)

    inputs = qkv(50, 50, B=2, H=2, D=8, E=8)
    fast = compiled(attend)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(fast(*inputs), attend(*inputs))
        with sq.use_backend("reference"):
            assert torch.equal(fast(*inputs), attend(*inputs))


def test_a_class_that_is_not_registered_is_traced():
    class Other(sq.ClusteredTail):
        """Twice the output."""

        def attend_causally(self, query, key, value, call):
            out, lse = super().attend_causally(query, key, value, call)
            return 2 * out, lse

    other = Other(clusters=3, topk=4, cells=2, block=16, last=3)

    def attend(q, k, v):
        return sq.attention(q, k, v, method=other, is_causal=True)

    inputs = qkv(50, 50, B=2, H=2, D=8, E=8)
    fast = compiled(attend)
    with torch.no_grad():
        torch.testing.assert_close(fast(*inputs), 2 * sq.attention(*inputs, method=METHOD, is_causal=True))
