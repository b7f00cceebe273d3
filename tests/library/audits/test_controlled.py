"""Attention that controls its error head by head."""

import math

import pytest
import torch

import subquad as sq
from subquad.audits.controlled import stages_of
from subquad.methods import ClusteredTail, Full, Local

ROUGH = "local:window=3"


def qkv(B: int = 2, H: int = 4, G: int = 4, N: int = 60, seed: int = 0) -> tuple[torch.Tensor, ...]:
    drawn = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, heads, N, 8, generator=drawn, dtype=torch.float64) for heads in (H, G, G))


def near_and_far(**shape: int) -> tuple[torch.Tensor, ...]:
    """Heads 0 and 1 attend to neighbours, which a window sees; the others to everything."""
    q, k, v = qkv(**shape)
    N = q.shape[2]
    turn = torch.arange(N, dtype=torch.float64)[:, None] / 2 / (1 + torch.arange(4)) ** 2
    place = 12 * torch.cat([turn.cos(), turn.sin()], -1)
    q[:, :2], k[:, :2] = place, place
    return q, k, v


def errors(out: torch.Tensor, *x: torch.Tensor, **how: object) -> torch.Tensor:
    want = sq.attention(*x, method="full", **how)
    return ((out - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(0.0)


def test_heads_that_pass_stay_cheap_and_the_others_are_exact():
    x = near_and_far()
    out, spent = sq.Controlled(ROUGH, tolerance=0.05)(*x)
    assert spent.stages == (ROUGH, "full")
    assert spent.stage.tolist() == [[0, 0, 1, 1]] * 2
    cheap = sq.attention(*x, method=ROUGH)
    torch.testing.assert_close(out[:, :2], cheap[:, :2])
    assert errors(out, *x)[:, 2:].max() < 1e-12
    assert spent.largest[:, 2:].isnan().all()
    assert 0 < spent.largest[:, :2].max() < 0.05
    assert str(spent) == "4 heads by local:window=3, 4 heads by full"


@pytest.mark.parametrize(("tolerance", "stage"), [(1e-9, 1), (1e3, 0)])
def test_the_tolerance_decides(tolerance, stage):
    _, spent = sq.Controlled(ROUGH, tolerance=tolerance)(*qkv())
    assert (spent.stage == stage).all()


def test_clustered_tail_is_refined_before_it_is_exact():
    x = qkv(N=400)
    method = ClusteredTail(clusters=20, topk=20, cells=8)
    out, spent = sq.Controlled(method, tolerance=0.4)(*x)
    assert spent.stages == (str(method), "clustered-tail:clusters=40,topk=80,cells=16", "full")
    assert (spent.stage == 1).any()
    alone = sq.attention(*x, method=spent.stages[1])
    for item, head in (spent.stage == 1).nonzero().tolist():
        torch.testing.assert_close(out[item, head], alone[item, head])
    assert spent.share_bound == pytest.approx(1 - (0.05 / 2) ** (1 / 32))


def test_stages_that_would_be_exact_anyway_are_left_out():
    assert stages_of(ClusteredTail(clusters=40, topk=5), 60, 60) == [ClusteredTail(clusters=40, topk=5), Full()]
    assert stages_of(ClusteredTail(clusters=5, topk=20), 60, 60) == [ClusteredTail(clusters=5, topk=20), Full()]
    assert stages_of(Local(), 60, 60) == [Local(), Full()]
    assert stages_of(Full(), 60, 60) == [Full()]


@pytest.mark.parametrize(
    ("rows", "confidence", "bound"), [(32, 0.95, 1 - 0.05 ** (1 / 32)), (8, 0.9, 1 - 0.1 ** (1 / 8))]
)
def test_what_is_promised_follows_rows_and_confidence(rows, confidence, bound):
    _, spent = sq.Controlled(ROUGH, rows=rows, confidence=confidence)(*qkv())
    assert spent.share_bound == pytest.approx(bound)


def test_the_promise_holds_as_often_as_it_says():
    method, kept, broken = "i-clustered:clusters=10,topk=10", 0, 0
    alike = torch.cat([errors(sq.attention(*x, method=method), *x).flatten() for x in map(one_item, range(5))])
    tolerance = float(alike.quantile(0.72))  # about 28 % of the rows are above, which is more than the promise
    for seed in range(100):
        x = one_item(seed)
        out, spent = sq.Controlled(method, tolerance=tolerance, rows=6, confidence=0.8)(*x, seed=seed)
        share = (errors(out, *x) > tolerance).double().mean(-1)
        kept += int((spent.stage == 0).sum())
        broken += int((share > spent.share_bound).sum())
    assert spent.share_bound == pytest.approx(1 - 0.2 ** (1 / 6))
    assert kept > 20
    assert 0 < broken <= 0.2 * 100 * 4


def one_item(seed: int) -> tuple[torch.Tensor, ...]:
    return qkv(B=1, seed=seed)


DENSE = torch.rand(2, 4, 60, 60, generator=torch.Generator().manual_seed(5)) > 0.3
IDS = torch.arange(120).view(2, 60) // 25
MASKS = {
    "padding": sq.Mask.padding([60, 21]),
    "causal": sq.Mask.causal() & sq.Mask.padding(keys=[60, 21]),
    "window": sq.Mask.window(9) & sq.Mask.padding(queries=[60, 30]),
    "segments": sq.Mask.segments(IDS),
    "offsets": sq.Mask.causal(offset=torch.tensor([0, 0])),
}


@pytest.mark.parametrize("name", MASKS)
def test_later_stages_run_under_the_masks_of_their_heads(name):
    x, mask = near_and_far(), MASKS[name]
    out, spent = sq.Controlled(ROUGH, tolerance=0.05)(*x, mask=mask)
    exact = spent.stage == 1
    assert exact.any()
    assert errors(out, *x, mask=mask)[exact].max() < 1e-12


@pytest.mark.parametrize("heads", [1, 4])
def test_dense_masks_and_biases_of_heads(heads):
    x, bias = qkv(), torch.randn(1, heads, 60, 60, generator=torch.Generator().manual_seed(1)).double()
    how = {"mask": sq.Mask.dense(DENSE[:, :heads]), "bias": bias, "scale": 0.4}
    out, spent = sq.Controlled("full")(*x, **how)
    assert (spent.stage == 0).all()
    assert errors(out, *x, **how).max() < 1e-12


def test_grouped_heads():
    x = qkv(G=2)
    out, spent = sq.Controlled(ROUGH, tolerance=1e-9)(*x, enable_gqa=True)
    assert (spent.stage == 1).all()
    assert errors(out, *x, enable_gqa=True).max() < 1e-12


def test_under_autocast_heads_are_compared_with_exact_rows_in_fp32():
    x = tuple(part.float() for part in near_and_far())
    with torch.autocast("cpu", torch.bfloat16):
        out, spent = sq.Controlled(ROUGH, tolerance=0.05)(*x)
    rounded, same = sq.Controlled(ROUGH, tolerance=0.05)(*(part.bfloat16() for part in x))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, rounded)
    assert torch.equal(spent.stage, same.stage)
    assert torch.equal(spent.largest.nan_to_num(), same.largest.nan_to_num())
    assert {int(stage) for stage in spent.stage.unique()} == {0, 1}


def test_gradients_are_those_of_each_heads_stage():
    grads = []
    for run in ("controlled", "by hand"):
        x = tuple(each.requires_grad_() for each in near_and_far())
        if run == "controlled":
            out, _ = sq.Controlled(ROUGH, tolerance=0.05)(*x)
        else:
            out = torch.cat([sq.attention(*(each[:, part] for each in x), method=method)
                             for part, method in ((slice(0, 2), ROUGH), (slice(2, 4), "full"))], 1)  # fmt: skip
        grads.append(torch.autograd.grad(out.square().sum(), x))
    torch.testing.assert_close(*grads)


def test_nan_makes_its_head_exact_and_padding_may_hold_it():
    q, k, v = near_and_far()
    q[0, 0, 7] = torch.nan
    v[1, :, 40:] = torch.nan
    out, spent = sq.Controlled(ROUGH, tolerance=0.05, rows=600)(q, k, v, mask=sq.Mask.padding([60, 40]))
    assert spent.stage.tolist() == [[1, 0, 1, 1], [0, 0, 1, 1]]
    assert out[1].isfinite().all()


def test_an_item_without_a_real_query_is_0_and_passes():
    out, spent = sq.Controlled(ROUGH, tolerance=0.05)(*near_and_far(), mask=sq.Mask.padding([60, 0]))
    assert (out[1] == 0).all()
    assert (spent.stage[1] == 0).all()


def test_the_same_seed_samples_the_same_rows_and_no_global_generator_moves():
    x, before = qkv(), torch.get_rng_state()
    largest = [sq.Controlled(ROUGH, tolerance=1e3)(*x, seed=seed)[1].largest for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(largest[0], largest[1])
    assert not torch.equal(largest[0], largest[2])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 0}, "rows=0, but it must be a whole number of at least 1"),
        ({"tolerance": 0.0}, "tolerance=0.0, but it must be a finite number above 0"),
        ({"tolerance": math.nan}, "tolerance=nan, but"),
        ({"confidence": 1.0}, "confidence=1.0, but it must be between 0 and 1"),
        ({"method": "lha"}, "'lha' has learned parameters, which exist only in a layer"),
        ({"method": "locl"}, "did you mean 'local'"),
    ],
)
def test_bad_arguments_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        sq.Controlled(**wrong)


def test_what_the_method_cannot_do_is_refused_as_everywhere():
    with pytest.raises(ValueError, match="'smyrf' does not support a causal mask"):
        sq.Controlled(method="smyrf")(*qkv(), is_causal=True)


def test_another_default_device_changes_no_control():
    x = qkv()
    want, _ = sq.Controlled(ROUGH, tolerance=0.05)(*x)
    with torch.device("meta"):
        out, _ = sq.Controlled(ROUGH, tolerance=0.05)(*x)
    assert torch.equal(out, want)
