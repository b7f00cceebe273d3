"""Attention inside buckets: every backend equals a dense softmax, and the compiled kernels keep their rules."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import subquad as sq
from subquad import Mask
from subquad.kernels import native
from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.native import interface
from subquad.kernels.tokens.slots import Buckets
from subquad.testing.oracle import gradients, normal, qkv, tracked
from subquad.tools.bench.calls import threads

compiled = pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")

SHAPES = {
    "square": {"N": 61, "D": 64, "E": 64},
    "cross, shared key heads": {"N": 45, "M": 131, "H": 4, "G": 2, "D": 24, "E": 40},
    "odd widths": {"N": 37, "M": 20, "D": 5, "E": 3},
    "one head": {"N": 150, "B": 1, "H": 1, "D": 8, "E": 17},
    "one key": {"N": 20, "M": 1},
    "one query": {"N": 1, "M": 30},
}
MASKS = {
    "no mask": Mask(),
    "causal": Mask.causal(),
    "causal, offset": Mask.causal(offset=9),
    "causal, offsets": Mask.causal(offset=torch.tensor([3, 20])),
    "window": Mask.window(4) & Mask.causal(offset=2),
    "window both ways": Mask.window(6),
}


def slots(B: int, H: int, T: int, S: int, tokens: int, seed: int) -> Tensor:
    """Any tokens, none twice in a block, and a share of empty slots; the last block is empty."""
    drawn = normal(B, H, T, max(tokens, S), seed=seed).argsort(-1)[..., :S].clamp(max=tokens)
    drawn = drawn.masked_fill(normal(B, H, T, S, seed=seed + 1) > 0.8, tokens)
    drawn[:, :, -1] = tokens
    return drawn


def two_sets(B: int, H: int, N: int, M: int) -> tuple[Buckets, ...]:
    """Buckets with one block each, and as many blocks of the same keys and of others in any order."""
    keys = slots(B, H, 4, min(M, 19), M, seed=1)
    bucket = torch.randint(4, (B, H, 6), generator=torch.Generator().manual_seed(4))
    more = slots(B, H, 4, min(M, 33), M, seed=2)
    return (
        Buckets(slots(B, H, 4, min(N, 13), N, seed=3), keys),
        Buckets(slots(B, H, 6, 3, N, seed=5), keys, bucket),
        Buckets(slots(B, H, 4, min(N, 50), N, seed=6), more),
    )


def dense(query, key, value, buckets, mask, *, scale, key_bias=None, hidden=None, other_keys_only=False):
    """One softmax over all keys, in which a key counts as often as it shares a bucket with the query."""
    H, N, M = query.shape[1], query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (key, value))
    times = sum(each.multiplicity(N, M, mask) for each in buckets)
    times = times * (1 - torch.eye(N, M)) if other_keys_only else times
    times = times if hidden is None else times * ~hidden[:, :, torch.arange(N) % hidden.shape[2]]
    logits = query @ key.mT * scale + (0 if key_bias is None else key_bias[:, :, None])
    logits = torch.where(times > 0, logits + times.clamp(min=1).log(), -1e30)
    seen = (times > 0).any(-1)
    return logits.softmax(-1) @ value * seen[..., None], torch.where(seen, logits.logsumexp(-1), -torch.inf)


def both(attend, inputs, *arguments, **options) -> list[Tensor]:
    """out, lse, and the gradients of a loss that reads both."""
    inputs = tracked(*inputs)
    bias = {"key_bias": inputs[3]} if len(inputs) > 3 else {}
    out, lse = attend(*inputs[:3], *arguments, scale=0.3, **bias, **options)
    seen = ~lse.isneginf()
    read = torch.cat([out, torch.where(seen, lse, 0.0)[..., None]], -1)
    return [out, lse, *gradients(read, *inputs)]


def assert_equal(have: list[Tensor], want: list[Tensor], tolerance: float = 1e-5):
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.covering
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("extra", ["plain", "biased, others only", "hidden"])
def test_equals_a_dense_softmax(implementation, poisoned, shape, mask, extra):
    inputs = qkv(**shape)
    (B, H, N, _), M = inputs[0].shape, inputs[1].shape[2]
    if isinstance(mask.offset, Tensor) and B == 1:
        mask = Mask.causal(offset=mask.offset[1:])
    options = {}
    if extra == "hidden":
        options = {"hidden": normal(B, H, 3, M, seed=9) > 0.5}
    elif extra != "plain":
        inputs, options = (*inputs, normal(B, H, M, seed=8)), {"other_keys_only": True}
    buckets = two_sets(B, H, N, M)
    have = both(attend_pairs, inputs, buckets, mask, **options)
    want = both(dense, [x.double() for x in inputs], buckets, mask, **options)
    assert_equal(have, [x.float() for x in want])


@pytest.mark.parametrize("sets", [1, 2], ids=["one set", "two"])
def test_many_queries_and_keys_cross_every_chunk(implementation, poisoned, sets):
    """More queries than a task has, more keys than are packed at a time, in fewer and more parts."""
    inputs = qkv(900, 1700, B=1, H=1, D=4, E=3)
    buckets = tuple(
        Buckets(slots(1, 1, 2, 850, 900, seed=i), slots(1, 1, 2, 1300, 1700, seed=i + 5)) for i in range(sets)
    )
    have = both(attend_pairs, inputs, buckets, Mask.causal(offset=800))
    want = both(dense, [x.double() for x in inputs], buckets, Mask.causal(offset=800))
    assert_equal(have, [x.float() for x in want])


def test_each_set_has_its_own_window(implementation):
    q, k, v = qkv(40)
    every = torch.arange(40).expand(2, 2, 1, -1)
    sets = Buckets(every, every, span=2), Buckets(every, every, span=9), Buckets(every, every)
    have = both(attend_pairs, (q, k, v), sets, Mask.causal())
    assert_equal(have, [x.float() for x in both(dense, [x.double() for x in (q, k, v)], sets, Mask.causal())])
    assert_equal(
        [attend_pairs(q, k, v, (sets[0], sets[2]), Mask.window(3), scale=0.3)[1]],
        [attend_pairs(q, k, v, (sets[0], Buckets(every, every, span=3)), Mask(), scale=0.3)[1]],
    )


@pytest.mark.covering
@pytest.mark.parametrize("mask", ["window", "window both ways"])
@pytest.mark.parametrize("rows", [1, 61], ids=["one row of terms", "a row for each query"])
@pytest.mark.parametrize("heads", [{}, {"H": 4, "G": 2}], ids=["heads", "shared key heads"])
def test_terms_of_the_distance(implementation, poisoned, mask, rows, heads):
    """Pairs that meet several times, queries that see no key by their terms, terms that differ by item or not."""
    inputs, mask = qkv(61, **heads), MASKS[mask]
    H, span = inputs[0].shape[1], mask.span
    ahead = torch.arange(61) - mask.positions(torch.arange(61)[:, None])
    terms = normal(1 if rows == 1 else 2, H, rows, span + 1 if mask.is_causal else 2 * span + 1, seed=8)
    terms = terms.masked_fill(terms > 0.8, -torch.inf)
    at = (ahead + span).clamp(0, terms.shape[3] - 1)
    buckets = two_sets(2, H, 61, 61)

    def dense_of_terms(query, key, value, terms):
        key, value = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (key, value))
        times, terms = sum(each.multiplicity(61, 61, mask) for each in buckets), terms.expand(2, H, 61, -1)
        terms = terms.gather(3, at.expand(2, H, -1, -1))
        logits = query @ key.mT * 0.3 + terms
        logits = torch.where((times > 0) & ~terms.isneginf(), logits + times.clamp(min=1).log(), -1e30)
        seen = (logits > -1e30).any(-1)
        return logits.softmax(-1) @ value * seen[..., None], torch.where(seen, logits.logsumexp(-1), -torch.inf)

    results = []
    for some in (inputs, [x.double() for x in inputs]):
        some = tracked(*some, terms.to(some[0].dtype, copy=True))
        if some[0].dtype == torch.float32:
            out, lse = attend_pairs(*some[:3], buckets, mask, scale=0.3, of_distance=some[3])
        else:
            out, lse = dense_of_terms(*some)
        read = torch.cat([out, torch.where(lse.isneginf(), 0.0, lse)[..., None]], -1)
        results.append([x.float() for x in (out, lse, *gradients(read, *some))])
    assert results[0][1].isneginf().any()
    assert_equal(*results)


@pytest.mark.parametrize("read", ["out", "lse"])
def test_either_output_may_be_read_alone(implementation, poisoned, read):
    inputs, every = tracked(*qkv(12), normal(2, 2, 12)), torch.arange(12).expand(2, 2, 1, -1)
    results = []
    for attend, some in ((attend_pairs, inputs), (dense, [x.double() for x in inputs])):
        out, lse = attend(*some[:3], (Buckets(every, every),), Mask(), scale=0.3, key_bias=some[3])
        results.append(gradients(out if read == "out" else lse, *inputs))
    assert_equal(*results)


def test_large_logits(implementation):
    inputs, every = qkv(30, 40), (torch.arange(30).expand(2, 2, 1, -1), torch.arange(40).expand(2, 2, 1, -1))
    inputs = [60 * inputs[0], 60 * inputs[1], inputs[2]]
    have = both(attend_pairs, inputs, (Buckets(*every),), Mask())
    want = both(dense, [x.double() for x in inputs], (Buckets(*every),), Mask())
    assert_equal(have, [x.float() for x in want], 2e-3)


@compiled
def test_nan_stays_with_its_head(implementation):
    q, k, v = qkv(20)
    every = torch.arange(20).expand(2, 2, 1, -1)
    clean = attend_pairs(q, k, v, (Buckets(every, every),), Mask(), scale=0.3)[0]
    v[0, 1, 3] = torch.nan
    out = attend_pairs(q, k, v, (Buckets(every, every),), Mask(), scale=0.3)[0]
    assert out[0, 1].isnan().all()
    assert torch.equal(out[0, 0], clean[0, 0])
    hidden = every.masked_fill(every == 3, 20)
    assert not attend_pairs(q, k, v, (Buckets(every, hidden),), Mask(), scale=0.3)[0].isnan().any()


# ---------------------------------------------------------------------- the compiled kernels


@compiled
@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_number_of_threads_changes_nothing(count, monkeypatch):
    """Bit for bit, with many heads and with one alone."""
    monkeypatch.setattr(interface, "SMALL", 0)
    for shape in ({"N": 90, "B": 2, "H": 12, "G": 6}, {"N": 1500, "B": 1, "H": 1}):
        inputs = qkv(**shape)
        buckets = two_sets(*inputs[0].shape[:3], inputs[1].shape[2])
        everyone = torch.arange(shape["N"]).expand(*inputs[0].shape[:2], 1, -1)
        buckets = (*buckets, Buckets(everyone, everyone))
        results = []
        for number in (1, count):
            with threads(number):
                results.append(both(attend_pairs, inputs, buckets, Mask.causal()))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@compiled
def test_sets_in_several_portions_are_merged(monkeypatch):
    inputs = qkv(40)
    buckets = two_sets(2, 2, 40, 40)
    want = both(attend_pairs, inputs, buckets, Mask())
    monkeypatch.setattr("subquad.kernels.attention.pairs.op.SLOTS", 100)
    assert_equal(both(attend_pairs, inputs, buckets, Mask()), want)


@compiled
def test_any_layout_of_the_inputs():
    q, k, v = qkv(40, E=8)
    buckets = two_sets(2, 2, 40, 40)
    want = both(attend_pairs, (q, k, v), buckets, Mask())
    token_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    transposed = [x.mT.contiguous().mT for x in (q, k, v)]
    for layout in (token_major, transposed):
        have = both(attend_pairs, layout, buckets, Mask())
        assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
    strided = tuple(replace(some, queries=some.queries.mT.contiguous().mT) for some in buckets)
    strided = tuple(replace(some, keys=some.keys.mT.contiguous().mT) for some in strided)
    assert_equal(both(attend_pairs, (q, k, v), strided, Mask()), want)


@compiled
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout_p": 0.1}, "no dropout"),
        ({"union": True}, "union=True"),
        ({"shown": (torch.ones(2, 2, 1, 20, 20, dtype=torch.bool),)}, "`shown` names some"),
        ({"by_features": True}, "by_features=True"),
        ({"dtype": torch.float64}, "the dtype is torch.float64"),
    ],
    ids=["dropout", "union", "shown", "features", "fp64"],
)
def test_what_the_kernels_cannot_do_is_refused_when_forced(options, reason):
    inputs, every = qkv(20, dtype=options.pop("dtype", torch.float32)), torch.arange(20).expand(2, 2, 1, -1)
    call = {"buckets": Buckets(every, every), "mask": Mask.window(3), "scale": 0.3}
    with sq.use_backend("cpu"), pytest.raises(ValueError, match=f"backend 'cpu' cannot run this call: .*{reason}"):
        attend_pairs(*inputs, **call, **options)
    assert attend_pairs(*inputs, **call, **options)[0].isfinite().all()


@compiled
def test_transforms_of_torch_func_run_on_the_reference():
    q, k, v = qkv(20)
    every = torch.arange(20).expand(2, 2, 1, -1)
    grad = torch.func.grad(lambda q: attend_pairs(q, k, v, (Buckets(every, every),), Mask(), scale=0.3)[0].sum())(q)
    assert grad.isfinite().all()


@compiled
def test_flops_are_counted():
    inputs = tracked(*qkv(24, 30, H=4, G=2))
    every = torch.arange(24).expand(2, 4, 1, -1), torch.arange(30).expand(2, 4, 1, -1)
    with FlopCounterMode(display=False) as counter:
        out, _ = attend_pairs(*inputs, (Buckets(*every), Buckets(*every)), Mask(), scale=0.3)
    assert counter.get_total_flops() == 2 * 2 * 4 * 2 * 24 * 30 * (8 + 6)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 2 * 24 * 30 * (3 * 8 + 2 * 6)


@compiled
def test_double_backward_is_refused_not_wrong():
    q, k, v = tracked(*qkv(20))
    every = torch.arange(20).expand(2, 2, 1, -1)
    out, _ = attend_pairs(q, k, v, (Buckets(every, every),), Mask(), scale=0.3)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(
        RuntimeError,
        match="cannot be differentiated again",
    ):
        grad.sum().backward()


# ---------------------------------------------------------------------- lists that are not in order

FORWARD = functools.partial(torch.ops.subquad.pairs_forward, "cpu")


def arguments(bucket: Tensor, hidden: Tensor | None = None) -> tuple:
    """Return the arguments for one set of two buckets of keys, and four blocks of queries."""
    queries, keys = torch.arange(20).view(1, 1, 4, 5), torch.arange(20).view(1, 1, 2, 10)
    return (
        *tracked(*qkv(20, B=1, H=1)),
        None,
        [queries],
        [keys],
        [bucket],
        [-1],
        None,
        hidden,
        0,
        False,
        False,
        0.3,
        None,
    )


@compiled
@pytest.mark.parametrize("number", [-1, 2, 2**31, -(2**63), 2**63 - 1])
def test_blocks_of_no_bucket_see_nothing(variant, number):
    given = arguments(torch.tensor([0, number, 1, 1]).view(1, 1, 4))
    out, lse, _ = FORWARD(*given)
    of_block = torch.isneginf(lse).view(4, 5)
    assert of_block.all(1).tolist() == of_block.any(1).tolist() == [False, True, False, False]
    assert (out[:, :, 5:10] == 0).all()
    query, key, _ = torch.autograd.grad(out.sum(), given[:3])
    assert (query[:, :, 5:10] == 0).all()
    assert (key != 0).any()


@compiled
@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1, 2**40])
def test_offsets_of_any_size_are_compared_as_numbers(variant, number):
    given = list(arguments(torch.zeros(1, 1, 4, dtype=torch.int64)))
    given[8], given[11] = torch.tensor([number]), True
    lse = FORWARD(*given)[1]
    assert torch.isneginf(lse).all() if number < 0 else lse.isfinite().all()


@compiled
def test_sets_of_keys_that_begin_alike_stay_apart(variant):
    """With one item and head, the first buckets of a tensor are contiguous and begin where all of them do."""
    q, k, v = qkv(20, B=1, H=1)
    keys, queries = torch.arange(20).view(1, 1, 4, 5), torch.arange(20).view(1, 1, 4, 5)
    few = Buckets(queries[:, :, :1], keys[:, :, :1]), Buckets(queries, keys)
    have = attend_pairs(q, k, v, few, Mask(), scale=0.3)
    apart = Buckets(queries[:, :, :1], keys[:, :, :1].clone()), Buckets(queries, keys)
    for a, b in zip(have, attend_pairs(q, k, v, apart, Mask(), scale=0.3), strict=True):
        torch.testing.assert_close(a, b)


@compiled
def test_lists_of_other_shapes_and_types_are_refused():
    named = torch.zeros(1, 1, 4, dtype=torch.int64)
    for given in (
        arguments(named[:, :, :3]),
        arguments(named.int()),
        arguments(torch.empty(0, dtype=torch.int64)),  # four blocks, two buckets
        arguments(named, torch.zeros(1, 1, 0, 20, dtype=torch.bool)),
        arguments(named, torch.zeros(1, 1, 1, 19, dtype=torch.bool)),
    ):
        with pytest.raises(ValueError, match=r"pairs_forward: .* but the other tensors go with"):
            FORWARD(*given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_of_16_bits_come_in_as_they_are_and_partials_go_out_wide(implementation, dtype):
    inputs = tracked(*qkv(40, dtype=dtype))
    every = torch.arange(40).expand(2, 2, 1, -1)
    out, lse = attend_pairs(*inputs, Buckets(every, every), Mask.causal(), scale=0.3)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    want, want_lse = attend_pairs(*exact, Buckets(every, every), Mask.causal(), scale=0.3)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    for grad, upcast in zip(gradients(out, *inputs), gradients(want, *exact), strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.float(), upcast, atol=0.02, rtol=0.02)
