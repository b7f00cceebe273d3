"""A memory before the tokens of a layer: equality with one long pass, gradients, masks, what is refused."""

import copy

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.testing.oracle import normal

REMEMBERING = [
    method
    for text in ("full:positions=relative", "local:window=4,positions=relative", *sq.list_methods())
    for method in [
        sq.parse_method(text) if ":" in text else sq.from_dict({"name": text, **sq.METHODS[text].traits.example})
    ]
    if method.traits.causal == "strict" and (method.traits.cross or method.traits.cached)
]


def layer(method="full:positions=relative", **options) -> sq.nn.MultiheadAttention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = sq.nn.MultiheadAttention(12, 4, method=method, max_length=64, **options).eval()
    for parameter in made.attention.parameters():
        parameter.data.mul_(20.0)
    return made


def in_segments(ours, x: torch.Tensor, segment: int, length: int, **options) -> torch.Tensor:
    memory, outs = None, []
    for part in x.split(segment, dim=1):
        outs.append(ours(part, memory=memory, is_causal=True, **options))
        memory = sq.nn.remember(part, memory, length=length)
    return torch.cat(outs, 1)


@pytest.mark.parametrize("method", REMEMBERING, ids=str)
def test_where_the_memory_covers_all_it_is_one_long_pass(method):
    x, ours = normal(2, 24, 12), layer(method)
    whole = ours(x, is_causal=True, seed=3)
    torch.testing.assert_close(in_segments(ours, x, 9, 24, seed=3), whole, atol=1e-5, rtol=1e-4)


def test_a_window_needs_no_longer_memory():
    x, ours = normal(2, 24, 12), layer("local:window=4,positions=relative")
    whole = ours(x, is_causal=True)
    torch.testing.assert_close(in_segments(ours, x, 7, 4), whole)
    assert not torch.allclose(in_segments(ours, x, 7, 3), whole, atol=1e-4)


def test_a_shorter_memory_is_a_window_that_begins_with_it():
    x, ours = normal(2, 20, 12), layer()
    torch.testing.assert_close(in_segments(ours, x, 10, 4)[:, 10:], ours(x[:, 6:], is_causal=True)[:, 4:])
    torch.testing.assert_close(in_segments(ours, x, 10, 0)[:, 10:], ours(x[:, 10:], is_causal=True))


def test_without_a_causal_mask_all_new_tokens_are_seen():
    x, ours = normal(2, 20, 12), layer()
    torch.testing.assert_close(ours(x[:, 6:], memory=x[:, :6]), ours(x)[:, 6:])


def test_the_gradient_stops_at_the_memory_and_reaches_the_weights():
    x, ours = normal(2, 9, 12), layer()
    memory = normal(2, 5, 12, seed=1).requires_grad_()
    ours(x, memory=memory, is_causal=True).square().sum().backward()
    assert memory.grad is None
    with_memory = ours.k_proj.weight.grad.clone()
    ours.zero_grad()
    keys = torch.cat([memory.detach(), x], 1)
    ours(x, keys, mask=Mask.causal(offset=5)).square().sum().backward()
    torch.testing.assert_close(with_memory, ours.k_proj.weight.grad)
    assert not sq.nn.remember(memory, length=3).requires_grad


def test_remember_keeps_the_last_states():
    x, before = normal(2, 4, 12), normal(2, 5, 12, seed=1)
    both = torch.cat([before, x], 1)
    for length in (0, 3, 4, 7, 9, 100):
        assert torch.equal(sq.nn.remember(x, before, length=length), both[:, max(0, 9 - length) :])
    assert torch.equal(sq.nn.remember(x, length=3), x[:, 1:])


def test_padding_is_that_of_the_new_tokens_or_of_all_keys():
    x, memory, ours = normal(2, 9, 12), normal(2, 5, 12, seed=1), layer()
    out = ours(x, memory=memory, mask=Mask.padding([9, 4]), is_causal=True)
    torch.testing.assert_close(out[1:, :4], ours(x[1:, :4], memory=memory[1:], is_causal=True))
    torch.testing.assert_close(out[1, 4:], ours.out_proj.bias.expand(5, 12))
    valid = torch.ones(2, 14, dtype=torch.bool)
    valid[1, :3] = False
    out = ours(x, memory=memory, mask=Mask.causal() & Mask.padding(keys=valid))
    torch.testing.assert_close(out[1:], ours(x[1:], memory=memory[1:, 3:], is_causal=True))


