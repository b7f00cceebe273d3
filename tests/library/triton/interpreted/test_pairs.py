"""Attention inside buckets equals the reference, forward and backward, whatever the lists hold.

Every program of a kernel takes some milliseconds in the interpreter, so inputs are as small as the case allows.
"""

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.tokens.slots import Buckets
from subquad.testing.oracle import gradients, normal, qkv
from tests.library.kernels.test_bucket_attention import assert_equal, both, slots
from tests.library.triton.interpreted.fences import fenced

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}


def two_sets(B: int, H: int, N: int, M: int) -> tuple[Buckets, Buckets]:
    """Buckets of one block each, and blocks that share some of three buckets; another one is not wanted by any."""
    keys = slots(B, H, 3, min(M, 19), M, seed=1)
    bucket = torch.tensor([2, 0, 2]).expand(B, H, 3)
    return Buckets(slots(B, H, 2, min(N, 20), N, seed=3), keys[:, :, 1:]), Buckets(
        slots(B, H, 3, 3, N, 5), keys, bucket
    )


def on_both(inputs, buckets, mask, **options):
    """out, lse and gradients of the reference and of the kernels."""
    results = []
    for backend in ("reference", "triton"):
        with sq.use_backend(backend):
            results.append(both(attend_pairs, inputs, buckets, mask, **options))
    return results


def assert_backends_agree(inputs, buckets, mask, **options):
    want, have = on_both(inputs, buckets, mask, **options)
    assert_equal(have, want, TOLERANCE[inputs[0].dtype])


CASES = {
    "no mask": ({"N": 29, "M": 37, "B": 1, "H": 2, "G": 1, "D": 24, "E": 40}, Mask()),
    "causal, offsets": ({"N": 23, "M": 31, "B": 2, "H": 1, "D": 5, "E": 3}, Mask.causal(offset=torch.tensor([-3, 20]))),
    "window": ({"N": 31, "B": 1, "H": 1, "D": 16, "E": 64}, Mask.window(6) & Mask.causal(offset=2)),
    "one key": ({"N": 20, "M": 1, "B": 1, "H": 1}, Mask()),
    "one query": ({"N": 1, "M": 30, "B": 1, "H": 1}, Mask()),
    "no query": ({"N": 0, "M": 3, "B": 1, "H": 1}, Mask()),
    "no key": ({"N": 3, "M": 0, "B": 1, "H": 1}, Mask()),
}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize(("shape", "mask"), CASES.values(), ids=CASES)
def test_equals_the_reference(poisoned, dtype, shape, mask):
    inputs = qkv(**shape, dtype=dtype)
    assert_backends_agree(inputs, two_sets(*inputs[0].shape[:3], inputs[1].shape[2]), mask)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("extra", ["bias", "others only", "hidden"])
def test_options(poisoned, dtype, extra):
    inputs = qkv(26, B=1, H=2, dtype=dtype)
    if extra == "bias":
        inputs = (*inputs, normal(1, 2, 26, seed=8).to(dtype))
    options = {"hidden": {"hidden": normal(1, 2, 3, 26, seed=9) > 0.5}, "others only": {"other_keys_only": True}}
    assert_backends_agree(inputs, two_sets(1, 2, 26, 26), Mask.causal(), **options.get(extra, {}))


def test_long_lists_cross_every_tile(poisoned):
    """More queries and keys than a tile has, sets with windows of their own, and lists in any layout."""
    inputs = qkv(70, 90, B=1, H=1, D=4, E=3)
    queries, keys = slots(1, 1, 2, 70, 70, seed=3), slots(1, 1, 2, 90, 90, seed=5)
    sets = Buckets(queries, keys, span=5), Buckets(queries.mT.contiguous().mT, keys.mT.contiguous().mT)
    assert_backends_agree(inputs, sets, Mask.causal(offset=15))


