"""Tilted pool against its formula, written out for one query after the other."""

import math

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.methods.tilted_pool import sizes_of, sizes_of_items
from subquad.testing.oracle import naive, normal, qkv, tracked

SETTINGS = [  # segments shorter than the window, as long, longer by a half, and by a multiple; short items
    (24, {"pools": 8, "window": 5}),
    (24, {"pools": 6, "window": 4, "sinks": 2}),
    (50, {"pools": 4, "window": 9, "sinks": 0}),
    (61, {"pools": 3, "window": 3}),
    (61, {"pools": 2, "window": 4, "sinks": 3}),
    (30, {"pools": 5, "window": 0}),
    (30, {"pools": 0, "window": 4, "sinks": 2}),
    (3, {"pools": 8, "window": 1, "sinks": 2}),
]


def bound_with(method, seed=7, heads=2, kv_heads=2, **given):
    """The method with parameters that are not those of its start."""
    bound = method.bind(heads=heads, kv_heads=kv_heads, head_dim=8)
    for number, (name, parameter) in enumerate(bound.named_parameters()):
        parameter.data = normal(*parameter.shape, seed=seed + number)
        parameter.data = given.get(name.rpartition(".")[2], parameter.data)
    return bound


def sizes(n, method):
    """(tokens of a segment, tokens of a block)."""
    if method.pools == 0:
        return n + 1, method.window
    segment = math.ceil(n / method.pools)
    if method.window == 0:
        return segment, None
    if segment <= method.window:
        return segment, segment * math.ceil(method.window / segment)
    blocks = segment // method.window
    block = math.ceil(segment / blocks)
    return block * blocks, block