def test_other_orders_of_axes():
    x, memory, ours = normal(2, 9, 12), normal(2, 5, 12, seed=1), layer()
    wanted = ours(x, memory=memory, is_causal=True)
    second = copy.deepcopy(ours)
    second.batch_first = False
    turned = second(x.transpose(0, 1), memory=memory.transpose(0, 1), is_causal=True)
    torch.testing.assert_close(turned.transpose(0, 1), wanted)
    torch.testing.assert_close(ours(x[0], memory=memory[0], is_causal=True), wanted[0])


def test_a_layer_in_bf16():
    x, memory, ours = normal(2, 9, 12), normal(2, 5, 12, seed=1), layer()
    wanted = ours(x, memory=memory, is_causal=True)
    out = ours.bfloat16()(x.bfloat16(), memory=memory.bfloat16(), is_causal=True)
    torch.testing.assert_close(out.float(), wanted, atol=6e-2, rtol=6e-2)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("memory", "error", "message"),
    [
        (torch.zeros(3, 5, 12), ValueError, "`memory` has 3 items but `query` has 2; they must match"),
        (torch.zeros(2, 5, 8), ValueError, "`memory` has 8 hidden units but `query` has 12"),
        (torch.zeros(2, 5, 12).double(), TypeError, "`memory` is torch.float64 but `query` is torch.float32"),
        (torch.zeros(5, 12), ValueError, r"`memory` is \(5, 12\) but `query` is \(2, 9, 12\)"),
        (torch.zeros(2, 5, 12, device="meta"), ValueError, "`memory` is on meta but `query` is on cpu"),
    ],
    ids=("batch", "width", "dtype", "axes", "device"),
)
@pytest.mark.usefixtures("unchecked")
def test_a_memory_of_other_sizes_is_refused(memory, error, message):
    with pytest.raises(error, match=message):
        layer()(normal(2, 9, 12), memory=memory, is_causal=True)
    with pytest.raises(error, match=message.replace("query", "x")):
        sq.nn.remember(normal(2, 9, 12), memory, length=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": normal(2, 9, 12, seed=3)}, "`memory` is for self-attention to padded tokens: give `query` alone"),
        ({"key_padding_mask": torch.zeros(2, 9, dtype=torch.bool)}, "not with torch's key_padding_mask"),
        ({"mask": Mask.causal(offset=2)}, r"the memory puts 5 keys before the first query, but the mask is .*offset=2"),
        (
            {"mask": Mask.segments(torch.zeros(2, 9).int())},
            "the mask gives segments, but there are 9 queries and 14 keys",
        ),
        ({"keep": [0]}, "`keep` is for self-attention, but there are 9 queries and 14 keys"),
    ],
    ids=("key", "torch's mask", "offset", "segments", "keep"),
)
def test_what_a_memory_does_not_go_with(options, message):
    with pytest.raises(ValueError, match=message):
        layer("full")(normal(2, 9, 12), memory=normal(2, 5, 12, seed=1), **options)


@pytest.mark.parametrize("method", ["shared-full", "reformer", "sinkhorn"])
def test_methods_whose_keys_are_the_queries_are_refused_by_name(method):
    with pytest.raises(ValueError, match=f"'{method}' supports no memory: its keys are those of the queries"):
        layer(method)(normal(2, 9, 12), memory=normal(2, 5, 12, seed=1))


def test_a_layer_with_other_keys_takes_none():
    with pytest.raises(ValueError, match="queries of width 12, keys of 6 and values of 6"):
        layer("full", kdim=6)(normal(2, 9, 12), memory=normal(2, 5, 12, seed=1))


@pytest.mark.parametrize("length", [-1, 2.5, True])
def test_a_length_that_is_no_number_of_states(unchecked, length):
    with pytest.raises(ValueError, match=f"length={length}, but the number .* is a whole number ≥ 0"):
        sq.nn.remember(normal(2, 9, 12), length=length)
