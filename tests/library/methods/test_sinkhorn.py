"""Tests of what Sinkhorn attention promises: the own block, a sorted one of keys and values, noise in training only."""

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask, Sinkhorn
from subquad.core.randomness import gumbel
from subquad.testing.oracle import gradients, normal, qkv, tracked


def bound(method: Sinkhorn, kv_heads: int = 2, width: int = 8) -> sq.BoundMethod:
    """Bound, with a sort network that is not the identity."""
    layer = method.bind(heads=2, kv_heads=kv_heads, head_dim=width).eval()
    layer.learned.weight.data += 0.3 * normal(2, width, width, seed=20)
    return layer


def alone(method: Sinkhorn, weight: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head of one item, (n,D) and (n,E), block by block and slot by slot."""
    n, size, scale = len(q), method.block, q.shape[1] ** -0.5
    blocks = [range(start, min(start + size, n)) for start in range(0, n, size)]
    means = [torch.stack([x[list(block)].mean(0) for block in blocks]) for x in (q, k)]
    sorting = (means[0] @ weight @ means[1].T * scale / method.temperature).exp()
    for _ in range(method.iterations):
        sorting = sorting / sorting.sum(0, keepdim=True)
        sorting = sorting / sorting.sum(1, keepdim=True)

    def sent(row: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Weight, key and value of each slot."""
        slots = []
        for slot in range(size):
            have = [j for j, block in enumerate(blocks) if slot < len(block)]
            if have:
                share = row[have].sum()
                slots.append((share, *(sum(row[j] * x[blocks[j][slot]] for j in have) / share for x in (k, v))))
        return slots

    out = torch.empty(n, v.shape[1], dtype=v.dtype)
    for i, block in enumerate(blocks):
        met = [slot for row in sorting[: method.cut] for slot in sent(row)]
        if method.cut == 0:
            met = [(torch.ones((), dtype=q.dtype), k[j], v[j]) for j in block] + sent(sorting[i])
        shares, keys, values = (torch.stack(together) for together in zip(*met, strict=True))
        weights = shares * (q[list(block)] @ keys.T * scale).exp()
        out[list(block)] = weights / weights.sum(1, keepdim=True) @ values
    return out


@pytest.mark.parametrize("n", [1, 5, 10, 12, 23])
@pytest.mark.parametrize("settings", [{}, {"cut": 1}, {"cut": 3, "iterations": 5}, {"temperature": 0.2}], ids=str)
def test_it_is_the_formula_slot_by_slot(n, settings):
    method = Sinkhorn(block=5, **settings)
    layer, inputs = bound(method), tracked(*qkv(n, B=1, dtype=torch.float64))
    weight = layer.learned.weight.detach().double()
    out = layer(*inputs)
    wanted = torch.stack([alone(method, weight[h], *(x[0, h] for x in inputs)) for h in (0, 1)])[None]
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(gradients(out, *inputs), gradients(wanted, *inputs))


def test_an_item_of_one_block_counts_each_key_once():
    """Also with kept keys: exact attention, log-sum-exp included, whatever the other items are."""
    (q, k, v), mask = qkv(12), Mask.padding([12, 5])
    layer = bound(Sinkhorn(block=6))
    for keep in (None, torch.tensor([1])):
        out, lse = layer(q, k, v, mask=mask, return_lse=True, keep=keep)
        wanted, exact = sq.attention(q, k, v, method="full", mask=mask, return_lse=True)
        torch.testing.assert_close((out[1], lse[1, :, :5]), (wanted[1], exact[1, :, :5]))
    total = sq.parse_method("keep+sinkhorn:block=12").bind(heads=2, kv_heads=2, head_dim=8).eval()
    torch.testing.assert_close(total(q, k, v), sq.attention(q, k, v, method="full"))


@pytest.mark.parametrize("cut", [0, 2])
def test_values_come_from_the_values(cut):
    q, k, v = qkv(E=8)
    layer = bound(Sinkhorn(block=5, cut=cut))
    assert (layer(q, k, torch.zeros_like(v)) == 0).all()
    torch.testing.assert_close(layer(q, k, 3 * v), 3 * layer(q, k, v))
    assert not torch.allclose(layer(q, k, v), layer(q, k, k), atol=0.1)


def test_a_sharp_sort_brings_another_block():
    # Two topics, in turn: each block is sent one, and finds what its own block does not hold.
    q, k = torch.zeros(1, 1, 8, 2), torch.zeros(1, 1, 8, 2)
    q[0, 0, :4, 0], q[0, 0, 4:, 1] = 9, 9
    k[0, 0, :4, 1], k[0, 0, 4:, 0] = 9, 9
    v = torch.arange(8.0).view(1, 1, 8, 1)
    layer = Sinkhorn(block=4, temperature=0.01).bind(heads=1, head_dim=2).eval()
    out = layer(q, k, v)[0, 0, :, 0]
    torch.testing.assert_close(out, torch.tensor([5.5] * 4 + [1.5] * 4), atol=1e-4, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_hidden_keys_have_no_part_in_what_is_sent(side):
    q, k, v = qkv(17)
    valid = torch.arange(17) < torch.tensor([[11], [4]])
    valid = valid if side == "right" else valid.flip(1)
    layer, mask = bound(Sinkhorn(block=4)), Mask.padding(keys=valid)
    hidden = ~valid[:, None, :, None]
    out = layer(q, k, v, mask=mask)
    torch.testing.assert_close(out, layer(q, k.masked_fill(hidden, 50.0), v.masked_fill(hidden, 50.0), mask=mask))
    equal = layer(q, k, torch.ones_like(v).masked_fill(hidden, 9.0), mask=mask)
    torch.testing.assert_close(equal, torch.ones_like(v))


def test_the_sort_network_learns_from_the_output():
    layer = bound(Sinkhorn(block=5)).train()
    layer(*qkv()).square().sum().backward()
    assert (layer.learned.weight.grad.abs().amax((1, 2)) > 0).all()


def test_noise_is_for_training_and_changes_with_step_and_seed():
    inputs = qkv()
    layer = bound(Sinkhorn(block=5))
    still = layer(*inputs)
    assert torch.equal(layer(*inputs, seed=3), still)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, second = layer.train()(*inputs), layer(*inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.allclose(first, still, atol=1e-3)
    assert not torch.allclose(first, second, atol=1e-3)
    again, other = bound(Sinkhorn(block=5)).train(), bound(Sinkhorn(block=5)).train()
    assert torch.equal(again(*inputs), first)
    assert torch.equal(again(*inputs), second)
    assert not torch.allclose(other(*inputs, seed=1), first, atol=1e-3)
    assert torch.equal(layer.eval()(*inputs), still)


def test_the_steps_are_saved_so_that_training_goes_on_with_fresh_noise():
    inputs = qkv()
    layer, other = bound(Sinkhorn(block=5)).train(), bound(Sinkhorn(block=5)).train()
    first = layer(*inputs)
    other.load_state_dict(layer.state_dict())
    assert not torch.equal(other(*inputs), first)
    assert int(other.learned.steps) == 2


def test_noise_does_not_depend_on_padding():
    q, k, v = qkv(11)
    short, long = bound(Sinkhorn(block=4)).train(), bound(Sinkhorn(block=4)).train()
    padded = [torch.cat([x, torch.ones_like(x)], dim=2) for x in (q, k, v)]
    torch.testing.assert_close(long(*padded, mask=Mask.padding([11, 11]))[:, :, :11], short(q, k, v))


def test_gumbel_numbers_have_their_moments_and_differ():
    step, places = torch.tensor(5), torch.arange(200_000)
    numbers = gumbel(3, step, places, like=torch.zeros(1, dtype=torch.float64))
    assert abs(numbers.mean() - 0.5772) < 0.01  # Euler's constant
    assert abs(numbers.var() - torch.pi**2 / 6) < 0.02
    for other in (gumbel(4, step, places, numbers), gumbel(3, step + 1, places, numbers)):
        assert abs(torch.corrcoef(torch.stack([numbers, other]))[0, 1]) < 0.01
