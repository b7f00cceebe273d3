"""Linformer against its formula written out query by query; its limits, lengths and starts."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import subquad as sq
from subquad import Mask
from subquad.testing.oracle import gradients, naive, normal, qkv, tracked
from tests.library.methods.random_calls import some_mask

LONGEST = 40


def fitted(
    text: str, *, heads: int = 2, kv_heads: int | None = None, D: int = 8, longest: int = LONGEST
) -> sq.BoundMethod:
    """Bound, with parameters that are not those of the start."""
    bound = sq.parse_method(text).bind(heads=heads, kv_heads=kv_heads, head_dim=D, max_length=longest)
    for i, parameter in enumerate(bound.parameters()):
        parameter.data += 0.2 * normal(*parameter.shape, seed=70 + i)
    return bound.eval()


def equal_segments(tokens: int, k: int) -> list[list[int]]:
    """The ranks of each segment, sizes differing by 1 at most."""
    labels = [rank * k // max(tokens, k) for rank in range(tokens)]
    return [[rank for rank in range(tokens) if labels[rank] == segment] for segment in range(k)]


def matrix(weights: Tensor, method: sq.Linformer, longest: int) -> Tensor:
    """E or F, whole."""
    if method.projection == "learned":
        return weights
    out = torch.zeros(len(weights), method.k, longest, dtype=weights.dtype)
    for segment, members in enumerate(equal_segments(longest, method.k)):
        out[:, segment, members] = weights[:, 0, : len(members)]
    return out


def row(bound: sq.BoundMethod, head: int, q: Tensor, seen: Tensor, k: Tensor, v: Tensor, exact: set[int]) -> Tensor:
    """One query's output: `seen` are the numbers of its keys, in order, and `exact` the ranks that are in no sum."""
    method, learned = bound.method, bound.learned
    rest = [rank for rank in range(len(seen)) if rank not in exact]
    k, v, scale = k[seen], v[seen], q.shape[0] ** -0.5
    logits, values = [scale * q @ k[rank] for rank in sorted(exact)], [v[rank] for rank in sorted(exact)]
    if method.projection == "mean-pool":
        for members in (m for m in equal_segments(len(rest), method.k) if m):
            ranks = [rest[member] for member in members]
            logits.append(scale * q @ k[ranks].mean(0) + math.log(len(ranks)))
            values.append(v[ranks].mean(0))
    else:
        longest = learned.max_length
        e = matrix(learned.key.to(q.dtype), method, longest)
        f = e if learned.value is None else matrix(learned.value.to(q.dtype), method, longest)
        own = head if len(e) > 1 else 0
        sizes = equal_segments(longest, method.k)
        for segment, members in enumerate(sizes):
            count = len(set(members) & set(rest))
            local = method.start == "pool" or method.projection == "convolution"
            if not (count if local else rest):
                continue
            size = max(map(len, sizes)) if method.projection == "convolution" else len(members)
            factor = size / count if method.start == "pool" else 1.0
            logit = scale * factor * q @ (e[own, segment, rest] @ k[rest])
            if method.start == "pool":
                logit = logit + math.log(count) + learned.bias[own, segment]
            logits.append(logit)
            values.append(factor * f[own, segment, rest] @ v[rest])
    if not logits:
        return torch.zeros_like(v[0]) if len(v) else torch.zeros(v.shape[1], dtype=v.dtype)
    return torch.stack(logits).softmax(0) @ torch.stack(values)


