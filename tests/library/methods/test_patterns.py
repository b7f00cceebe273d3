"""Patterns against N×M masks that are written out pair by pair: each key once, in an exact softmax."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.methods.bigbird import draw
from subquad.testing.oracle import gradients, naive, normal, qkv, tracked

Pairs = Callable[[int, int], bool]  # whether the query at place i sees the key at place j, but for causality


def longformer(method: sq.Longformer, n: int, head: int, heads: int, causal: bool) -> Pairs:
    """The window, and the first tokens both ways."""

    def near(i: int, j: int) -> bool:
        return abs(i - j) <= method.window * method.dilation and (i - j) % method.dilation == 0

    return lambda i, j: near(i, j) or 0 <= j < method.first or 0 <= i < method.first


def strided(method: sq.Strided, n: int, head: int, heads: int, causal: bool) -> Pairs:
    """Near, or a multiple of the stride away, or one of the two by heads."""
    kinds = kinds_of(method.sets, head, heads)
    return lambda i, j: (
        ("near" in kinds and abs(i - j) <= method.stride) or ("far" in kinds and (i - j) % method.stride == 0)
    )


def fixed(method: sq.Fixed, n: int, head: int, heads: int, causal: bool) -> Pairs:
    """In the own block, or in a column, or one of the two by heads."""
    kinds, size = kinds_of(method.sets, head, heads), method.block
    return lambda i, j: (
        ("near" in kinds and i // size == j // size)
        or ("far" in kinds and (j % size >= size - method.columns or i == j))
    )


def kinds_of(sets: str, head: int, heads: int) -> tuple[str, ...]:
    if sets == "heads":
        return ("near",) if head < heads / 2 else ("far",)
    return ("near", "far") if sets == "merged" else (sets,)


def logsparse(method: sq.LogSparse, n: int, head: int, heads: int, causal: bool) -> Pairs:
    """Near, or a power of two away."""
    return lambda i, j: abs(i - j) <= method.window or abs(i - j).bit_count() == 1


def bigbird(method: sq.BigBird, n: int, head: int, heads: int, causal: bool) -> Pairs:
    """Blocks that are near, global at either end, or drawn from a list of all the others."""
    size = method.block
    count = -(-n // size)
    ends = set(range(method.first)) | (set() if causal else set(range(count - method.last, count)))
    seen = {}
    for t in range(-(-n // size) + 1):
        near = set(range(t - method.window, t + method.window + 1))
        others = [s for s in range(t if causal else count) if s not in near | ends]
        picks = draw(
            torch.tensor([[len(others)]]), method.random, torch.arange(heads), torch.tensor([[t]]), method.seed
        )
        seen[t] = near | ends | {others[pick] for pick in picks[0, head, 0].tolist() if pick >= 0}
    everywhere = set() if causal else ends
    return lambda i, j: i // size in everywhere or j // size in seen.get(i // size, ())


ORACLES = {
    "longformer:window=4,first=1": longformer,
    "longformer:window=2,dilation=3,first=3": longformer,
    "longformer:window=0,first=0,dilation=2": longformer,
    "bigbird:block=4,random=1": bigbird,
    "bigbird:block=3,window=0,random=2,first=2,last=0,seed=5": bigbird,
    "bigbird:block=2,random=3,first=0,last=2": bigbird,
    "strided:stride=5": strided,
    "strided:stride=1": strided,
    "strided:stride=4,sets=heads": strided,
    "strided:stride=3,sets=far": strided,
    "fixed:block=5,columns=2": fixed,
    "fixed:block=4,columns=1,sets=heads": fixed,
    "fixed:block=64,columns=50,sets=far": fixed,
    "logsparse:window=3": logsparse,
    "logsparse:window=0": logsparse,
}
every_pattern = pytest.mark.parametrize("text", ORACLES)


def places(valid: Tensor, start: int = 0) -> tuple[int, int]:
    """The first real token of an item, and how many there are from it to the last."""
    tokens = valid.nonzero()[:, 0].tolist()
    return (tokens[0], tokens[-1] + 1 - tokens[0]) if tokens else (0, 0)


def allowed(text: str, heads: int, mask: Mask, N: int, M: int, batch: int, offsets: list[int] | None = None) -> Tensor:
    """Bool (B,H,N,M): which pairs meet, by the definitions above."""
    method = sq.parse_method(text)
    every = torch.ones(batch, max(N, M), dtype=torch.bool)
    keys = every[:, :M] if mask.key_padding(M) is None else mask.key_padding(M)
    queries = every[:, :N] if mask.query_padding(N) is None else mask.query_padding(N)
    dense = torch.zeros(batch, heads, N, M, dtype=torch.bool)
    for item in range(batch):
        offset = 0 if offsets is None else offsets[item]
        first, n = places(keys[item] | queries[item] if offsets is None else keys[item])
        for head in range(heads):
            sees = ORACLES[text](method, n, head, heads, mask.is_causal)
            rows = [[sees(i + offset - first, j - first) for j in range(M)] for i in range(N)]
            dense[item, head] = torch.tensor(rows).tril(offset) if mask.is_causal else torch.tensor(rows)
    return dense & queries[:, None, :, None] & keys[:, None, None, :]


def some_mask(rng: random.Random, B: int, N: int) -> Mask:
    """Padding at either end and inside, of keys and queries alike or not; causal or not."""

    def valid() -> Tensor:
        rows = torch.zeros(B, N, dtype=torch.bool)
        for row in rows:
            first = rng.choice([0, 0, rng.randint(0, N - 1)])
            row[first : rng.choice([N, rng.randint(first, N)])] = True
            row[rng.sample(range(N), rng.choice([0, N // 5]))] = False
        return rows

    mask = rng.choice(
        [Mask(), Mask.padding(valid()), Mask.padding(keys=valid()), Mask.padding(keys=valid(), queries=valid())]
    )
    return mask & rng.choice([Mask(), Mask.causal()])


def check(text: str, shapes: range) -> None:
    for shape in shapes:
        rng = random.Random(f"{text} {shape}")
        B, G, times, D, E = rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 4), 3
        N = rng.randint(1, 30)
        mask, sizes = some_mask(rng, B, N), ((B, G * times, N, D), (B, G, N, D), (B, G, N, E))
        inputs, others = (
            tracked(*(normal(*size, seed=3 * shape + i, dtype=torch.float64) for i, size in enumerate(sizes)))
            for _ in range(2)
        )
        out = sq.attention(*inputs, method=text, mask=mask, enable_gqa=True)
        wanted = naive(*others, allowed(text, G * times, mask, N, N, B))
        at = f"shape {shape}: {sizes[0]}, {sizes[1]} under {mask}"
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5, msg=lambda m, at=at: f"{at}: {m}")
        grads, wanted_grads = gradients(out, *inputs), gradients(wanted, *others)
        for have, want in zip(grads, wanted_grads, strict=True):
            torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5, msg=lambda m, at=at: f"{at}: {m}")


@every_pattern
def test_equals_exact_attention_under_the_mask_of_its_definition(text):
    check(text, range(40))


@pytest.mark.long
@every_pattern
def test_equals_it_on_more_shapes(text):
    check(text, range(40, 200))


CACHED = [*ORACLES][::2]


@pytest.mark.parametrize("text", CACHED)
def test_steps_on_a_cache_equal_the_rows_of_the_whole(text):
    q, k, v = qkv(23)
    for mask in (Mask(), Mask.causal()):
        if text.startswith("bigbird") and not mask.is_causal:
            continue  # its last blocks, and what may be drawn, follow from the number of keys
        whole = sq.attention(q, k, v, method=text, mask=mask)
        for offset in (0, 5, 21):
            at = slice(offset, offset + 2)
            step = sq.attention(q[:, :, at], k, v, method=text, mask=mask & Mask(offset=offset))
            torch.testing.assert_close(step, whole[:, :, at])
        starts = torch.tensor([3, 20])
        step = sq.attention(
            torch.stack([x[:, s : s + 2] for x, s in zip(q, starts.tolist(), strict=True)]),
            *(k, v), method=text, mask=mask & Mask(offset=starts),
        )  # fmt: skip
        torch.testing.assert_close(step[1], whole[1, :, 20:22])


@pytest.mark.parametrize("offset", [0, 5, 30, torch.tensor([5, 0])], ids=str)
@pytest.mark.parametrize("text", [*CACHED, "fixed", "fixed:block=40,columns=3,sets=heads", "strided:stride=40"])
def test_queries_beyond_the_last_key_are_as_with_hidden_keys_behind_it(text, offset):
    q, k, v = qkv(24)
    mask = Mask.causal(offset=offset)
    longer = (torch.nn.functional.pad(x, (0, 0, 0, 40)) for x in (k, v))
    want = sq.attention(q, *longer, method=text, mask=mask & Mask.padding(keys=[24, 24]), return_lse=True)
    out = sq.attention(q, k, v, method=text, mask=mask, return_lse=True)
    torch.testing.assert_close(out, want)
    if text == "fixed" and not isinstance(offset, torch.Tensor):  # one block
        torch.testing.assert_close(out[0], naive(q, k, v, mask.to_dense(24, 24)))


@pytest.mark.parametrize("text", CACHED)
def test_a_left_padded_prompt_and_its_steps(text):
    """The calls are those of generation: a prompt, and then one query at a time on all keys so far."""
    q, k, v = qkv(20)
    valid = torch.arange(20) >= torch.tensor([[0], [6]])
    whole = sq.attention(q, k, v, method=text, mask=Mask.padding(valid) & Mask.causal())
    for t in (8, 13, 19):
        so_far = [x[:, :, : t + 1] for x in (k, v)]
        mask = Mask.padding(keys=valid[:, : t + 1]) & Mask.causal(offset=t)
        step = sq.attention(q[:, :, t : t + 1], *so_far, method=text, mask=mask)
        torch.testing.assert_close(step, whole[:, :, t : t + 1])


@every_pattern
def test_each_key_meets_a_query_once(text):
    """Merged, `strided` lists a query with itself in both sets, one of which leaves it out."""
    q, k, _ = qkv(29)
    method = sq.parse_method(text)
    for mask in (Mask(), Mask.causal() & Mask.padding([29, 12])):
        call = method.prepare(q, k, k, mask=mask)[3]
        met = sum(buckets.multiplicity(29, 29, call.mask) for buckets in method.meetings(q, k, call))
        if text.startswith("strided") and method.sets == "merged":
            met = met - torch.eye(29) * (met == 2)
        assert torch.equal(met, allowed(text, 2, mask, 29, 29, 2).float())


@pytest.mark.parametrize(
    "text",
    [
        "longformer:window=8,dilation=2,first=4",
        "bigbird:block=16",
        "strided:stride=45",
        "fixed:block=128,columns=4",
        "logsparse:window=8",
    ],
)
def test_nothing_in_it_is_as_large_as_a_mask(text):
    largest = []
    inputs = tracked(*qkv(2048, B=1))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: largest.append(x.numel()) or x, lambda x: x):
        sq.attention(*inputs, method=text).sum().backward()
    assert max(largest) < 2 * 2048 * 2048 / 4


# ---------------------------------------------------------------------- BigBird's random blocks


def test_drawn_blocks_are_different_and_each_set_is_as_likely():
    choices = torch.full((1, 2000), 5)
    picks = draw(choices, 2, torch.arange(3), torch.arange(2000)[None], seed=0)
    assert (picks[..., 0] != picks[..., 1]).all()
    pairs = picks.sort(-1).values.view(-1, 2)
    counts = torch.bincount(pairs[:, 0] * 5 + pairs[:, 1])
    counts = counts[counts > 0]
    assert len(counts) == 10
    assert (counts - 600).abs().max() < 5 * 600**0.5


def test_fewer_blocks_than_asked_for_are_all_drawn():
    picks = draw(torch.tensor([[0, 1, 3]]), 3, torch.arange(2), torch.arange(3)[None], seed=0)
    assert [sorted(of_block) for of_block in picks[0, 1].tolist()] == [[-1, -1, -1], [-1, -1, 0], [0, 1, 2]]


def test_heads_blocks_and_seeds_draw_their_own():
    block, choices = torch.arange(300)[None], torch.full((1, 300), 1000)
    one, other = (draw(choices, 1, torch.arange(2), block, seed=seed)[0, ..., 0] for seed in (0, 1))
    for a, b in ((one[0], one[1]), (one[0], other[0]), (one[0, 1:], one[0, :-1])):
        assert (a == b).float().mean() < 0.05


def test_random_blocks_do_not_depend_on_the_batch_or_on_padding():
    q, k, v = qkv(40)
    method = sq.BigBird(block=3, random=2)
    valid = torch.arange(40) < torch.tensor([[40], [25]])
    together = method(q, k, v, mask=Mask.padding(valid))
    alone = method(*(x[1:, :, :25] for x in (q, k, v)))
    torch.testing.assert_close(together[1:, :, :25], alone)
    moved = method(*(x.roll(15, 2) for x in (q, k, v)), mask=Mask.padding(valid.roll(15, 1)))
    torch.testing.assert_close(moved[1:, :, 15:], alone)


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("longformer:dilation=0", "'longformer': dilation=0, but it must be a whole number ≥ 1"),
        ("longformer:first=-1", "'longformer': first=-1, but it must be a whole number ≥ 0"),
        ("bigbird:block=0", "'bigbird': block=0, but it must be a whole number ≥ 1"),
        ("bigbird:random=1001", "'bigbird': random=1001, but it must be at most 1000"),
        ("strided:stride=0", "'strided': stride=0, but it must be a whole number ≥ 1"),
        ("strided:sets=layers", "'strided': sets='layers', but it must be one of 'merged', 'heads', 'near', 'far'"),
        ("fixed:block=0", "'fixed': block=0, but it must be a whole number ≥ 1"),
        ("fixed:columns=0", "'fixed': columns=0, but it must be a whole number ≥ 1"),
        ("fixed:block=4", "'fixed': columns=8 needs a larger block: with block=4 it must be at most 4"),
        ("logsparse:window=-1", "'logsparse': window=-1, but it must be a whole number ≥ 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(text, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        sq.parse_method(text)


LARGE = 10**9


@pytest.mark.parametrize(
    "text",
    [
        f"longformer:window={LARGE}",
        f"longformer:first={LARGE}",
        f"bigbird:block={LARGE}",
        f"bigbird:block=2,window={LARGE}",
        "bigbird:block=2,random=1000",
        f"bigbird:block=2,first={LARGE}",
        f"bigbird:block=2,last={LARGE}",
        f"strided:stride={LARGE}",
        f"fixed:block={LARGE}",
        f"fixed:block={LARGE},columns={LARGE},sets=far",
        f"logsparse:window={LARGE}",
    ],
)
@pytest.mark.parametrize("mask", [Mask(), Mask.padding([17, 3])], ids=str)
def test_patterns_longer_than_the_input_are_exact(text, mask):
    q, k, v = qkv(17)
    exact = sq.attention(q, k, v, method="full", mask=mask)
    torch.testing.assert_close(sq.attention(q, k, v, method=text, mask=mask), exact)


def test_a_dilation_or_stride_beyond_the_input_leaves_the_token_itself():
    q, k, v = qkv(17)
    for text in (f"longformer:dilation={LARGE},first=0", f"strided:stride={LARGE},sets=far"):
        torch.testing.assert_close(sq.attention(q, k, v, method=text), v)


def test_global_tokens_are_those_of_each_item():
    """A padded item's global tokens are those behind the padding; a short item's are all its tokens."""
    q, k, v = qkv(17)
    valid = torch.arange(17) >= torch.tensor([[0], [15]])
    out = sq.attention(q, k, v, method="longformer:window=0,first=3", mask=Mask.padding(valid))
    exact = sq.attention(q, k, v, method="full", mask=Mask.padding(valid))
    torch.testing.assert_close(out[0, :, :3], exact[0, :, :3])
    torch.testing.assert_close(out[1], exact[1])


@pytest.mark.parametrize("text", ["strided:stride=2", "fixed:block=2,columns=1"])
def test_of_an_odd_number_of_heads_the_first_half_is_the_larger(text):
    q, k, v = qkv(17, H=3)
    near, far, heads = (sq.attention(q, k, v, method=f"{text},sets={sets}") for sets in ("near", "far", "heads"))
    torch.testing.assert_close(heads, torch.cat([near[:, :2], far[:, 2:]], dim=1))
