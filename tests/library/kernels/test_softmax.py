import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.kernels.attention.softmax import hide, merge_partials, visible_softmax
from subquad.testing.oracle import normal, tracked


def part(logits, v):
    return logits.softmax(-1).nan_to_num(0.0) @ v, logits.logsumexp(-1)


@given(st.integers(0, 1000), st.integers(1, 6), st.sampled_from([1.0, 30.0, 1000.0]))
@settings(deadline=None)
def test_merged_partials_equal_the_whole(seed, parts, scale):
    logits = scale * normal(2, 2, 3, 12, seed=seed, dtype=torch.float64)
    v = normal(2, 2, 12, 5, seed=seed + 1, dtype=torch.float64)
    cut = (normal(12, seed=seed + 2).abs() * parts).long().clamp(max=parts - 1)
    pieces = [part(logits[..., cut == p], v[:, :, cut == p]) for p in range(parts)]
    out, lse = merge_partials(pieces)
    torch.testing.assert_close((out, lse), part(logits, v))


def test_a_part_that_saw_nothing_counts_for_nothing():
    logits, v = normal(1, 1, 3, 4), normal(1, 1, 4, 5)
    nothing = torch.full((1, 1, 3, 5), 7.0), torch.full((1, 1, 3), -torch.inf)
    torch.testing.assert_close(merge_partials([part(logits, v), nothing]), part(logits, v))


def test_nothing_at_all_is_zero():
    nothing = torch.zeros(1, 1, 3, 5), torch.full((1, 1, 3), -torch.inf)
    out, lse = merge_partials([nothing, nothing])
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_gradients_of_a_merge_are_finite_and_those_of_the_whole():
    wholes, halves = tracked(normal(1, 1, 3, 4)), tracked(normal(1, 1, 3, 4))
    v = normal(1, 1, 4, 5)
    part(wholes[0], v)[0].square().sum().backward()
    merged = merge_partials([part(halves[0][..., :1], v[:, :, :1]), part(halves[0][..., 1:], v[:, :, 1:])])
    merged[0].square().sum().backward()
    torch.testing.assert_close(halves[0].grad, wholes[0].grad)


def test_the_order_of_parts_does_not_matter():
    parts = [part(normal(1, 1, 3, 4, seed=s), normal(1, 1, 4, 5, seed=s)) for s in range(3)]
    torch.testing.assert_close(merge_partials(parts), merge_partials(parts[::-1]))


def test_visible_softmax_equals_softmax_over_the_visible():
    logits = 50 * normal(4, 6, seed=1)
    visible = torch.tensor([[1, 1, 0, 0, 1, 0]]).bool().expand(4, 6)
    weights = visible_softmax(logits, visible)
    torch.testing.assert_close(weights[:, visible[0]], logits[:, visible[0]].softmax(-1))
    assert (weights[:, ~visible[0]] == 0).all()
    assert torch.equal(visible_softmax(logits, None), logits.softmax(-1))


def test_a_row_without_visible_keys_is_zero_with_zero_gradient():
    (logits,) = tracked(normal(2, 6))
    visible = torch.tensor([[True], [False]]).expand(2, 6)
    weights = visible_softmax(logits, visible)
    weights.square().sum().backward()
    assert (weights[1] == 0).all()
    assert (logits.grad[1] == 0).all()
    assert logits.grad[0].abs().max() > 0


def test_hide_is_finite_and_leaves_the_visible_alone():
    logits, visible = normal(2, 3), torch.tensor([True, False, True])
    assert hide(logits, visible).isfinite().all()
    assert torch.equal(hide(logits, visible)[:, visible], logits[:, visible])
    assert (hide(logits, visible)[:, 1] < -1e38).all()
    assert hide(logits, None) is logits
