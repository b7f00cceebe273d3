"""NaN, infinity and numbers near the largest in single ops, on every backend."""

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.kernels.attention.features.op import feature_attention
from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.attention.softmax import merge_partials, visible_softmax
from subquad.kernels.selection.balanced import same_label_buckets
from subquad.kernels.selection.hash_functions import HashFunctions, hashed
from subquad.kernels.selection.top.op import top_and_best
from subquad.kernels.tokens.padding import cleared
from subquad.kernels.tokens.slots import Buckets
from subquad.testing.oracle import gradients, normal, qkv, tracked

NUMBERS = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38])
HUGE = 3e38


def strewn(x: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """The tensor with a share of its entries not finite, or near the largest number."""
    kinds = NUMBERS[(normal(*x.shape, seed=seed).abs() * 100).long() % len(NUMBERS)]
    return torch.where(normal(*x.shape, seed=seed + 1).sigmoid() < share, kinds, x)


def all_of(count: int) -> torch.Tensor:
    return torch.arange(count).view(1, 1, 1, count)


# ---------------------------------------------------------------- choices


@pytest.mark.parametrize("odds", [True, False])
@pytest.mark.parametrize(("N", "C"), [(7, 1), (61, 3), (61, 16), (300, 40), (3000, 5)])
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_every_backend_takes_the_same_tokens(share: float, N: int, C: int, odds: bool):
    scores = strewn(normal(2, 2, N, C), share, seed=3)
    valid = torch.stack([torch.ones(N, dtype=torch.bool), normal(N, seed=2) > -1])
    sizes = torch.tensor([max(1, N // 3), max(1, N // 5)])
    for given in (None, valid):
        have = top_and_best(scores, sizes, int(sizes.max()), given, odds=odds)
        with sq.use_backend("reference"):
            want = top_and_best(scores, sizes, int(sizes.max()), given, odds=odds)
        present = slice(None) if given is None else given[:, None].expand(2, 2, N)
        assert torch.equal(have[0], want[0])
        assert torch.equal(have[1][present], want[1][present])


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_hash_functions_keep_nan(kind: str):
    functions = HashFunctions(2, 2, 8, 5, kind=kind, hidden=11, seed=1)
    x = normal(2, 2, 70, 8)
    x[0, 0, 9], x[0, 1, 4, 2], x[1, 0, 3, 5] = torch.nan, torch.inf, torch.nan
    sizes = torch.tensor([9, 9])
    with torch.no_grad():
        of_query, _ = hashed(x, x, functions, 0.3)
        have = top_and_best(of_query, sizes, 9, None, odds=True)
        with sq.use_backend("reference"):
            want = top_and_best(of_query, sizes, 9, None, odds=True)
    for a, b in zip(have, want, strict=True):
        assert torch.equal(a, b)
    assert (have[0][0, 0] == 9).any(-1).all()


# ---------------------------------------------------------------- buckets


def test_a_mean_over_many_keys_does_not_overflow(implementation):
    q, k, _ = qkv(50, 1300)
    out, lse = attend_pairs(q, k, torch.full((2, 2, 1300, 6), HUGE), everything(50, 1300), Mask(), scale=0.3)
    torch.testing.assert_close(out, torch.full_like(out, HUGE), rtol=1e-5, atol=0)
    assert lse.isfinite().all()


def everything(N: int, M: int) -> Buckets:
    """One bucket with all queries and keys of 2 items and 2 heads."""
    return Buckets(all_of(N).expand(2, 2, 1, N), all_of(M).expand(2, 2, 1, M))


def test_a_query_with_logits_of_minus_infinity_alone_is_nan_and_one_without_keys_is_zero(implementation):
    q, k, v = qkv(20)
    k[..., 0] = k[..., 0].abs() + 0.1
    q[0, 0, 5] = 0
    q[0, 0, 5, 0] = -torch.inf
    q, k, v = tracked(q, k, v)
    hidden = torch.zeros(2, 2, 20, 20, dtype=torch.bool)
    hidden[:, :, 7] = True
    out, lse = attend_pairs(q, k, v, everything(20, 20), Mask(), scale=0.3, hidden=hidden)
    assert out[0, 0, 5].isnan().all()
    assert not lse[0, 0, 5].isfinite()
    assert (lse[:, :, 7] == -torch.inf).all()
    assert (out[:, :, 7] == 0).all()
    assert out[0, 0, 8:].isfinite().all()
    grads = gradients(out, q, k, v)
    assert all(grad[0, 0].isnan().any() for grad in grads)
    assert all(grad[1].isfinite().all() and grad[0, 1].isfinite().all() for grad in grads)


def test_a_nan_query_gives_keys_that_it_does_not_see_no_gradient_of_nan():
    q, k, v = qkv(60)
    q[0, 0, 30] = torch.nan
    q, k, v = tracked(q, k, v)
    out, _ = attend_pairs(q, k, v, everything(60, 60), Mask.window(3), scale=0.3)
    _, of_key, of_value = gradients(out, q, k, v)
    seen = torch.arange(60).sub(30).abs() <= 3
    assert of_value[0, 0].isnan().any(-1).tolist() == seen.tolist()
    assert of_key[0, 0, seen].isnan().all()


@pytest.mark.parametrize("number", [-1, 2, 2**40])
def test_a_block_of_no_bucket_meets_nothing(number: int):
    """A number in a tensor is no index until it has been checked."""
    q, k, v = tracked(*qkv(24))
    queries = torch.arange(24).view(1, 1, 2, 12).expand(2, 2, 2, 12)
    buckets = Buckets(queries, queries, torch.tensor([1, number]).expand(2, 2, 2))
    out = torch.ops.subquad.pairs_forward(
        *("cpu", q, k, v, None, [queries], [queries], [buckets.bucket], [-1], None, None, 0, False, False, 0.3, None)
    )[0]
    assert (out[:, :, 12:] == 0).all()
    assert (out[:, :, :12] != 0).all()
    assert all(grad.isfinite().all() for grad in gradients(out, q, k, v))


def test_padding_has_no_place_in_blocks_of_equal_labels(implementation):
    valid = torch.arange(40) < torch.tensor([[31], [40]])
    labels = torch.arange(40).expand(2, 3, 40) % 5
    moved = torch.where(valid[:, None], labels, 4 - labels)
    parts = [same_label_buckets(x, 5, Mask.padding(valid)) for x in (labels, moved)]
    for a, b in zip(*parts, strict=True):
        assert torch.equal(a.queries, b.queries)
        assert torch.equal(a.keys, b.keys)


# ---------------------------------------------------------------- features


@pytest.mark.parametrize("number", NUMBERS[:3].tolist(), ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("which", ["key", "value"])
def test_nothing_of_a_later_token_reaches_an_earlier_output(implementation, which: str, number: float):
    def outputs(spoilt: bool) -> torch.Tensor:
        query, key, value = normal(2, 4, 150, 16), normal(2, 2, 150, 16, seed=1), normal(2, 2, 150, 9, seed=2)
        (key if which == "key" else value)[0, 0, 77, 3] = number if spoilt else 0.5
        return feature_attention(query, key, value, causal=True)[0]

    clean, out = outputs(False), outputs(True)
    assert torch.allclose(out[:, :, :77], clean[:, :, :77], atol=1e-6)
    assert torch.equal(out[1], clean[1])
    assert torch.equal(out[:, 2:], clean[:, 2:])
    if number != -torch.inf or which == "value":
        assert not out[0, :2, 77].isfinite().all()


def test_a_nan_query_gives_later_keys_no_gradient_of_nan(implementation):
    query, key, value = normal(2, 4, 150, 16), normal(2, 2, 150, 16, seed=1), normal(2, 2, 150, 9, seed=2)
    query[0, 1, 77, 3] = torch.nan
    query, key, value = tracked(query, key, value)
    _, of_key, of_value = gradients(feature_attention(query, key, value, causal=True)[0], query, key, value)
    for grad in (of_key, of_value):
        assert grad[0, 0, :78].isnan().any(-1).all()
        assert grad[0, 0, 78:].isfinite().all()
        assert grad[0, 1].isfinite().all()
        assert grad[1].isfinite().all()


# ---------------------------------------------------------------- softmax and padding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_of_visible_minus_infinities_is_nan_and_hidden_entries_are_zero(dtype: torch.dtype):
    rows = [[-torch.inf, -torch.inf, 5.0], [torch.nan, 0.0, 5.0], [0.0, -torch.inf, 5.0]]
    logits = torch.tensor(rows, dtype=dtype)
    weights = visible_softmax(logits, torch.tensor([True, True, False]))
    assert weights[:2, :2].isnan().all()
    assert weights[2].tolist() == [1, 0, 0]
    assert (weights[:, 2] == 0).all()


def test_parts_of_logits_of_minus_infinity_count_for_nothing_unless_all_are_such():
    lost, seen = (torch.full((1, 2), torch.nan), torch.tensor([-torch.inf])), (torch.ones(1, 2), torch.zeros(1))
    assert merge_partials([lost, seen])[0].tolist() == [[1, 1]]
    assert merge_partials([lost, lost])[0].isnan().all()


def test_merged_means_do_not_overflow(implementation):
    parts = [(torch.full((1, 2), HUGE), torch.zeros(1))] * 5
    torch.testing.assert_close(merge_partials(parts)[0], torch.full((1, 2), HUGE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_padding_is_cleared_where_products_may_not_be_finite_and_else_left_alone(dtype: torch.dtype):
    valid = torch.tensor([[True, False, True]])
    x = torch.full((1, 2, 3, 4), 1000.0, dtype=dtype)
    assert cleared(x, None) is x
    assert cleared(x, valid) is x
    for number in (torch.nan, torch.inf, torch.finfo(dtype).max):
        x[0, 0, 1, 1] = number
        assert torch.equal(cleared(x, valid), torch.where(valid[:, None, :, None], x, 0.0).to(dtype))