def brute(bound: sq.BoundMethod, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """The whole, query by query."""
    (B, H, N, _), M, times = q.shape, k.shape[2], q.shape[1] // k.shape[1]
    dense = mask.to_dense(N, M).expand(B, 1, N, M)
    exact_ends = bound.method.ends == "exact"
    rows = []
    for b in range(B):
        for h in range(H):
            for t in range(N):
                seen = dense[b, 0, t].nonzero().flatten()
                exact = {0} if exact_ends and len(seen) else set()
                if exact_ends and len(seen) and (not mask.is_causal or seen[-1] == t + (mask.offset or 0)):
                    exact.add(len(seen) - 1)
                rows.append(row(bound, h // times, q[b, h, t], seen, k[b, h // times], v[b, h // times], exact))
    return torch.stack(rows).view(B, H, N, -1)


SETTINGS = [
    "linformer:k=5",
    "linformer:k=4,sharing=none,ends=pooled",
    "linformer:k=3,sharing=none,start=random",
    "linformer:k=6,sharing=key-value,start=random,ends=pooled",
    "linformer:k=7,projection=convolution",
    "linformer:k=5,sharing=none,projection=convolution,start=random,ends=pooled",
    "linformer:k=5,sharing=layerwise,projection=convolution,start=random",
    "linformer:k=4,projection=mean-pool",
    "linformer:k=5,projection=mean-pool,ends=pooled",
    "linformer:k=50",
]


@pytest.mark.parametrize("text", SETTINGS)
def test_equals_brute_force(text: str):
    rng, causal = random.Random(1), 0
    for shape in range(12):
        B, G, times, N = rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 20)
        bound = fitted(text, heads=G * times, kv_heads=G, D=4)
        M = rng.randint(1, 20) if rng.random() < 0.4 else N
        mask = some_mask(rng, bound.method, B, N, M)
        causal += mask.is_causal
        sizes = (B, G * times, N, 4), (B, G, M, 4), (B, G, M, 3)
        inputs = tracked(*(normal(*size, seed=3 * shape + i, dtype=torch.float64) for i, size in enumerate(sizes)))
        out, wanted = bound(*inputs, mask=mask), brute(bound, *inputs, mask) + 0.0 * inputs[0].sum()
        at = f"shape {shape}: {sizes[0]}, {sizes[1]} under {mask}"
        torch.testing.assert_close(out, wanted, atol=1e-9, rtol=1e-7, msg=lambda m, at=at: f"{at}: {m}")
        everything = [*inputs, *bound.parameters()]
        grads, wanted_grads = gradients(out, *everything), gradients(wanted, *everything)
        torch.testing.assert_close(grads, wanted_grads, atol=1e-6, rtol=1e-5, msg=lambda m, at=at: f"{at}: {m}")
    assert causal > 0 or bound.method.traits.causal == "no"


@pytest.mark.parametrize("text", ["linformer:k=16", "linformer:k=16,start=random", "linformer:k=16,ends=pooled"])
def test_the_causal_form_in_fp32_at_length(text: str):
    bound, (q, k, v) = fitted(text, heads=1, D=16, longest=300), qkv(300, B=1, H=1, D=16)
    exact = brute(bound, q.double(), k.double(), v.double(), Mask.causal())
    torch.testing.assert_close(bound(q, k, v, is_causal=True).double(), exact, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ["identity", "permutation"])
def test_identity_and_permutations_are_exact(order: str, causal: bool):
    q, k, v = qkv(24)
    bound = sq.Linformer(k=24, ends="pooled", start="random").bind(heads=2, head_dim=8, max_length=24)
    rows = torch.arange(24) if order == "identity" else normal(24, seed=5).argsort()
    bound.learned.key.data, bound.learned.value.data = torch.eye(24)[None, rows], torch.eye(24)[None, rows]
    if causal:  # a row of the future is a key of 0 with a value of 0, and has weight, unlike in exact attention
        wanted = torch.cat([k, torch.zeros_like(k)], 2), torch.cat([v, torch.zeros_like(v)], 2)
        past = torch.ones(24, 24, dtype=torch.bool).tril()
        torch.testing.assert_close(
            bound(q, k, v, is_causal=True), naive(q, *wanted, torch.cat([past, ~past], 1)), atol=1e-5, rtol=1e-4
        )
    else:
        torch.testing.assert_close(bound(q, k, v), naive(q, k, v), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("ends", ["pooled", "exact"])
def test_a_pooling_start_with_a_row_for_each_token_is_exact_attention_causal_too(ends: str):
    q, k, v = qkv(24)
    bound = sq.Linformer(k=30, ends=ends).bind(heads=2, head_dim=8, max_length=30)
    torch.testing.assert_close(bound(q, k, v), naive(q, k, v), atol=1e-5, rtol=1e-4)
    past = torch.ones(24, 24, dtype=torch.bool).tril()
    torch.testing.assert_close(bound(q, k, v, is_causal=True), naive(q, k, v, past), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("projection", ["learned", "convolution", "mean-pool"])
def test_pooling_is_exact_for_keys_and_values_that_are_constant_on_segments(projection: str):
    q, k, v = qkv(24)
    k, v = (x[:, :, ::4].repeat_interleave(4, dim=2) for x in (k, v))
    method = sq.Linformer(k=6, ends="pooled", projection=projection)
    out = method.bind(heads=2, head_dim=8, max_length=24)(q, k, v)
    torch.testing.assert_close(out, naive(q, k, v), atol=1e-5, rtol=1e-4)
    uneven = [x[:, :, :22] for x in (q, k, v)]  # the last segment holds 2 tokens, which counts
    if projection != "mean-pool":  # whose segments are those of 22 tokens
        out = method.bind(heads=2, head_dim=8, max_length=24)(*uneven)
        torch.testing.assert_close(out, naive(*uneven), atol=1e-5, rtol=1e-4)


def test_a_full_length_learned_start_is_mean_pooling():
    q, k, v = qkv(24)
    for ends in ("pooled", "exact"):
        pooled = sq.Linformer(k=6, ends=ends, projection="mean-pool")
        learned = replace(pooled, projection="learned")
        wanted = pooled.bind(heads=2, head_dim=8)(q, k, v)
        same = torch.allclose(learned.bind(heads=2, head_dim=8, max_length=24)(q, k, v), wanted, atol=1e-5)
        assert same == (ends == "pooled")  # with exact ends, the others' segments are cut anew


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("sharing", "shapes"),
    [
        ("none", [(2, 3, 9), (2, 3, 9)]),
        ("headwise", [(1, 3, 9), (1, 3, 9)]),
        ("key-value", [(1, 3, 9)]),
        ("layerwise", [(1, 3, 9)]),
    ],
)
def test_sharing_decides_how_many_projections_there_are(sharing: str, shapes: list[tuple[int, ...]]):
    learned = sq.Linformer(k=3, sharing=sharing, start="random").make_learned(4, 2, 8, 9)
    assert [tuple(p.shape) for p in learned.parameters()] == shapes


def test_a_random_start_keeps_logits_small_and_differs_by_seed():
    def start(seed: int) -> nn.Module:
        return sq.Linformer(k=64, start="random", seed=seed).make_learned(4, 4, 8, 512)

    key, value = start(0).key, start(0).value
    assert abs(key.var() * (512 + 64) - 1) < 0.05
    assert torch.equal(key, start(0).key)
    for other in (value, start(1).key):
        assert not torch.equal(key, other)


def test_what_is_learned_must_know_the_longest_input_and_refuses_longer_ones():
    with pytest.raises(
        ValueError, match=r"'linformer' learns a projection .* max_length=… to bind, .* or sq\.hf\.swap"
    ):
        sq.Linformer().bind(heads=2, head_dim=8)
    bound = sq.Linformer(k=4).bind(heads=2, head_dim=8, max_length=20)
    for mask in (Mask(), Mask.causal()):
        with pytest.raises(ValueError, match=r"at most 20 tokens .*, but there are 21 keys"):
            bound(*qkv(21), mask=mask)
    q, k, v = qkv(15)
    _, state = bound.step(q, k, v, bound.init_state(2, like=q, value_dim=6))
    with pytest.raises(ValueError, match=r"at most 20 tokens .*, but there are 21 keys"):
        bound.step(*(x[:, :, :6] for x in (q, k, v)), state)
    assert bound(*qkv(12, 20)).shape == (2, 2, 12, 6)


def test_mean_pooling_is_not_causal_because_segments_depend_on_the_length():
    assert "a causal mask" in sq.Linformer(projection="mean-pool").refuses(Mask.causal())
    assert sq.Linformer().refuses(Mask.causal()) is None


def test_mean_pooling_and_one_projection_for_all_layers_are_not_fitted_layer_by_layer():
    assert sq.Linformer().traits.fit is not None
    assert sq.Linformer(projection="mean-pool").traits.fit is None
    assert sq.Linformer(sharing="layerwise").traits.fit is None


def test_a_step_of_fitting_brings_the_outputs_closer():
    bound, inputs = sq.Linformer(k=4).bind(heads=2, head_dim=8, max_length=24), qkv(24)
    *_, call = bound.prepare(*inputs, mask=Mask.padding([24, 13]))
    optimizer = torch.optim.Adam(bound.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = bound.method.fit_loss(*inputs, call)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_layers_can_share_what_they_learn():
    first = sq.nn.MultiheadAttention(16, 2, method="linformer:k=4,sharing=layerwise", max_length=20)
    second = sq.nn.MultiheadAttention(
        16, 2, method="linformer:k=4,sharing=layerwise", max_length=20, shared=first.attention.learned
    )
    assert second.attention.learned is first.attention.learned
    second(first(normal(2, 20, 16))).sum().backward()
    assert first.attention.learned.key.grad.abs().max() > 0


@pytest.mark.parametrize("assign", [False, True], ids=["emptied", "assigned"])
@pytest.mark.parametrize("projection", ["learned", "convolution"])
def test_a_layer_from_the_meta_device_is_whole_once_its_parameters_are_loaded(projection: str, assign: bool):
    def layer() -> nn.Module:
        return sq.nn.MultiheadAttention(16, 2, method=f"linformer:k=5,projection={projection}", max_length=20)

    trained = layer()
    with torch.device("meta"):
        loaded = layer()
    if not assign:
        loaded.to_empty(device="cpu")
        for buffer in loaded.buffers():
            buffer.fill_(3)
    loaded.load_state_dict(trained.state_dict(), assign=assign)
    assert torch.equal(loaded(normal(2, 17, 16)), trained(normal(2, 17, 16)))


# ---------------------------------------------------------------------- what published code does


def test_a_triangular_mask_on_the_projection_leaks_the_future():
    q, k, v = qkv(16, B=1, H=1)
    e = 0.25 * normal(1, 4, 16, seed=1) * torch.ones(4, 16).tril(12)  # row κ sums up to token κ + 12
    changed = torch.cat([k[:, :, :10], 5 + k[:, :, 10:]], 2)

    def masked(k: Tensor) -> Tensor:
        return (q @ (e @ k).mT).softmax(-1) @ (e @ v)

    assert (masked(changed) - masked(k))[:, :, :10].abs().max() > 0.1
    bound = fitted("linformer:k=4", heads=1, longest=16)
    torch.testing.assert_close(
        bound(q, changed, v, is_causal=True)[:, :, :10], bound(q, k, v, is_causal=True)[:, :, :10]
    )
