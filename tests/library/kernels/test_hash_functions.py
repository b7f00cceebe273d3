"""Hash functions: their formulas written out, their start, and the divergence that they learn by."""

import pytest
import torch

from subquad.kernels.selection.hash_functions import HashFunctions, divergence, hashed
from subquad.testing.oracle import gradients, normal, tracked


def hash_scores(*given):
    return tuple(of_side.scores() for of_side in hashed(*given))


def functions(kind: str, kv_heads: int = 4, **settings: int) -> HashFunctions:
    return HashFunctions(4, kv_heads, 6, 5, kind=kind, **({"hidden": 3, "seed": 0} | settings))


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_each_head_has_the_function_that_is_written_down(kind):
    own, x = functions(kind, kv_heads=2), normal(2, 4, 7, 6)
    for head in range(4):
        y = 3**0.5 * x[:, head]  # √scale
        for layer, (weight, bias) in enumerate(zip(own.query.weights, own.query.biases, strict=True)):
            bias.data = normal(*bias.shape, seed=layer)
            y = (y if layer == 0 else y.clamp(min=0)) @ weight[head] + bias[head]
        torch.testing.assert_close(hash_scores(x, x[:, :2], own, 3.0)[0][:, head], y)


def test_key_heads_serve_their_query_heads():
    own, x = functions("mlp", kv_heads=2), normal(2, 4, 7, 6)
    of_query, of_key = hash_scores(x, x[:, :2], own, 1.0)
    assert of_query.shape == of_key.shape == (2, 4, 7, 5)
    assert torch.equal(of_key[:, 0], of_key[:, 1])
    assert not torch.allclose(of_key[:, 1], of_key[:, 2])
    assert torch.equal(hash_scores(x, x[:, :2], own, -1.0)[1], of_key)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_the_start_depends_on_the_seed_and_differs_by_head_and_side(kind):
    one, same, other = functions(kind), functions(kind), functions(kind, seed=1)
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert (a == 0).all() or not torch.allclose(a, c)
    weight = one.query.weights[0]
    assert not torch.allclose(weight[0], weight[1])
    assert not torch.allclose(weight, one.key.weights[0])
    assert all((bias == 0).all() for bias in one.query.biases)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_scores_start_at_the_size_of_their_inputs(kind):
    own = HashFunctions(8, 8, 64, 16, kind=kind, hidden=64, seed=0)
    assert abs(own.query(normal(4, 8, 200, 64)).std() - 1) < 0.1


def test_divergence_is_the_mean_of_torchs_own():
    target, logits = normal(2, 3, 7, 5).softmax(-1), normal(2, 3, 7, 5, seed=1)
    wanted = torch.nn.functional.kl_div(logits.log_softmax(-1), target, reduction="none").sum(-1).mean()
    torch.testing.assert_close(divergence(target, logits), wanted)
    torch.testing.assert_close(divergence(7 * target, logits), wanted)


def test_divergence_is_zero_where_the_logits_are_the_logarithm_of_the_target():
    target = normal(2, 3, 7, 5, dtype=torch.float64).softmax(-1)
    (logits,) = tracked(target.log() + normal(2, 3, 7, 1, dtype=torch.float64))
    loss = divergence(target, logits)
    assert loss.abs() < 1e-12
    assert torch.autograd.grad(loss, logits)[0].abs().max() < 1e-12
    assert divergence(target.roll(1, -1), logits) > 0.1


def test_the_gradient_is_the_softmax_less_the_target_over_the_rows_that_count():
    target = normal(2, 3, 7, 5, dtype=torch.float64).softmax(-1)
    target[1, :, 4:] = 0  # padding
    (logits,) = tracked(normal(2, 3, 7, 5, seed=1, dtype=torch.float64))
    counted = 3 * (7 + 4)
    wanted = (logits.softmax(-1) - target) * target.sum(-1, keepdim=True) / counted
    torch.testing.assert_close(torch.autograd.grad(divergence(target, logits), logits)[0], wanted)


def test_targets_of_exact_zeros_and_rows_without_any():
    target = torch.zeros(1, 1, 4, 3)
    target[0, 0, 0, 1] = 0.25
    (logits,) = tracked(normal(1, 1, 4, 3))
    torch.testing.assert_close(divergence(target, logits), -logits[0, 0, 0].log_softmax(-1)[1])
    empty = divergence(torch.zeros_like(target), logits)
    assert empty == 0
    assert (gradients(empty[None], logits)[0] == 0).all()


def test_the_largest_seed_has_a_start_too():
    start = functions("mlp", seed=2**63 - 1).query.weights
    assert all(weight.isfinite().all() for weight in start)
