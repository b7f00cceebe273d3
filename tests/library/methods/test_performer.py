"""Performer and linear attention against all their weights written out, at sizes where an epsilon would show."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import subquad as sq
from subquad import Mask
from subquad.core.randomness import directions
from subquad.kernels.attention.feature_maps import FLOOR
from subquad.methods.linear import log_elu
from subquad.testing.oracle import gradients, normal, qkv, tracked

R = 32
KINDS = ["positive", "hyperbolic", "favor++", "relu", "trigonometric"]


def features(kind: str, x: Tensor, drawn: Tensor) -> Tensor:
    """ln φ(x) up to what all features share, by the formulas; φ itself for the signed kind."""
    wx, square = x @ drawn.mT, x.square().sum(-1, keepdim=True) / 2
    if kind == "hyperbolic":
        return torch.cat([wx, -wx], -1) - square
    if kind == "favor++":
        s, width = 2 * x.shape[-1] ** 0.5, x.shape[-1]
        rho = (((2 * s + width) ** 2 + 8 * width * s) ** 0.5 - 2 * s - width) / (4 * s)
        a = (1 - 1 / rho) / 8
        return a * drawn.square().sum(-1) + (1 - 4 * a) ** 0.5 * wx - square
    if kind == "relu":
        return (wx.relu() + FLOOR).log()
    if kind == "trigonometric":
        return torch.cat([wx.sin(), wx.cos()], -1) * square.exp()
    return wx - square


def dense(method: sq.Performer, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Feature softmax with N×M×R weights, in fp64."""
    q, k, v = (x.double() for x in (q, k, v))
    drawn = directions(0, None, method.features, q.shape[3], method.rows == "iid", q.float()).double()
    of_query, of_key = (features(method.kind, x * q.shape[3] ** -0.25, drawn) for x in (q, k))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1) & causal
    if method.kind == "trigonometric":
        weights = (of_query @ of_key.mT).masked_fill(hidden, 0.0)
        return weights @ v / weights.sum(-1, keepdim=True)
    logits = (of_query.unsqueeze(3) + of_key.unsqueeze(2)).logsumexp(-1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def with_epsilon(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FAVOR+ as it is published in code: one maximum over all keys, and 10⁻⁴ added to each feature."""
    drawn = directions(0, None, R, q.shape[3], False, q)
    q, k = q * q.shape[3] ** -0.25, k * k.shape[3] ** -0.25
    of_query, of_key = features("positive", q, drawn), features("positive", k, drawn)
    of_query = (of_query - of_query.amax(-1, keepdim=True)).exp() + 1e-4
    of_key = (of_key - of_key.amax((-1, -2), keepdim=True)).exp() + 1e-4
    weights = of_query @ of_key.mT
    return weights @ v / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [0.1, 1.0, 3.0, 10.0])
def test_equals_its_own_dense_softmax(kind: str, causal: bool, size: float):
    method = sq.Performer(features=512 if kind == "trigonometric" else R, kind=kind)
    q, k, v = qkv(90, D=16)
    q, k = (0.3 * q, 0.3 * k) if kind == "trigonometric" else (size * q, size * k)
    torch.testing.assert_close(
        method(q, k, v, is_causal=causal).double(), dense(method, q, k, v, causal), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("size", [3.0, 10.0])
def test_an_epsilon_would_show(size: float):
    q, k, v = qkv(90, D=16)
    method = sq.Performer(features=R)
    wanted = dense(method, size * q, size * k, v)
    off = (with_epsilon(size * q, size * k, v) - wanted).norm() / wanted.norm()
    assert off > 0.3
    assert (method(size * q, size * k, v) - wanted).norm() / wanted.norm() < 1e-5


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize("early", [1.0, 10.0])
@pytest.mark.parametrize("last", [100.0, 1e-3])
@pytest.mark.parametrize("backend", [name for name, state in sq.backends().items() if state == "available"])
def test_the_last_key_changes_no_earlier_output(kind: str, early: float, last: float, backend: str):
    method = sq.Performer(features=R, kind=kind)
    q, k, v = qkv(150, D=16)
    k = early * k
    changed = k.clone()
    changed[:, :, -1] *= last
    with sq.use_backend(backend):
        before, after = (method(q, keys, v, is_causal=True)[:, :, :-1] for keys in (k, changed))
    assert after.isfinite().all()
    assert (before - after).norm() <= 1e-5 * before.norm()


def test_orthogonal_rows_are_nearer_to_exact_attention():
    q, k, v = (0.7 * x for x in qkv(60, B=8, D=16))
    exact = sq.attention(q, k, v, method="full")

    def error(method: sq.Performer) -> float:
        return sum(float((method(q, k, v, seed=s) - exact).square().mean()) for s in range(20))

    iid = error(sq.Performer(features=64, rows="iid"))
    assert error(sq.Performer(features=64)) < iid
    assert error(sq.Performer(features=1024, rows="iid")) < iid / 3
    assert error(sq.Performer(features=64, kind="favor++", rows="iid")) < iid


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_not_hidden(kind: str):
    """A NaN in a query is in its output, one in a key is in all."""
    q, k, v = qkv(20)
    for inputs, rows in ((0, slice(3, 4)), (1, slice(None))):
        poisoned = [q.clone(), k.clone(), v]
        poisoned[inputs][:, :, 3] = torch.nan
        out = sq.Performer(features=R, kind=kind)(*poisoned)
        assert out[:, :, rows].isnan().all()
        assert inputs == 1 or out[:, :, 4:].isfinite().all()


def test_norm_is_what_favor_plus_plus_is_tuned_for():
    q, k, v = qkv(20)
    plain, none = sq.Performer(features=R), sq.Performer(features=R, kind="favor++", norm=1e-4)
    torch.testing.assert_close(plain(q, k, v), none(q, k, v), atol=1e-3, rtol=0)
    tuned = [sq.Performer(features=R, kind="favor++", norm=norm)(q, k, v) for norm in (0.0, 2 * 8**0.5, 60.0)]
    torch.testing.assert_close(tuned[0], tuned[1])
    assert not torch.allclose(tuned[0], tuned[2], atol=1e-2)


# ---------------------------------------------------------------------- inputs that are moved and scaled


def learned(**start: float) -> sq.BoundMethod:
    """Parameters away from their start of 0 by so much noise."""
    bound = sq.Performer(features=4096, kind="hyperbolic", inputs="learned").bind(heads=4, kv_heads=2, head_dim=8)
    for number, (name, size) in enumerate(start.items()):
        parameter = getattr(bound.learned, name)
        parameter.data += size * normal(*parameter.shape, seed=number)
    return bound


def test_at_the_start_nothing_is_moved():
    q, k, v = qkv(20, H=4, G=2)
    plain = sq.Performer(features=4096, kind="hyperbolic")(q, k, v, enable_gqa=True)
    torch.testing.assert_close(learned()(q, k, v), plain)


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_centres_leave_what_is_estimated_as_it_is(scale: float, causal: bool):
    q, k, v = (0.5 * x for x in qkv(20, H=4, G=2))
    exact = sq.attention(q, k, v, method="full", enable_gqa=True, scale=scale, is_causal=causal)
    bound = learned(query_centre=0.4, key_centre=0.4)
    torch.testing.assert_close(bound(q, k, v, scale=scale, is_causal=causal), exact, atol=0.08, rtol=0)
    assert all((grad != 0).any() for grad in gradients(bound(q, k, v), *bound.parameters()))


def test_scales_are_a_temperature():
    q, k, v = qkv(20, H=4, G=2)
    bound = learned(query_scale=0.1, key_scale=0.1, query_centre=0.3, key_centre=0.3)
    bound.learned.query_scale.data -= 0.7
    bound.learned.key_scale.data -= 0.5
    factor = (bound.learned.query_scale + bound.learned.key_scale).exp().detach()
    exact = sq.attention(q, factor * k, v, method="full", enable_gqa=True)
    unscaled = sq.attention(q, k, v, method="full", enable_gqa=True)
    assert (bound(q, k, v) - exact).norm() < 0.1 * exact.norm()
    assert (unscaled - exact).norm() > 0.3 * exact.norm()


def test_inputs_far_from_0_are_estimated_where_they_are_centred():
    q, k, v = qkv(60, D=16)
    q, k = 0.5 * q + 3, 0.5 * k - 2
    exact = sq.attention(q, k, v, method="full")
    bound = sq.Performer(inputs="learned").bind(heads=2, head_dim=16)
    off = (bound(q, k, v) - exact).norm() / exact.norm()
    bound.learned.query_centre.data[:], bound.learned.key_centre.data[:] = 3.0, -2.0
    assert (bound(q, k, v) - exact).norm() / exact.norm() < 0.5 * off


def test_the_fit_lowers_the_error():
    method = sq.Performer(features=64, inputs="learned")
    assert method.traits.fit is not None
    assert sq.Performer().traits.fit is None
    q, k, v = qkv(60, B=4, D=16)
    q, k = 2 * q, 2 * k + 1
    bound = method.bind(heads=2, head_dim=16)
    optimizer = torch.optim.Adam(bound.parameters(), lr=method.traits.fit.learning_rate)
    losses = []
    for _ in range(30):
        inputs = tracked(q, k, v)
        loss = method.fit_loss(*bound.prepare(*inputs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        assert all(x.grad is None for x in inputs)
    assert losses[-1] < 0.7 * losses[0]


# ---------------------------------------------------------------------- redrawing


def redrawn(every: int) -> sq.BoundMethod:
    return sq.Performer(features=R, redraw=every).bind(heads=2, head_dim=8)


def test_features_are_redrawn_in_training_after_so_many_passes():
    q, k, v = qkv(20)
    bound = redrawn(3).train()
    outs = [bound(q, k, v) for _ in range(7)]
    same = [torch.equal(a, b) for a, b in pairwise(outs)]
    assert same == [True, True, False, True, True, False]
    torch.testing.assert_close(outs[0], sq.Performer(features=R)(q, k, v))
    torch.testing.assert_close(outs[6], sq.Performer(features=R)(q, k, v, seed=2))


def test_evaluation_keeps_the_features_and_they_are_saved():
    q, k, v = qkv(20)
    bound = redrawn(2).train()
    for _ in range(3):
        last = bound(q, k, v)
    bound.eval()
    assert all(torch.equal(bound(q, k, v), last) for _ in range(5))
    with torch.no_grad():
        assert torch.equal(bound.train()(q, k, v), last)
    again = redrawn(2).eval()
    again.load_state_dict(bound.state_dict())
    assert torch.equal(again(q, k, v), last)
    state = again.init_state(2, like=q, value_dim=6)
    out, _ = again.train().step(q, k, v, state)
    torch.testing.assert_close(out, again.eval()(q, k, v, is_causal=True))


def test_without_redraw_training_keeps_the_features():
    q, k, v = qkv(20)
    bound = sq.Performer(features=R).bind(heads=2, head_dim=8).train()
    assert all(torch.equal(bound(q, k, v), bound(q, k, v)) for _ in range(3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_finds_the_features_of_its_forward_pass(reentrant: bool):
    """The re-entrant kind runs the forward pass without gradients, where nothing is redrawn."""
    inputs = tracked(*qkv(20))
    saving = redrawn(1).train()
    for step in range(3):
        wanted = sq.Performer(features=R)(*inputs, seed=0 if reentrant else step)
        out = checkpoint(saving, *inputs, use_reentrant=reentrant)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(gradients_of(out, inputs), gradients_of(wanted, inputs))


def gradients_of(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients that `backward` leaves in the inputs, since a re-entrant checkpoint needs that call."""
    for x in inputs:
        x.grad = None
    out.backward(normal(*out.shape, seed=4))
    return [x.grad.clone() for x in inputs]


# ---------------------------------------------------------------------- linear attention


MAPS = {
    "elu": lambda x: torch.nn.functional.elu(x) + 1,
    "exp": torch.exp,
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_equals_its_formula(feature_map: str, causal: bool):
    q, k, v = qkv(90, dtype=torch.float64)
    weights = MAPS[feature_map](q) @ MAPS[feature_map](k).mT
    weights = weights.tril() if causal else weights
    wanted = weights @ v / weights.sum(-1, keepdim=True)
    method = sq.LinearAttention(feature_map=feature_map)
    torch.testing.assert_close(method(q, k, v, is_causal=causal), wanted)
    # Another scale is that of queries and keys: 4 times the default one is twice each.
    weights = MAPS[feature_map](2 * q) @ MAPS[feature_map](2 * k).mT
    weights = weights.tril() if causal else weights
    scaled = method(q, k, v, is_causal=causal, scale=4 * 8**-0.5)
    torch.testing.assert_close(scaled, weights @ v / weights.sum(-1, keepdim=True))


def test_the_logarithm_of_elu_has_the_derivative_of_its_formula():
    x = torch.tensor([-3.0, -1e-3, 0.0, 1e-3, 4.0], dtype=torch.float64, requires_grad=True)
    formula = (torch.nn.functional.elu(x) + 1).log()
    torch.testing.assert_close(log_elu(x), formula)
    torch.testing.assert_close(gradients(log_elu(x), x), gradients(formula, x))


def test_features_that_fp32_cannot_hold_keep_their_ratios():
    """elu(x) + 1 is eˣ below 0: 0 in fp32 at −200, where its formula gives 0/0."""
    q, k, v = qkv(30)
    q, k = q - 200, k - 200
    far = sq.attention(q, k, v, method="linear", mask=Mask.padding([30, 20]))
    near = sq.attention(q + 190, k + 190, v, method="linear", mask=Mask.padding([30, 20]))
    torch.testing.assert_close(far, near, atol=1e-4, rtol=1e-4)
