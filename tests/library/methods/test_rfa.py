"""Random feature attention against the recurrence that defines it, and the products that forget."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.core.randomness import directions
from subquad.kernels.attention.products.gated import gated_product
from subquad.testing.oracle import gradients, normal, qkv, tracked

R = 48


def bound_with_parameters(gates: str = "learned", kv_heads: int = 2) -> sq.BoundMethod:
    """Away from the start, where all is 0 or 1."""
    bound = sq.RandomFeature(features=R, gates=gates).bind(heads=4, kv_heads=kv_heads, head_dim=8).double()
    for number, parameter in enumerate(bound.parameters()):
        parameter.data += 0.4 * normal(*parameter.shape, seed=number, dtype=torch.float64)
    return bound


def recurrence(bound: sq.BoundMethod, q: Tensor, k: Tensor, v: Tensor, gated: bool) -> Tensor:
    """Token by token, as the paper writes it, for one item and head of each."""
    learned, drawn = bound.learned, directions(0, None, R, 8, True, q)
    outs = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for h in range(q.shape[1]):
        g = h * k.shape[1] // q.shape[1]
        sums, total = torch.zeros(len(q), 2 * R, v.shape[3]), torch.zeros(len(q), 2 * R)
        for t in range(q.shape[2]):
            x, y = (F.normalize(z, dim=-1) for z in (q[:, h, t], k[:, g, t]))
            of_x, of_y = (torch.cat([(a := (z * learned.spread[g]) @ drawn.T).sin(), a.cos()], -1) for z in (x, y))
            gate = torch.sigmoid(y @ learned.weight[g] + learned.bias[g]) if gated else torch.ones(1, 1)
            share = 1 - gate if gated else gate
            sums = gate[..., None] * sums + share[..., None] * of_y[..., None] * v[:, g, t, None]
            total = gate * total + share * of_y
            outs[:, h, t] = (of_x[:, :, None] * sums).sum(1) / (of_x * total).sum(-1, keepdim=True)
    return outs


@pytest.mark.parametrize("gates", ["learned", "none"])
def test_causal_outputs_are_those_of_the_recurrence(gates: str):
    q, k, v = qkv(70, H=4, G=2, dtype=torch.float64)
    bound = bound_with_parameters(gates)
    wanted = recurrence(bound, q, k, v, gates == "learned")
    torch.testing.assert_close(bound(q, k, v, is_causal=True), wanted.to(q.dtype), atol=1e-6, rtol=1e-6)


def test_without_a_causal_mask_all_keys_count_alike_and_gates_do_not_matter():
    q, k, v = qkv(20, H=4, G=2, dtype=torch.float64)
    bound = bound_with_parameters()
    drawn, spread = directions(0, None, R, 8, True, q), bound.learned.spread.repeat_interleave(2, 0)
    q_, k_ = (F.normalize(x, dim=-1) for x in (q, k.repeat_interleave(2, 1)))
    angles = (q_ * spread @ drawn.T).unsqueeze(3) - (k_ * spread @ drawn.T).unsqueeze(2)
    weights = angles.cos().sum(-1)  # sin a sin b + cos a cos b
    wanted = weights @ v.repeat_interleave(2, 1) / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(bound(q, k, v), wanted)
    assert gradients(bound(q, k, v), bound.learned.bias)[0].abs().max() == 0
    assert gradients(bound(q, k, v, is_causal=True), bound.learned.bias)[0].abs().min() > 0


def test_the_kernel_is_gaussian_in_the_mean():
    x, y = (F.normalize(normal(1, 8, seed=seed, dtype=torch.float64), dim=-1) for seed in (1, 2))
    drawn = directions(3, None, 100_000, 8, True, x)
    found = (x @ drawn.T - y @ drawn.T).cos().mean()
    torch.testing.assert_close(found, (-(x - y).square().sum() / 2).exp(), atol=0.01, rtol=0)


def test_closed_gates_forget_and_open_ones_do_not():
    q, k, v = qkv(20, H=4, G=2)
    bound = sq.RandomFeature(features=R).bind(heads=4, kv_heads=2, head_dim=8)
    bound.learned.bias.data[:] = -30.0  # g = 0: only the token itself
    torch.testing.assert_close(bound(q, k, v, is_causal=True), v.repeat_interleave(2, 1), atol=1e-4, rtol=1e-4)
    ungated = sq.RandomFeature(features=R, gates="none").bind(heads=4, kv_heads=2, head_dim=8)
    bound.learned.bias.data[:] = 12.0  # g = 0.999994, and equal weights for all
    close = {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(bound(q, k, v, is_causal=True), ungated(q, k, v, is_causal=True), **close)


def test_queries_among_the_keys_with_padding():
    q, k, v = qkv(24, H=4, G=2, dtype=torch.float64)
    bound = bound_with_parameters()
    valid = Mask.padding(keys=torch.arange(24) >= torch.tensor([[0], [5]]))
    whole = bound(q, k, v, mask=valid & Mask.causal())
    for offset in (7, torch.tensor([7, 7])):
        part = bound(q[:, :, 7:17], k, v, mask=valid & Mask.causal(offset=offset))
        torch.testing.assert_close(part, whole[:, :, 7:17])


# ---------------------------------------------------------------------- products that forget


@pytest.mark.parametrize("N", [1, 63, 64, 65, 200])
def test_products_that_forget_equal_all_their_weights(N: int):
    q, k, v = qkv(N, H=4, G=2, dtype=torch.float64)
    log_gate = -normal(2, 2, N, seed=7, dtype=torch.float64).square()
    before = normal(2, 2, 8, 6, seed=8, dtype=torch.float64)
    inputs = tracked(q, k, v, log_gate, before)
    out, after = gated_product(*inputs)

    q, k, v, log_gate, before = again = tracked(*inputs)
    k, v, decay, first = (x.repeat_interleave(2, 1) for x in (k, v, log_gate.cumsum(-1), before))
    kept = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf).exp()
    wanted = (q @ k.mT * kept) @ v + decay.exp().unsqueeze(-1) * (q @ first)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(gradients(out, *inputs), gradients(wanted, *again))
    ends = (k * kept[:, :, -1].unsqueeze(-1)).mT @ v + decay[..., -1].exp()[..., None, None] * first
    torch.testing.assert_close(after, ends[:, ::2])


def test_products_that_forget_hold_at_any_length():
    """Gates whose product fp32 cannot hold."""
    q, k, v = qkv(3000)
    log_gate = torch.full((2, 2, 3000), -0.5)
    out, after = gated_product(q, k, v, log_gate)
    tail = gated_product(*(x[:, :, -200:] for x in (q, k, v)), log_gate[..., -200:])
    torch.testing.assert_close(out[:, :, -1], tail[0][:, :, -1])
    torch.testing.assert_close(after, tail[1])
    assert out.isfinite().all()
