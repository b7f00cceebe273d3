"""Causal attention by halves: which rectangles there are, that they are merged rightly, and under which masks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.kernels.attention.windows.op import merge_windows
from subquad.methods.core import halves
from subquad.methods.core.rectangles import rectangles_of
from subquad.testing.oracle import qkv as made

B, H, N = 3, 4, 45
AT_LIMIT = {
    "clustered": sq.Clustered(clusters=64, block=4, last=3),
    "i-clustered": sq.ImprovedClustered(clusters=64, block=4, last=3),
    "clustered-tail": sq.ClusteredTail(clusters=5, topk=64, block=4, last=3),
    "earlier queries": sq.ClusteredTail(clusters=5, topk=64, block=4, last=3, queries="earlier"),
}
COARSE = sq.ClusteredTail(clusters=2, topk=2, cells=2, block=8, last=4)

left = torch.arange(N) >= torch.tensor([[0], [7], [30]])
right = torch.arange(N) < torch.tensor([[45], [20], [3]])
holes = torch.rand(B, N, generator=torch.Generator().manual_seed(1)) < 0.6
segments = torch.tensor([0] * 20 + [1] * 25).expand(B, N)
MASKS = {
    "causal": (Mask.causal(), N),
    "lengths": (Mask.causal() & Mask.padding(torch.tensor([45, 20, 3])), N),
    "left padding": (Mask.causal() & Mask.padding(left), N),
    "right padding": (Mask.causal() & Mask.padding(right), N),
    "holes": (Mask.causal() & Mask.padding(holes), N),
    "hidden keys": (Mask.causal() & Mask.padding(keys=holes), N),
    "padded queries": (Mask.causal() & Mask.padding(queries=holes), N),
    "an item of nothing": (Mask.causal() & Mask.padding(right & (torch.arange(3) < 2)[:, None]), N),
    "behind a cache": (Mask.causal(offset=11), N + 11),
    "behind a cache of another length": (Mask.causal(offset=11), N + 20),
    "beyond the keys": (Mask.causal(offset=5), N),
    "behind caches of their own lengths": (Mask.causal(offset=torch.tensor([0, 9, 17])), N + 17),
    "segments": (Mask.causal() & Mask.segments(segments), N),
}


def qkv(B: int, H: int, N: int, M: int, D: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """A query, key and value of these sizes."""
    return made(N, M, B=B, H=H, D=D, E=D)


def run(method: sq.Method | str, M: int = N, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the log-sum-exp and the gradient of q, k and v as one vector."""
    q, k, v = (x.double().requires_grad_() for x in qkv(B, H, N, M, D=8))
    out, lse = sq.attention(q, k, v, method=method, return_lse=True, **options)
    seen = lse.masked_fill(torch.isneginf(lse), 0.0)
    grads = torch.autograd.grad((out * out.detach().sin()).sum() + seen.sum(), (q, k, v))
    return out.detach(), lse.detach(), torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("start", [0, 1, 6, 16])
@pytest.mark.parametrize("block", [1, 4, 5])
@pytest.mark.parametrize("tokens", [1, 4, 7, 8, 9, 23, 32])
def test_the_rectangles_hold_each_pair_once(tokens: int, block: int, start: int):
    count = torch.zeros(tokens, start + tokens, dtype=torch.int)
    for group in rectangles_of(tokens, start, block):
        reached = torch.zeros(tokens, dtype=torch.int)
        for each in group:
            for number in range(each.count):
                i, j = (first + number * each.step for first in (each.query, each.key))
                pairs = torch.ones(each.queries, each.keys, dtype=torch.int)
                count[i : i + each.queries, j : j + each.keys] += pairs.tril() if each.diagonal else pairs
                reached[i : i + each.queries] += 1
        assert (reached <= 1).all()
    assert torch.equal(count, torch.ones_like(count).tril(start))


@pytest.mark.parametrize("wants_lse", [False, True])
def test_halves_are_merged_in_16_bits_unless_the_output_is_to_be_merged_again(monkeypatch, wants_lse):
    asked = []

    def merged(*args, **options):
        asked.append(options["rounded"])
        return merge_windows(*args, **options)

    monkeypatch.setattr(halves, "merge_windows", merged)
    q, k, v = (x.bfloat16() for x in qkv(B, H, N, N))
    sq.attention(q, k, v, method=COARSE, mask=Mask.causal(), return_lse=wants_lse)
    assert asked == [not wants_lse]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", AT_LIMIT)
