"""Learned feature maps against the matrix of their weights, written out."""

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.kernels.tokens.heads import repeat_heads
from subquad.testing.oracle import naive, normal, qkv, tracked
from tests.library.methods.test_tilted_pool import bound_with

METHOD = sq.LearnedFeatureMap(features=6, window=4, sinks=2)


def features(x, weight, bias, tilt):
    """φ: (H,n,R)."""
    both = torch.cat([x @ weight.mT, -x @ weight.mT], dim=-1)[..., : bias.shape[1]]
    return (both + bias[:, None]).softmax(-1) * (x @ tilt[..., None]).exp()


def is_near(n, method, is_causal):
    """(n,n): which keys are exact for which queries, future ones included."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    block = max(method.window, 1)
    near = (i // block - j // block).abs() <= 1 if method.window else torch.zeros(n, n, dtype=torch.bool)
    sinks = (j < method.sinks) | ((j >= n - method.sinks) & (not is_causal))
    return near | sinks


def dense(q, k, v, method, learned, *, is_causal=False, scale=8**-0.5):
    """The formula for one item, without batch: (H,n,D), …"""
    k, v = (repeat_heads(x[None], len(q))[0] for x in (k, v))
    of_key = (repeat_heads(p[None], len(q))[0] for p in (learned.of_key, learned.key_bias[..., None]))
    key_weight, key_bias = of_key
    key_tilt = repeat_heads(learned.key_tilt[None, ..., None], len(q))[0]
    phi_q = features(q * scale**0.5, learned.of_query, learned.query_bias, learned.query_tilt)
    phi_k = features(k * scale**0.5, key_weight, key_bias[..., 0], key_tilt[..., 0])
    far = learned.gain.exp()[:, None, None] * phi_q @ phi_k.mT
    weights = torch.where(is_near(q.shape[1], method, is_causal), (scale * q @ k.mT).exp(), far)
    weights = weights.tril() if is_causal else weights
    return weights / weights.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("settings", ["features=6", "features=5,sinks=0", "window=3,features=30,sinks=3", "window=0"])
@pytest.mark.parametrize("n", [1, 5, 29, 40])
def test_it_is_its_formula(n, settings, is_causal):
    method = sq.parse_method(f"learned-feature-map:{settings if 'window' in settings else settings + ',window=4'}")
    q, k, v = qkv(n, H=4, G=2)
    bound = bound_with(method, heads=4)
    with torch.no_grad():
        out = bound(q, k, v, is_causal=is_causal, scale=0.5)
        for item in (0, 1):
            wanted = dense(q[item], k[item], v[item], method, bound.learned, is_causal=is_causal, scale=0.5)
            torch.testing.assert_close(out[item], wanted, atol=1e-5, rtol=1e-4)


def test_the_start_is_the_identity_and_the_far_part_has_the_size_of_the_near_one():
    bound = sq.LearnedFeatureMap(features=20, window=0, sinks=0).bind(heads=2, head_dim=8)
    assert torch.equal(bound.learned.of_query[0, :8], torch.eye(8))
    rows = bound.learned.of_key[0, 8:]
    torch.testing.assert_close(rows @ rows.mT, torch.eye(2))
    of_query, of_key = bound.learned(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 1.0)
    torch.testing.assert_close((of_query + of_key).exp().sum(-1), torch.ones(1, 2, 1))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_blocks_are_of_real_tokens(side, is_causal):
    lengths = [29, 5, 18, 1]
    valid = torch.arange(29) < torch.tensor(lengths)[:, None]
    valid = valid if side == "right" else valid.flip(1)
    q, k, v = qkv(29, B=4)
    bound = bound_with(METHOD)
    mask = Mask.padding(valid) & Mask.causal() if is_causal else Mask.padding(valid)
    with torch.no_grad():
        out = bound(q, k, v, mask=mask)
        for item, here in enumerate(valid):
            alone = (x[item : item + 1, :, here] for x in (q, k, v))
            wanted = bound(*alone, is_causal=is_causal)
            torch.testing.assert_close(out[item : item + 1, :, here], wanted, atol=1e-5, rtol=1e-4)


def test_a_hidden_key_takes_its_place_and_no_weight():
    """Keys that are padding where their queries are not: the token stands where it stands."""
    q, k, v = qkv(29)
    valid = normal(2, 29, seed=3) > -0.5
    bound = bound_with(sq.LearnedFeatureMap(features=6, window=4, sinks=0))
    out = bound(q, k, v, mask=Mask.padding(keys=valid))
    changed = [torch.where(valid[:, None, :, None], x, 100 * normal(*x.shape, seed=5)) for x in (k, v)]
    torch.testing.assert_close(bound(q, *changed, mask=Mask.padding(keys=valid)), out)


@pytest.mark.parametrize("offset", [0, 1, 5, 30, torch.tensor([5, 0]), torch.tensor(30)], ids=str)
@pytest.mark.parametrize("settings", ["window=4,sinks=2", "window=24", "window=0"])
def test_queries_beyond_the_last_key_are_as_with_hidden_keys_behind_it(settings, offset):
    q, k, v = tracked(*qkv(24))
    bound = bound_with(sq.parse_method(f"learned-feature-map:features=6,{settings}"))
    mask = Mask.causal(offset=offset)
    out, lse = bound(q, k, v, mask=mask, return_lse=True)
    longer = (torch.nn.functional.pad(x, (0, 0, 0, 40), value=9.0) for x in (k, v))
    want, of_want = bound(q, *longer, mask=mask & Mask.padding(keys=[24, 24]), return_lse=True)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, of_want, atol=1e-5, rtol=1e-4)
    (of_query,) = torch.autograd.grad(out.sin().sum(), q)
    assert (of_query[:, :, 1:].abs().amax((1, 3)) > 0).all()  # query 0 may see one key alone
    if settings == "window=24":
        torch.testing.assert_close(out, naive(q, k, v, mask.to_dense(24, 24)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("padded", [0, 5])
def test_chunks_on_a_cache_equal_the_whole(padded):
    q, k, v = qkv(29)
    bound = bound_with(METHOD)
    valid = torch.arange(29).expand(2, 29) >= torch.tensor([[0], [padded]])
    whole = bound(q, k, v, mask=Mask.causal() & Mask.padding(valid))
    for start, end in ((10, 17), (20, 21), (6, 29)):
        mask = Mask.causal(offset=start) & Mask.padding(keys=valid[:, :end])
        out = bound(q[:, :, start:end], k[:, :, :end], v[:, :, :end], mask=mask)
        torch.testing.assert_close(out, whole[:, :, start:end], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_of_all_tokens_is_exact_whatever_is_learned(is_causal):
    q, k, v = qkv()
    wanted = naive(q, k, v, Mask.causal().to_dense(24, 24) if is_causal else None)
    torch.testing.assert_close(bound_with(sq.LearnedFeatureMap(window=24))(q, k, v, is_causal=is_causal), wanted)


def test_without_a_gain_it_is_the_window_and_the_sinks_alone():
    q, k, v = qkv(61)
    alone = sq.attention(q, k, v, method=sq.TiltedPool(pools=0, window=4, sinks=2))
    bound = bound_with(METHOD, gain=torch.full((2,), -1e4))
    torch.testing.assert_close(bound(q, k, v), alone, atol=1e-5, rtol=1e-4)


def test_without_a_window_it_attends_across():
    method = sq.LearnedFeatureMap(features=6, window=0, sinks=1)
    bound, (q, k, v) = bound_with(method), qkv(11, 30)
    whole = dense(torch.cat([q[0], k[0, :, 11:]], dim=1), k[0], v[0], method, bound.learned)
    torch.testing.assert_close(bound(q, k, v)[0], whole[:, :11], atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"does not support .*cross-attention"):
        bound_with(METHOD)(q, k, v)


@pytest.mark.parametrize("size", [0.1, 1.0, 100.0])
def test_no_size_of_the_inputs_breaks_it(size):
    inputs = tracked(*(size * x for x in qkv(40)))
    bound = bound_with(METHOD)
    out = bound(*inputs)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (*inputs, *bound.parameters()))
    assert out.abs().max() <= inputs[2].abs().max() * 1.001  # a mean of values


def test_gradients_in_fp64_of_all_that_is_learned():
    inputs = tracked(*qkv(13, B=1, dtype=torch.float64))
    bound = bound_with(sq.LearnedFeatureMap(features=4, window=2)).double()
    learned = dict(bound.named_parameters())
    for is_causal in (False, True):
        assert torch.autograd.gradcheck(
            lambda *given, c=is_causal: torch.func.functional_call(
                bound, dict(zip(learned, given[3:], strict=True)), given[:3], {"is_causal": c}
            ),
            (*inputs, *learned.values()),
            fast_mode=True,
        )


def test_descent_on_the_loss_lowers_it():
    bound, (q, k, v) = METHOD.bind(heads=2, head_dim=8), qkv(80)
    query, key, value, call = bound.prepare(2 * q + 1, k, v)
    optimiser = torch.optim.Adam(bound.parameters(), lr=0.03)
    losses = []
    for _ in range(30):
        losses.append(METHOD.fit_loss(query, key, value, call))
        optimiser.zero_grad()
        losses[-1].backward()
        assert all(p.grad.abs().max() > 0 for p in bound.parameters())
        optimiser.step()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("sizes", [[40], [7, *[1] * 33], [13, 13, 14], [21, 1, 18]], ids=str)
@pytest.mark.parametrize("settings", ["window=4,sinks=2", "window=2,sinks=5", "window=3,sinks=0"])
def test_steps_from_a_state_equal_the_whole(settings, sizes):
    """Sinks may be new, kept as near keys or kept by themselves; one item is padded on the left."""
    bound = bound_with(sq.parse_method(f"learned-feature-map:features=6,{settings}")).eval()
    q, k, v = qkv(40)
    valid = torch.arange(40).expand(2, 40) >= torch.tensor([[0], [5]])
    whole = bound(q, k, v, mask=Mask.causal() & Mask.padding(valid))
    state, outs = bound.init_state(2, like=q, value_dim=6), []
    for x, y, z, present in zip(*(x.split(sizes, dim=2) for x in (q, k, v)), valid.split(sizes, dim=1), strict=True):
        out, state = bound.step(x, y, z, state, mask=Mask.padding(present))
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=2), whole, atol=1e-5, rtol=1e-4)