def test_inputs_between_fences_and_in_any_layout():
    """NaN and numbers of no token lie around everything that is read."""
    inputs = qkv(21, B=1, H=2, D=5)
    sets = two_sets(1, 2, 21, 21)
    sets = tuple(
        Buckets(fenced(x.queries), fenced(x.keys), None if x.bucket is None else fenced(x.bucket)) for x in sets
    )
    bias, hidden = normal(1, 2, 21, seed=8), fenced(normal(1, 2, 3, 21, seed=9) > 0.5)
    want, _ = on_both((*inputs, bias), sets, Mask.causal(), hidden=hidden)
    for axes in ((2, 3), (1, 2), (0, 1)):  # which two change places in memory
        given = [fenced(x.transpose(*axes)).transpose(*axes).requires_grad_() for x in inputs]
        given.append(fenced(bias).requires_grad_())
        with sq.use_backend("triton"):
            out, lse = attend_pairs(*given[:3], sets, Mask.causal(), scale=0.3, key_bias=given[3], hidden=hidden)
            read = torch.cat([out, torch.where(lse.isneginf(), 0.0, lse)[..., None]], -1)
            assert_equal([out, lse, *gradients(read, *given)], want)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("extra", ["plain", "bias", "others only", "hidden"])
def test_tokens_that_meet_one_key(poisoned, dtype, extra):
    """Beside a set of several, and blocks whose one key they do not see."""
    inputs = qkv(19, 23, B=1, H=2, G=1, D=5, dtype=dtype)
    single = Buckets(slots(1, 2, 40, 1, 19, seed=3), slots(1, 2, 40, 1, 23, seed=4))
    inputs = (*inputs, normal(1, 2, 23, seed=8).to(dtype)) if extra == "bias" else inputs
    options = {"hidden": {"hidden": normal(1, 2, 3, 23, seed=9) > 0.5}, "others only": {"other_keys_only": True}}
    sets = single, two_sets(1, 2, 19, 23)[0], Buckets(single.queries, single.keys.flip(2), span=3)
    assert_backends_agree(inputs, sets, Mask.causal(offset=4), **options.get(extra, {}))


def test_either_output_may_be_read_alone(poisoned):
    every = torch.arange(12).expand(1, 1, 1, -1)
    for index in (0, 1):
        grads = []
        for backend in ("reference", "triton"):
            inputs = [x.requires_grad_() for x in qkv(12, B=1, H=1)]
            with sq.use_backend(backend):
                read = attend_pairs(*inputs, Buckets(every, every), Mask(), scale=0.3)[index]
            grads.append(torch.autograd.grad(read.sum(), inputs, allow_unused=True, materialize_grads=True))
        assert_equal(grads[1], grads[0])


def test_lists_that_name_no_token_and_no_bucket():
    """Numbers of any size are empty slots, and a block of a bucket that does not exist sees nothing."""
    inputs, far = qkv(8, B=1, H=1), 2**40
    queries = torch.tensor([[0, 1, -1], [2, 3, far], [4, 2**32 + 1, 5], [6, 7, 8]]).view(1, 1, 4, 3)
    keys = torch.tensor([[0, 2, 4, -(2**63)], [1, 3, 2**63 - 1, 5]]).view(1, 1, 2, 4)
    bucket = torch.tensor([0, -1, 2**32, 1]).view(1, 1, 4)
    known = Buckets(queries[:, :, [0, 3]].clamp(max=8), torch.where((keys >= 0) & (keys < 8), keys, 8))
    known = Buckets(torch.where(known.queries >= 0, known.queries, 8), known.keys)
    want, _ = on_both(inputs, known, Mask())
    with sq.use_backend("triton"):
        have = both(attend_pairs, inputs, Buckets(queries, keys, bucket), Mask())
    assert_equal(have, want)


@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1, 2**40])
def test_offsets_of_any_size_are_compared_as_numbers(number):
    every = torch.arange(5).expand(1, 1, 1, -1)
    for offset in (torch.tensor([number]), max(number, 0)):
        with sq.use_backend("triton"):
            mask = Mask.causal(offset=offset)
            lse = attend_pairs(*qkv(5, B=1, H=1), Buckets(every, every), mask, scale=0.3)[1]
        expected = torch.isneginf(lse) if isinstance(offset, torch.Tensor) and number < 0 else lse.isfinite()
        assert expected.all()