def test_at_the_exact_limit_it_is_exact_attention(name: str, mask: str):
    asked, M = MASKS[mask]
    (out, lse, grads), (exact, exact_lse, exact_grads) = (
        run(method, M, mask=asked) for method in (AT_LIMIT[name], "full")
    )
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads, exact_grads, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["causal", "lengths", "left padding", "holes", "behind a cache", "segments"])
def test_padding_and_other_items_change_nothing(name: str):
    asked, M = MASKS[name]
    out, *_ = run(COARSE, M, mask=asked)
    exact, *_ = run("full", M, mask=asked)
    assert not torch.allclose(out, exact, atol=1e-3), "the settings are too fine to show anything"
    if name == "left padding":
        q, k, v = (x.double() for x in qkv(B, H, N, M, D=8))
        for item, valid in enumerate(left):
            alone = sq.attention(*(x[item : item + 1, :, valid] for x in (q, k, v)), method=COARSE, is_causal=True)
            torch.testing.assert_close(out[item : item + 1, :, valid], alone, rtol=1e-9, atol=1e-9)
            assert (out[item][:, ~valid] == 0).all()


def test_blocks_on_the_diagonal_and_the_last_rows_are_exact():
    (out, lse, _), (exact, exact_lse, _) = (run(method, is_causal=True) for method in (COARSE, "full"))
    first, last = slice(0, COARSE.block), slice(N - COARSE.last, N)
    for rows in (first, last):
        torch.testing.assert_close(out[:, :, rows], exact[:, :, rows], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lse[:, :, rows], exact_lse[:, :, rows], rtol=1e-9, atol=1e-9)
    between = slice(COARSE.block, N - COARSE.last)
    assert not torch.allclose(out[:, :, between], exact[:, :, between], atol=1e-3)


