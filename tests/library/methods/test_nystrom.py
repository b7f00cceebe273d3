"""Nyström attention against its formula written out item by item; the pseudo-inverse; the convolution."""

import random

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.methods.nystrom import MOST_ITERATIONS, pseudo_inverse
from subquad.testing.oracle import gradients, naive, normal, qkv, tracked
from tests.library.methods.random_calls import some_mask


def means(x: Tensor, count: int) -> Tensor:
    """The means of the segments of a tensor (tokens, width)."""
    labels = [rank * count // max(len(x), count) for rank in range(len(x))]
    rows = [[rank for rank, label in enumerate(labels) if label == segment] for segment in range(count)]
    return torch.stack([x[members].mean(0) for members in rows if members])


def iterated(a: Tensor, iterations: int) -> Tensor:
    """The paper's iteration, for one matrix; rows of `a` sum to 1."""
    z, one = a.T / (a.sum(1).max() * a.sum(0).max()), torch.eye(len(a), dtype=a.dtype)
    for _ in range(iterations):
        z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
    return z


def one_head(method: sq.Nystrom, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An item's head, without padding."""
    scale = q.shape[1] ** -0.5
    if len(k) <= method.landmarks:
        return (scale * q @ k.T).softmax(1) @ v
    landmarks, of_key = means(q, method.landmarks), means(k, method.landmarks)
    front, core = (scale * q @ of_key.T).softmax(1), (scale * landmarks @ of_key.T).softmax(1)
    return front @ iterated(core, method.iterations) @ (scale * landmarks @ k.T).softmax(1) @ v


def dense(method: sq.Nystrom, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    out = 0.0 * q[..., :1].expand(-1, -1, -1, v.shape[3])
    (B, H, N, _), M = q.shape, k.shape[2]
    queries, keys = mask.query_padding(N), mask.key_padding(M)
    for b in range(B):
        valid = torch.ones(N, dtype=torch.bool) if queries is None else queries[b]
        seen = torch.ones(M, dtype=torch.bool) if keys is None else keys[b]
        for h in range(H) if valid.any() and seen.any() else ():
            g = h * k.shape[1] // H
            own = one_head(method, q[b, h, valid], k[b, g, seen], v[b, g, seen])
            out = out.index_put((torch.tensor(b), torch.tensor(h), valid.nonzero().flatten()), own)
    return out


@pytest.mark.parametrize("text", ["nystrom:landmarks=4", "nystrom:landmarks=7,iterations=3", "nystrom:landmarks=1"])
def test_equals_the_formula(text: str):
    method, rng = sq.parse_method(text), random.Random(1)
    for shape in range(30):
        B, G, times, N = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 30)
        M = rng.randint(1, 30) if rng.random() < 0.4 else N
        mask = some_mask(rng, method, B, N, M)
        sizes = (B, G * times, N, 4), (B, G, M, 4), (B, G, M, 3)
        inputs = tracked(*(normal(*size, seed=3 * shape + i, dtype=torch.float64) for i, size in enumerate(sizes)))
        out, wanted = method(*inputs, mask=mask, enable_gqa=times > 1), dense(method, *inputs, mask)
        at = f"shape {shape}: {sizes[0]}, {sizes[1]} under {mask}"
        torch.testing.assert_close(out, wanted, atol=1e-8, rtol=1e-6, msg=lambda m, at=at: f"{at}: {m}")
        grads, wanted_grads = gradients(out, *inputs), gradients(wanted, *inputs)
        torch.testing.assert_close(grads, wanted_grads, atol=1e-6, rtol=1e-5, msg=lambda m, at=at: f"{at}: {m}")


def test_the_iteration_finds_inverses_and_pseudo_inverses():
    a = (3 * torch.eye(6, dtype=torch.float64) + normal(2, 3, 6, 6, dtype=torch.float64)).softmax(-1)
    torch.testing.assert_close(pseudo_inverse(a, 20), torch.linalg.inv(a))
    assert (pseudo_inverse(a, 2) - torch.linalg.inv(a)).abs().max() > 0.1
    twice = torch.cat([a[..., :3, :], a[..., :3, :]], dim=-2)
    torch.testing.assert_close(pseudo_inverse(twice, 20), torch.linalg.pinv(twice), atol=1e-5, rtol=1e-4)


def test_missing_landmarks_leave_the_others_inverse_as_it_is():
    a = (3 * torch.eye(4, dtype=torch.float64) + normal(1, 1, 4, 4, dtype=torch.float64)).softmax(-1)
    larger = torch.zeros(1, 1, 6, 6, dtype=torch.float64)
    larger[..., :4, :4] = a
    inverse = pseudo_inverse(larger, 12)
    torch.testing.assert_close(inverse[..., :4, :4], pseudo_inverse(a, 12))
    assert (inverse[..., 4:, :] == 0).all()
    assert (inverse[..., :, 4:] == 0).all()
    assert (pseudo_inverse(torch.zeros(1, 1, 3, 3), 6) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
def test_never_nan_where_the_core_has_no_full_rank(dtype: torch.dtype, size: float):
    method = sq.Nystrom(landmarks=8, iterations=MOST_ITERATIONS)
    same = normal(1, 2, 1, 8, dtype=dtype).expand(1, 2, 40, 8)
    q, k, v = size * same, size * same, normal(1, 2, 40, 8, seed=1, dtype=dtype)
    wanted = v.double().mean(2, keepdim=True).expand_as(v)
    torch.testing.assert_close(method(q, k, v).double(), wanted, atol=1e-2, rtol=0)
    far = [size * x for x in qkv(40, dtype=dtype)]
    assert sq.Nystrom(landmarks=8)(*far).isfinite().all()
    assert method(*(x.float() for x in far)).isfinite().all()


def test_too_many_iterations_are_refused():
    with pytest.raises(ValueError, match="iterations=25, but it must be at most 24"):
        sq.Nystrom(iterations=25)


def test_another_item_changes_nothing():
    q, k, v = qkv(40)
    loud = [torch.cat([x[:1], 20 * x[1:]]) for x in (q, k, v)]
    method = sq.Nystrom(landmarks=6)
    torch.testing.assert_close(method(*loud)[:1], method(q, k, v)[:1])


# ---------------------------------------------------------------------- convolution


@pytest.mark.parametrize("width", [1, 3, 4])
def test_the_convolution_is_added(width: int):
    q, k, v = qkv(20, H=4, G=2)
    bound = sq.Nystrom(landmarks=5, convolution=width).bind(heads=4, kv_heads=2, head_dim=8)
    bound.learned.kernel.data = normal(2, width)
    wanted = sq.Nystrom(landmarks=5)(q, k, v, enable_gqa=True)
    for h in range(4):
        for i in range(20):
            for j in range(width):
                at = i + j - width // 2
                if 0 <= at < 20:
                    wanted[:, h, i] += bound.learned.kernel[h // 2, j].item() * v[:, h // 2, at]
    torch.testing.assert_close(bound(q, k, v), wanted)


def test_only_the_convolution_is_learned():
    assert not sq.Nystrom().traits.learned
    bound = sq.Nystrom(landmarks=50, convolution=3).bind(heads=2, head_dim=8)
    q, k, v = qkv()
    bound(q, k, v).square().sum().backward()
    assert bound.learned.kernel.grad.abs().max() > 0
    bound.learned.kernel.data.zero_()
    torch.testing.assert_close(bound(q, k, v), naive(q, k, v), atol=1e-5, rtol=1e-4)


def test_a_convolution_needs_the_keys_to_be_the_queries_tokens():
    assert sq.Nystrom().refuses(Mask(), cross=True) is None
    assert "cross-attention" in sq.Nystrom(convolution=3).refuses(Mask(), cross=True)