def test_nan_and_infinity_stay_with_what_depends_on_them():
    """A logit of −∞ has no weight; where a query sees no other, its output is NaN, and where it sees no key, 0."""
    every = torch.arange(6).expand(1, 2, 1, -1)
    inputs = (*qkv(6, B=1, H=2), torch.zeros(1, 2, 6))
    q, k, _, bias = inputs
    bias[0, 0, :2] = -torch.inf  # all that queries 0 and 1 see
    k[0, 0, 4], q[0, 1, 3] = torch.nan, torch.nan
    want, have = on_both(inputs, Buckets(every, every), Mask.causal())
    assert torch.equal(want[0].isnan(), have[0].isnan())
    assert have[0].isnan().any(-1).tolist() == [
        [[True, True, False, False, True, True], [False] * 3 + [True, False, False]]
    ]
    assert_equal([x.nan_to_num(0) for x in have[:2]], [x.nan_to_num(0) for x in want[:2]])
    for a, b in zip(have[2:], want[2:], strict=True):  # what is finite in the reference is finite here
        torch.testing.assert_close(a[b.isfinite()], b[b.isfinite()])
    alone = torch.arange(6).expand(1, 2, -1)[..., None]
    want, have = on_both(inputs, Buckets(alone, alone), Mask())
    assert torch.equal(want[0].isnan(), have[0].isnan())
    assert_equal([x.nan_to_num(0) for x in have[:2]], [x.nan_to_num(0) for x in want[:2]])
    nobody = torch.full((1, 2, 1, 6), 6)
    with sq.use_backend("triton"):
        assert not attend_pairs(*inputs[:3], Buckets(every, nobody), Mask(), scale=0.3)[0].any()


FAR_OFFSETS = [0, 2**31, torch.tensor([-(2**31) - 3]), torch.tensor([2**40 + 3])]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", FAR_OFFSETS, ids=lambda x: str(int(x)))
@pytest.mark.parametrize("span", [2**31 - 1, 2**40])
def test_windows_wider_than_32_bits(span, offset, causal):
    """Far tokens, too; and blocks of one query and key, which have a kernel of their own."""
    every = torch.arange(9).expand(1, 1, 1, -1)
    single = every.transpose(2, 3)
    mask = Mask.window(span) & (Mask.causal(offset=offset) if causal else Mask(offset=offset))
    assert_backends_agree(qkv(9, B=1, H=1), (Buckets(every, every), Buckets(single, single.flip(2))), mask)


def test_values_near_the_largest():
    every = torch.arange(9).expand(1, 1, 1, -1)
    q, k, v = qkv(9, B=1, H=1)
    with sq.use_backend("triton"):
        out = attend_pairs(q, k, torch.full_like(v, 3e38), (Buckets(every, every),) * 2, Mask(), scale=0.3)[0]
    torch.testing.assert_close(out, torch.full_like(out, 3e38))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout_p": 0.1}, "no dropout"),
        ({"union": True}, "union=True"),
        ({"by_features": True}, "by_features=True"),
        ({"of_distance": torch.zeros(1, 1, 4, 7)}, "add nothing to the logits by distance"),
        ({"dtype": torch.float64}, r"the dtype is torch\.float64"),
        ({"D": 257}, "vectors have 257 components"),
        (
            {"hidden": torch.zeros(1, dtype=torch.bool).expand(1, 1, 1 << 29, 4)},
            "`hidden` has 536,870,912 rows of 4 keys",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_the_kernels_cannot_do_is_refused(options, reason):
    inputs, every = qkv(4, B=1, H=1, D=options.pop("D", 4), dtype=options.pop("dtype", torch.float32)), torch.arange(4)
    buckets = Buckets(*[every.expand(1, 1, 1, -1)] * 2)
    with (
        sq.use_backend("triton"),
        pytest.raises(ValueError, match=f"backend 'triton' cannot run this call: .*{reason}"),
    ):
        attend_pairs(*inputs, buckets, Mask.window(3), scale=0.3, **options)