@pytest.mark.parametrize(("dtype", "block"), [(torch.float32, 1024), (torch.bfloat16, 2048), (torch.float16, 2048)])
def test_blocks_are_longer_in_16_bits(dtype: torch.dtype, block: int):
    q, k, v = (x.to(dtype) for x in qkv(1, 1, block + 300, block + 300, D=16))
    default, same, half = (
        sq.attention(q, k, v, method=sq.ClusteredTail(block=size), is_causal=True) for size in (0, block, block // 2)
    )
    assert torch.equal(default, same)
    assert not torch.equal(default, half)
    exact = sq.attention(q, k, v, method="full:kernel=subquad", is_causal=True)
    torch.testing.assert_close(default[:, :, :block], exact[:, :, :block])


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_short_prompts_and_steps_on_a_cache_are_exact(tokens: int):
    q, k, v = qkv(B, H, tokens, 8)
    for mask in (
        Mask.causal(offset=8 - tokens),
        Mask.causal(offset=torch.tensor([8 - tokens, 0, 3]).clamp(max=8 - tokens)),
    ):
        out, exact = (sq.attention(q, k, v, method=method, mask=mask) for method in (COARSE, "full"))
        torch.testing.assert_close(out, exact)
    long = sq.ClusteredTail(clusters=2, topk=2, cells=2, block=4, last=4)
    q, k, v = qkv(B, H, 4, 200)
    mask = Mask.causal(offset=196)
    torch.testing.assert_close(*(sq.attention(q, k, v, method=method, mask=mask) for method in (long, "full")))


def test_whole_levels_alone_are_what_the_prefix_had():
    """Rectangles that a longer input has in common with its prefix are computed from the same tokens."""
    q, k, v = qkv(1, 2, 64, 64)
    method = sq.ClusteredTail(clusters=2, topk=2, cells=2, block=8, last=0)
    whole = sq.attention(q, k, v, method=method, is_causal=True)
    prefix = sq.attention(*(x[:, :, :32] for x in (q, k, v)), method=method, is_causal=True)
    torch.testing.assert_close(whole[:, :, :32], prefix)


def test_later_queries_of_a_rectangle_may_decide_but_no_later_key_or_value():
    q, k, v = qkv(1, 2, 32, 32)
    method = sq.ClusteredTail(clusters=2, topk=2, cells=2, block=4, last=0)
    out = sq.attention(q, k, v, method=method, is_causal=True)
    later_k, later_v = k.clone(), v.clone()
    later_k[:, :, 21:], later_v[:, :, 21:] = 3.0, -5.0
    assert torch.equal(sq.attention(q, later_k, later_v, method=method, is_causal=True)[:, :, :21], out[:, :, :21])
    later_q = q.clone()
    later_q[:, :, 22:] = -q[:, :, 22:]
    changed = (sq.attention(later_q, k, v, method=method, is_causal=True) - out).abs().amax((0, 1, 3)) > 1e-6
    assert changed[16:22].any()
    assert not changed[:16].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_under_grouped_keys(dtype: torch.dtype):
    q, k, v = qkv(2, 4, 300, 300, D=16)
    method = sq.ClusteredTail(block=32, last=8)
    few = slice(0, 2)
    out = sq.attention(
        q.to(dtype), k[:, few].to(dtype), v[:, few].to(dtype), method=method, is_causal=True, enable_gqa=True
    )
    wide = sq.attention(q, *(x[:, few].repeat_interleave(2, 1) for x in (k, v)), method=method, is_causal=True)
    assert out.dtype == dtype
    assert (out.float() - wide).norm() < 0.1 * wide.norm()


def test_the_error_falls_with_the_block():
    q, k, v = qkv(1, 2, 512, 512, D=16)
    exact = sq.attention(q, k, v, method="full", is_causal=True)
    errors = [
        (sq.attention(q, k, v, method=sq.Clustered(clusters=4, block=block, last=0), is_causal=True) - exact).norm()
        for block in (16, 64, 256)
    ]
    assert errors == sorted(errors, reverse=True)


def test_kept_tokens_go_with_it():
    q, k, v = qkv(B, H, N, N)
    out = sq.attention(q, k, v, method=COARSE, is_causal=True, keep=[0, 40])
    exact = sq.attention(q, k, v, method="full", is_causal=True)
    torch.testing.assert_close(out[:, :, [0, 40]], exact[:, :, [0, 40]])


@pytest.mark.parametrize("text", ["clustered-tail:block=4+keep:first=2", "mixed-heads:methods=full+clustered-tail"])
def test_what_is_made_of_it_is_causal_too(text: str):
    method = sq.parse_method(text)
    assert method.traits.causal == "values-only"
    assert method.traits.by_halves
    q, k, v = qkv(B, H, N, N)
    later = v.clone()
    later[:, :, 20:] = 9.0
    out, other = (sq.attention(q, k, x, method=method, is_causal=True) for x in (v, later))
    assert torch.equal(out[:, :, :20], other[:, :, :20])


def test_each_length_of_by_length_is_causal_too():
    method = sq.ByLength({0: "full", 20: COARSE})
    q, k, v = qkv(B, H, N, N)
    out = sq.attention(q, k, v, method=method, is_causal=True)
    halves, exact = (sq.attention(q, k, v, method=other, is_causal=True) for other in (COARSE, "full"))
    torch.testing.assert_close(out[:, :, :19], exact[:, :, :19])
    torch.testing.assert_close(out[:, :, 19:], halves[:, :, 19:])


def test_beside_chosen_pairs_it_is_refused():
    q, k, v = qkv(B, H, N, N)
    method = sq.parse_method("clustered-tail+local:window=4")
    assert method.traits.causal == "no"
    with pytest.raises(ValueError, match=r"'[^']*\+[^']*' does not support a causal mask"):
        sq.attention(q, k, v, method=method, is_causal=True)


def test_windows_are_refused():
    q, k, v = qkv(B, H, N, N)
    with pytest.raises(ValueError, match="'clustered-tail' does not support a window"):
        sq.attention(q, k, v, method=COARSE, mask=Mask.causal() & Mask.window(8))


@pytest.mark.parametrize(("queries", "clusters"), [("rectangle", 5), ("earlier", 6)])  # √18 and √32
def test_settings_that_are_not_given_grow_with_the_rectangle(queries: str, clusters: int):
    """32 tokens, the first block, and 18 more, whose rectangle has 32 keys: √(32·32) of them are all."""
    q, k, v = qkv(1, 2, 50, 50)
    default = sq.ClusteredTail(cells=2, block=32, last=0, queries=queries)
    for method, same in (
        (replace(default, clusters=clusters, topk=32), True),
        (replace(default, clusters=clusters, topk=31), False),
    ):
        out, other = (sq.attention(q, k, v, method=each, is_causal=True) for each in (default, method))
        assert torch.equal(out, other) == same
    few = replace(default, topk=4)
    out, same = (sq.attention(q, k, v, method=each, is_causal=True) for each in (few, replace(few, clusters=clusters)))
    assert torch.equal(out, same)
    assert not torch.equal(out, sq.attention(q, k, v, method=replace(few, clusters=clusters + 2), is_causal=True))


OF_BLOCKS = (
    sq.ClusteredTail(clusters=2, topk=2, cells=2, block=8, last=0, queries="block"),
    sq.ImprovedClustered(clusters=2, topk=2, block=8, last=0, queries="block"),
    sq.Clustered(clusters=2, block=8, last=0, queries="block"),
    sq.ClusteredTail(clusters=2, topk=2, cells=2, window=2, block=8, last=0, queries="block"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [8, 16, 24, 40, 56])
@pytest.mark.parametrize("method", OF_BLOCKS, ids=str)
def test_what_comes_behind_whole_blocks_changes_no_bit_of_them(method: sq.Method, tokens: int, dtype: torch.dtype):
    q, k, v = (x[:, few].to(dtype) for x, few in zip(qkv(2, 4, 61, 61), map(slice, (4, 2, 2)), strict=True))
    options = {"method": method, "is_causal": True, "enable_gqa": True}
    whole = sq.attention(q, k, v, **options)
    later = [torch.cat([x[:, :, :tokens], 3 - x[:, :, tokens:]], 2) for x in (q, k, v)]
    prefix = [x[:, :, :tokens] for x in (q, k, v)]
    for others in (later, prefix):
        assert torch.equal(sq.attention(*others, **options)[:, :, :tokens], whole[:, :, :tokens])


@pytest.mark.parametrize("method", OF_BLOCKS, ids=str)
def test_queries_of_a_whole_rectangle_decide_together(method: sq.Method):
    q, k, v = qkv(1, 2, 64, 64)
    later_q = q.clone()
    later_q[:, :, 56:] = -q[:, :, 56:]
    for queries, changes in (("block", False), ("rectangle", True)):
        asked = replace(method, queries=queries)
        out, other = (sq.attention(x, k, v, method=asked, is_causal=True)[:, :, 32:56] for x in (q, later_q))
        assert torch.equal(out, other) != changes


@pytest.mark.parametrize("queries", ["block", "rectangle"])
@pytest.mark.parametrize("tokens", [9, 16, 23, 61])
def test_rectangles_of_blocks_hold_the_same_pairs(tokens: int, queries: str):
    method, start = sq.ClusteredTail(block=8, queries=queries), 5
    count = torch.zeros(tokens, start + tokens, dtype=torch.int)
    for each in method.rectangles(tokens, start):
        key_step = each.step if each.key_step is None else each.key_step
        for number in range(each.count):
            i, j = each.query + number * each.step, each.key + number * key_step
            pairs = torch.ones(each.queries, each.keys, dtype=torch.int)
            count[i : i + each.queries, j : j + each.keys] += pairs.tril() if each.diagonal else pairs
        assert each.queries <= 8 or queries == "rectangle"
    assert torch.equal(count, torch.ones_like(count).tril(start))


def test_a_block_of_the_dtype_has_no_rectangles_before_the_dtype_is_known():
    method = sq.ClusteredTail()
    with pytest.raises(ValueError, match=r"depends on the dtype: call sized_for"):
        method.rectangles(4096, 0)
    assert len(method.sized_for(torch.float32).rectangles(4096, 0)) == 3
    assert len(method.sized_for(torch.half).rectangles(4096, 0)) == 2


OF_SHORT_CALLS = (
    sq.Clustered(block=64),
    sq.ImprovedClustered(block=64),
    sq.ClusteredTail(block=64),
    sq.ClusteredTail(block=4, last=64),
    sq.ClusteredTail(block=64, last=0, queries="block"),
    sq.ClusteredTail(block=64, last=0, queries="earlier"),
)


@pytest.mark.parametrize("wants_lse", [True, False])
@pytest.mark.parametrize("method", OF_SHORT_CALLS, ids=str)
def test_nan_in_padding_reaches_no_output_of_a_call_of_one_block(method: sq.Method, wants_lse: bool):
    q, k, v = qkv(3, 2, 20, 20)
    for valid in (left[:, :20], right[:, :20]):
        dirty = (x.masked_fill(~valid[:, None, :, None], torch.nan) for x in (q, k, v))
        options = {"method": method, "mask": Mask.causal() & Mask.padding(valid), "return_lse": wants_lse}
        torch.testing.assert_close(sq.attention(*dirty, **options), sq.attention(q, k, v, **options))


def test_near_keys_of_each_block_are_its_own():
    """The blocks of a rectangle are one batch, in which each is another distance behind the keys."""
    method = sq.parse_method("clustered-tail:block=4,queries=block,last=0,clusters=1,topk=1,cells=2,window=2")
    q, k, v = qkv(2, 4, 24, 24)
    mask = Mask.causal() & Mask.padding([24, 15])
    for backend in ("cpu", "reference"):
        with sq.use_backend(backend):
            batch = sq.attention(q, k, v, method=method, mask=mask)
            alone = sq.attention(*(x[1:, :, :15] for x in (q, k, v)), method=method, is_causal=True)
        torch.testing.assert_close(batch[1:, :, :15], alone)


OF_CACHES = (
    sq.ClusteredTail(block=8, last=2, topk=3, cells=2),
    sq.ClusteredTail(block=8, last=0, topk=3, cells=2, window=2, queries="block"),
    sq.ClusteredTail(block=8, last=0, topk=3, cells=2, queries="earlier"),
    sq.ImprovedClustered(block=8, last=2, clusters=3, topk=3),
)
CACHED, NEW = (17, 2, 0, 30), (21, 5, 21, 13)  # tokens of each item; the second has no more than a block together


@pytest.mark.parametrize("layout", ["padded", "of their own lengths"])
@pytest.mark.parametrize("method", OF_CACHES, ids=str)
def test_an_item_behind_a_cache_is_what_it_is_alone(method: sq.Method, layout: str):
    T, n, cached, new = max(CACHED), max(NEW), torch.tensor(CACHED), torch.tensor(NEW)
    keys, queries = torch.arange(T + n), torch.arange(n) < new[:, None]
    first = cached if layout != "padded" else torch.full_like(cached, T)
    valid_keys = (keys >= (first - cached)[:, None]) & (keys < (first + new)[:, None])
    mask = Mask.padding(keys=valid_keys, queries=queries)
    offset = T if layout == "padded" else cached
    inputs = [x.requires_grad_() for x in qkv(4, 2, n, T + n)]
    out, lse = sq.attention(*inputs, method=method, mask=mask & Mask.causal(offset=offset), return_lse=True)
    grads = torch.autograd.grad(out.sin().sum(), inputs)
    for item, valid in enumerate(zip(queries, valid_keys, valid_keys, strict=True)):
        alone = [x.detach()[item, :, there][None].requires_grad_() for x, there in zip(inputs, valid, strict=True)]
        want = sq.attention(*alone, method=method, mask=Mask.causal(offset=CACHED[item]), return_lse=True)
        of_alone = torch.autograd.grad(want[0].sin().sum(), alone)
        torch.testing.assert_close((out[item][:, valid[0]], lse[item][:, valid[0]]), (want[0][0], want[1][0]))
        for grad, one, there in zip(grads, of_alone, valid, strict=True):
            torch.testing.assert_close(grad[item][:, there], one[0], rtol=1e-4, atol=1e-5)


def test_items_behind_caches_are_approximated():
    """The results that the test above compares are not exact attention, except for the second item."""
    q, k, v = qkv(4, 2, max(NEW), max(CACHED) + max(NEW))
    mask = Mask.padding(queries=NEW) & Mask.causal(offset=torch.tensor(CACHED))
    exact = sq.attention(q, k, v, method="full", mask=mask)
    for method in OF_CACHES:
        differs = (sq.attention(q, k, v, method=method, mask=mask) - exact).abs().amax((1, 2, 3)) > 1e-3
        assert differs.tolist() == [True, False, True, True]
