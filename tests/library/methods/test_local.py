"""Local attention against the dense formula, with and without relative positions; what it refuses."""

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.tokens.slots import Buckets
from subquad.methods.core.method import Call
from subquad.testing.contract import run_per_segment
from subquad.testing.oracle import gradients, naive, normal, qkv, tracked
from tests.library.hf.models import build

MASKS = {
    "plain": Mask(),
    "causal": Mask.causal(),
    "left": Mask.padding(torch.arange(23) >= torch.tensor([[0], [11]])),
    "right": Mask.padding([23, 8]),
    "keys": Mask.padding(keys=[20, 5]),
    "causal and left": Mask.causal() & Mask.padding(torch.arange(23) >= torch.tensor([[3], [11]])),
    "narrower": Mask.window(2),
    "wider": Mask.window(9),
    "causal and narrower": Mask.causal() & Mask.window(2),
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def distance_terms(query: Tensor, positions: torch.nn.Module, offset: int, M: int) -> Tensor:
    """(q_i + v)·W_R r_{i−j} for every pair, each r written out: Dai et al. 2019, section 3.3."""
    N, (H, width, _) = query.shape[2], positions.weight.shape
    terms = []
    for i in range(N):
        for j in range(M):
            angles = [(i + offset - j) / 10000 ** (2 * n / width) for n in range(width // 2)]
            r = torch.tensor(angles, dtype=query.dtype)
            r = torch.cat([r.sin(), r.cos()])
            of_head = torch.stack([r @ positions.weight[h].to(query.dtype) for h in range(H)])
            terms.append(((query[:, :, i] + positions.position[:, 0].to(query.dtype)) * of_head).sum(-1))
    return torch.stack(terms, dim=-1).unflatten(-1, (N, M))


def dense_of_distances(
    positions: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | float = 0.0
) -> Tensor:
    """The whole N×M softmax with the terms of all distances."""
    N, M = q.shape[2], k.shape[2]
    terms = distance_terms(q, positions, mask.offset or 0, M) * q.shape[-1] ** -0.5
    return naive(q + positions.content.to(q.dtype), k, v, mask.to_dense(N, M), bias=terms + bias)


def dense(layer: sq.BoundMethod, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """The whole N×M softmax under the window."""
    return dense_of_distances(layer.learned, q, k, v, mask & Mask.window(layer.method.window))


def relative(window: int = 5, heads: int = 2, **sizes: int) -> sq.BoundMethod:
    """A layer whose parameters are large enough to matter."""
    layer = sq.Local(window=window, positions="relative").bind(heads=heads, head_dim=8, **sizes)
    for parameter in layer.parameters():
        parameter.data.mul_(30.0)
    return layer


@every_mask
@pytest.mark.parametrize("window", [0, 1, 5, 16, 22, 400])
def test_it_is_exact_attention_under_a_window(window, mask):
    inputs, others = tracked(*qkv(23)), tracked(*qkv(23))
    out = sq.attention(*inputs, method=sq.Local(window=window), mask=mask)
    wanted = naive(*others, (mask & Mask.window(window)).to_dense(23, 23))
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(gradients(out, *inputs), gradients(wanted, *others))


@pytest.mark.parametrize("N", [1, 15, 16, 17, 48, 71])
def test_every_number_of_blocks(N):
    inputs = qkv(N)
    for mask in (Mask(), Mask.causal()):
        out = sq.attention(*inputs, method=sq.Local(window=3), mask=mask)
        torch.testing.assert_close(out, naive(*inputs, (mask & Mask.window(3)).to_dense(N, N)))


@every_mask
def test_relative_positions_equal_the_dense_formula_forward_and_backward(mask):
    layer, inputs = relative(), tracked(*qkv(23, dtype=torch.float64))
    learned = list(layer.parameters())
    out, wanted = layer(*inputs, mask=mask), dense(layer, *inputs, mask)
    torch.testing.assert_close(out, wanted)
    grads, wanted_grads = gradients(out, *inputs, *learned), gradients(wanted, *inputs, *learned)
    torch.testing.assert_close(grads, wanted_grads)
    assert all(grad.abs().max() > 1e-3 for grad in grads)


def test_relative_positions_with_shared_key_heads():
    layer, (q, k, v) = relative(heads=4, kv_heads=2), qkv(23, H=4, G=2)
    torch.testing.assert_close(layer(q, k, v), dense(layer, q, k, v, Mask()))


def test_relative_positions_tell_the_past_from_the_future():
    layer, (q, k, v) = relative(), qkv(23)
    turned = layer(*(x.flip(2) for x in (q, k, v))).flip(2)
    assert not torch.allclose(layer(q, k, v), turned, atol=1e-2)


def test_left_padding_changes_no_distance():
    layer, inputs = relative(), qkv(15)
    padded = [torch.cat([normal(2, 2, 8, x.shape[3], seed=7), x], dim=2) for x in inputs]
    out = layer(*padded, mask=Mask.padding(torch.arange(23).expand(2, -1) >= 8))
    torch.testing.assert_close(out[:, :, 8:], layer(*inputs))


@pytest.mark.parametrize("offset", [0, 4, 19, 40])
@pytest.mark.parametrize("is_causal", [True, False])
def test_queries_in_the_middle_of_a_cache(offset, is_causal):
    mask, (q, k, v) = Mask(is_causal=is_causal, offset=offset), qkv(4, 23)
    allowed = (mask & Mask.window(5)).to_dense(4, 23)
    torch.testing.assert_close(sq.attention(q, k, v, method=sq.Local(window=5), mask=mask), naive(q, k, v, allowed))
    torch.testing.assert_close(relative()(q, k, v, mask=mask), dense(relative(), q, k, v, mask))


def test_an_offset_of_its_own_for_each_item():
    (q, k, v), offset = qkv(4, 23), torch.tensor([2, 19])
    for layer in (sq.Local(window=5), relative()):
        for mask in (Mask(offset=offset), Mask.causal(offset=offset)):
            out = layer(q, k, v, mask=mask)
            for item, at in enumerate(offset.tolist()):
                alone = [x[item : item + 1] for x in (q, k, v)]
                wanted = layer(*alone, mask=Mask(is_causal=mask.is_causal, offset=at))
                torch.testing.assert_close(out[item : item + 1], wanted)


def test_without_an_offset_it_takes_no_other_keys():
    with pytest.raises(ValueError, match="'local' does not support fewer or more keys than queries"):
        sq.attention(*qkv(4, 23), method="local")


@pytest.mark.parametrize("layer", [sq.Local(window=3), relative(3)], ids=["none", "relative"])
def test_interleaved_segments_count_their_own_tokens(layer):
    ids = torch.tensor([0, 1, 2]).repeat(8)[:23].expand(2, 23).clone()
    ids[1] = ids[1].flip(0)
    q, k, v = qkv(23)
    alone = torch.zeros(2, 2, 23, 6)
    for item in (0, 1):
        for number in (0, 1, 2):
            here = ids[item] == number
            alone[item][:, here] = layer(*(x[item : item + 1, :, here] for x in (q, k, v)))[0]
    torch.testing.assert_close(layer(q, k, v, mask=Mask.segments(ids)), alone)


def test_a_masks_window_inside_segments():
    ids, inputs = torch.tensor([0] * 10 + [1] * 13).expand(2, 23), qkv(23)
    mask = Mask.segments(ids) & Mask.window(2)
    out = sq.attention(*inputs, method=sq.Local(window=4), mask=mask)
    torch.testing.assert_close(out, naive(*inputs, mask.to_dense(23, 23)))
    assert not torch.allclose(out, run_per_segment(sq.Local(window=4), *inputs, ids, valid=ids >= 0))


def test_a_masks_window_over_interleaved_segments_is_refused():
    ids = torch.arange(23).expand(2, 23) % 3
    with pytest.raises(ValueError, match=r"window of 2 .* other tokens are between those of one segment"):
        sq.attention(*qkv(23), method="local", mask=Mask.segments(ids) & Mask.window(2))


def test_meetings_are_the_window_each_pair_once_and_no_padding():
    (q, k, _), method = qkv(23), sq.Local(window=4)
    for mask in MASKS.values():
        call = Call(mask=mask, bias=None, scale=1.0, dropout_p=0.0, seed=0)
        (buckets,) = method.meetings(q, k, call)
        wanted = (mask & Mask.window(4)).to_dense(23, 23).expand(2, 2, -1, -1)
        assert torch.equal(buckets.multiplicity(23, 23, mask), wanted.float())


def test_nothing_in_it_grows_with_the_square():
    """No tensor of a forward and backward pass holds more than some windows of numbers a token."""
    largest = []
    inputs = tracked(*qkv(2048, B=1))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: largest.append(x.numel()) or x, lambda x: x):
        for layer in (sq.Local(window=8), relative(8)):
            layer(*inputs).sum().backward()
    assert max(largest) <= 2 * 2048 * 17 * 8


def test_terms_of_another_window_are_refused():
    q, k, v = qkv(23)
    call = Call(mask=Mask(), bias=None, scale=1.0, dropout_p=0.0, seed=0)
    (buckets,) = sq.Local(window=4).meetings(q, k, call)
    terms = torch.zeros(2, 2, 23, 5)
    with pytest.raises(ValueError, match="contains 5 distances, but a window of 4 has 9"):
        attend_pairs(q, k, v, buckets, Mask(), scale=1.0, of_distance=terms)
    attend_pairs(q, k, v, buckets, Mask.causal(), scale=1.0, of_distance=terms)
    with pytest.raises(ValueError, match="`of_distance` needs a window"):
        attend_pairs(q, k, v, Buckets(buckets.queries, buckets.keys), Mask(), scale=1.0,
                         of_distance=terms)  # fmt: skip


# ---------------------------------------------------------------------- in layers


def test_in_a_layer_the_positions_are_learned():
    layer = sq.nn.MultiheadAttention(64, 4, method=sq.Local(window=16, positions="relative"))
    layer(normal(2, 40, 64), mask=Mask.padding([40, 13])).square().sum().backward()
    learned = list(layer.attention.parameters())
    assert [tuple(p.shape) for p in learned] == [(4, 1, 16), (4, 1, 16), (4, 64, 16)]
    assert all(p.grad.abs().max() > 0 for p in learned)


@pytest.mark.parametrize("method", [sq.Local(window=3), sq.Local(window=3, positions="relative")], ids=str)
def test_a_step_of_a_layer_equals_the_row_of_the_whole(method):
    layer, x = sq.nn.MultiheadAttention(32, 4, method=method), normal(2, 20, 32)
    whole = layer(x, is_causal=True)
    for t in (0, 7, 19):
        step = layer(x[:, t : t + 1], x[:, : t + 1], mask=Mask.causal(offset=t))
        torch.testing.assert_close(step, whole[:, t : t + 1])
    with pytest.raises(ValueError, match="'local' does not support cross-attention"):
        layer(x, normal(2, 20, 32, seed=1))


def test_the_start_is_small_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    one, other = (sq.Local(positions="relative").bind(heads=2, head_dim=8) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert 0.01 < a.std() < 0.03


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generation_with_a_cache_equals_generation_without(name):
    case = build(name)
    sq.hf.swap(case.model, "local:window=3")
    options = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
    cached = case.model.generate(**case.inputs, **options)
    assert torch.equal(cached, case.model.generate(**case.inputs, use_cache=False, **options))


def test_a_windowed_model_runs_its_own_window():
    case = build("modernbert")
    exact = case.output()
    sq.hf.swap(case.model, {1: "local:window=400", 2: "local:window=400"})
    torch.testing.assert_close(case.output(), exact, atol=1e-5, rtol=1e-5)
    sq.hf.swap(case.model, "local:window=1")
    assert not torch.allclose(case.output(), exact, atol=1e-3)


def test_cross_attention_of_a_model_is_refused():
    with pytest.raises(ValueError, match="'local' is for self-attention and this is cross-attention"):
        sq.hf.swap(build("bart").model, "local")