def sets(n, i, method):
    """For query i: the keys that are exact, and the pools, as lists of keys."""
    segment, block = sizes(n, method)
    low, high = (0, 0) if block is None else ((i // block - 1) * block, (i // block + 2) * block)
    sinks = {*range(min(n, method.sinks)), *range(max(0, n - method.sinks), n)}
    near = {j for j in range(n) if low <= j < high}
    pools = {}
    for j in set(range(n)) - sinks - near if method.pools else ():
        pools.setdefault((j // segment, j >= high), []).append(j)
    return sorted(near | sinks), list(pools.values())


def dense(q, k, v, method, learned, scale):
    """The formula for one item, without batch: (H,n,D), …"""
    H, n, _ = q.shape
    out = torch.zeros(H, n, v.shape[2])
    for h in range(H):
        for i in range(n):
            exact, pools = sets(n, i, method)
            logits, values = [scale * k[h, exact] @ q[h, i]], [v[h, exact]]
            for pool in pools:
                towards, of_values = (scale * k[h, pool] @ p[h] for p in (learned.towards, learned.of_values))
                pooled = towards.softmax(0) @ k[h, pool]
                logit = scale * (q[h, i] - learned.towards[h]) @ pooled + towards.logsumexp(0) + learned.shift[h]
                logits.append(logit[None])
                values.append((of_values.softmax(0) @ v[h, pool])[None])
            out[h, i] = torch.cat(logits).softmax(0) @ torch.cat(values)
    return out


@pytest.mark.parametrize(("n", "settings"), SETTINGS)
def test_it_is_its_formula(n, settings):
    method = sq.TiltedPool(**settings)
    q, k, v = qkv(n, B=1)
    bound = bound_with(method)
    with torch.no_grad():
        wanted = dense(q[0], k[0], v[0], method, bound.learned, 0.4)
        torch.testing.assert_close(bound(q, k, v, scale=0.4)[0], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_item_of_a_padded_batch_is_laid_out_by_its_own_length(side):
    method, lengths = sq.TiltedPool(pools=4, window=3), [61, 5, 40, 1, 23]
    valid = torch.arange(61) < torch.tensor(lengths)[:, None]
    valid = valid if side == "right" else valid.flip(1)
    q, k, v = qkv(61, B=5)
    bound = bound_with(method)
    with torch.no_grad():
        out = bound(q, k, v, mask=Mask.padding(valid))
        for item, here in enumerate(valid):
            alone = (x[item : item + 1, :, here] for x in (q, k, v))
            torch.testing.assert_close(out[item : item + 1, :, here], bound(*alone), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 7, 24, 100, 333])
@pytest.mark.parametrize("settings", [settings for _, settings in SETTINGS if settings["pools"]])
def test_every_key_counts_once(n, settings):
    """If all logits are 0, pools weigh as many keys as they contain: out is the mean of all values."""
    bound = sq.TiltedPool(**settings).bind(heads=2, head_dim=8)
    q, k, v = qkv(n)
    torch.testing.assert_close(bound(0 * q, k, v), v.mean(2, keepdim=True).expand_as(v), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("n", [24, 61])
def test_it_is_exact_for_a_query_that_equals_the_tilt(n):
    mu = normal(2, 8, seed=1)
    bound = bound_with(sq.TiltedPool(pools=3, window=3), towards=mu, of_values=mu, shift=torch.zeros(2))
    _, k, v = qkv(n)
    q = mu[None, :, None].expand(2, 2, n, 8)
    torch.testing.assert_close(bound(q, k, v), naive(q, k, v), atol=1e-5, rtol=1e-4)


def test_a_window_of_all_tokens_is_exact_whatever_is_learned():
    q, k, v = qkv()
    torch.testing.assert_close(bound_with(sq.TiltedPool(pools=4, window=24))(q, k, v), naive(q, k, v))


def test_without_weight_on_the_pools_it_is_the_window_and_the_sinks_alone():
    q, k, v = qkv(61)
    alone = sq.attention(q, k, v, method=sq.TiltedPool(pools=0, window=4))
    bound = bound_with(sq.TiltedPool(pools=16, window=4), shift=torch.full((2,), -1e4))
    torch.testing.assert_close(bound(q, k, v), alone, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(alone, naive(q, k, v), atol=0.1)


def test_what_goes_without_pools():
    assert not sq.TiltedPool(pools=0).traits.learned
    assert sq.TiltedPool(pools=0).traits.fit is None
    assert sq.TiltedPool(window=0).traits.cross
    with pytest.raises(ValueError, match="leave a query nothing but the sinks"):
        sq.TiltedPool(pools=0, window=0)


def test_shared_key_heads_share_their_pools():
    bound = bound_with(sq.TiltedPool(pools=4, window=3), heads=4)
    q, k, v = qkv(40, H=4, G=2)
    whole = bound_with(sq.TiltedPool(pools=4, window=3), heads=4, kv_heads=4)
    for name in ("towards", "of_values"):
        getattr(whole.learned, name).data = getattr(bound.learned, name).data.repeat_interleave(2, 0)
    whole.learned.shift.data = bound.learned.shift.data
    many = (x.repeat_interleave(2, 1) for x in (k, v))
    torch.testing.assert_close(bound(q, k, v), whole(q, *many))


def test_gradients_in_fp64_of_all_that_is_learned():
    inputs = tracked(*qkv(13, B=1, dtype=torch.float64))
    bound = bound_with(sq.TiltedPool(pools=3, window=2)).double()
    learned = dict(bound.named_parameters())
    assert torch.autograd.gradcheck(
        lambda *given: torch.func.functional_call(bound, dict(zip(learned, given[3:], strict=True)), given[:3]),
        (*inputs, *learned.values()),
        fast_mode=True,
    )


def test_descent_on_the_loss_lowers_it():
    method = sq.TiltedPool(pools=4, window=3)
    bound, (q, k, v) = method.bind(heads=2, head_dim=8), qkv(80)
    query, key, value, call = bound.prepare(2 * q + 1, k, v)
    optimiser = torch.optim.Adam(bound.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        losses.append(method.fit_loss(query, key, value, call))
        optimiser.zero_grad()
        losses[-1].backward()
        assert all(p.grad.abs().max() > 0 for p in bound.parameters())
        optimiser.step()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("window", [0, 1, 4, 9])
def test_sizes_of_all_items_are_those_of_each(window):
    pools = torch.arange(1, 40)[:, None]
    have = torch.cat(sizes_of_items(pools, window), dim=1).tolist()
    assert have == [list(sizes_of(pool, window)) for pool in range(1, 40)]
