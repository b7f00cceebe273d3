"""Attention utility: its theorems, and its definition written out."""

import math
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import subquad as sq
from subquad.kernels.tokens.slots import Buckets
from subquad.methods import Method
from subquad.tools.measure import utility
from subquad.tools.measure.dynamics import hash_dynamics, negative_entropy
from subquad.tools.measure.peak_memory import peak_extra_mib
from subquad.tools.measure.utility import attention_utility, utilities


@dataclass(frozen=True)
class Fixed(Method):
    """Buckets that the test gives."""

    buckets: tuple = ()
    name: ClassVar[str] = "fixed"
    traits = replace(sq.Full.traits, exact_limit="none")

    def meetings(self, query, key, call):
        return self.buckets


def random_partition(queries, keys, buckets, seed, heads=1):
    """Equal buckets of random queries and of random keys."""
    draw = torch.Generator().manual_seed(seed)

    def side(tokens):
        order = torch.stack([torch.randperm(tokens, generator=draw) for _ in range(heads)])
        return order.view(1, heads, buckets, tokens // buckets)

    return Fixed((Buckets(side(queries), side(keys)),))


def inputs(*shape, seed=0, size=1.0):
    draw = torch.Generator().manual_seed(seed)
    return size * torch.randn(2, *shape, generator=draw)


def upper_bound(query, key, keys, **options):
    """The largest utility that so many keys for each query can have."""
    return utilities({}, query, key, keys=keys, **options)[0]


def linear_hash(width, heads=1, **settings):
    """lha whose score in bucket b is the vector's b-th entry."""
    bound = sq.LearnedHash(hash="linear", buckets=width, **settings).bind(heads=heads, head_dim=width)
    for function in (bound.learned.query, bound.learned.key):
        function.weights[0].data.copy_(torch.eye(width).expand(heads, -1, -1))
    return bound


def test_random_balanced_buckets_have_a_utility_of_one_in_b():
    B, seeds = 4, 300
    q, k = inputs(1, 2, 16, 8, size=1.5)
    found = torch.cat([attention_utility(random_partition(16, 16, B, s, heads=2), q, k).utility for s in range(seeds)])
    for head in found.T:
        assert abs(head.mean() - 1 / B) < 4 * head.std() / math.sqrt(seeds)
    assert found.std() > 0.01  # a single one is far off


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.floats(0.0, 4.0), st.integers(0, 1000)
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_partition_with_equal_sides_is_within_the_bound(buckets, queries, keys, size, seed):
    q, k = inputs(2, 2, max(queries, keys) * buckets, 4, seed=seed, size=size)
    q = q[:, :, : queries * buckets]
    k = k[:, :, : keys * buckets]
    method = random_partition(queries * buckets, keys * buckets, buckets, seed, heads=2)
    method = Fixed((Buckets(*(x.expand(2, -1, -1, -1) for x in (method.buckets[0].queries, method.buckets[0].keys))),))
    bound, found = utilities({"it": method}, q, k, keys=keys)
    assert (found["it"].utility <= bound + 1e-6).all()
    assert (found["it"].keys == keys).all()
    torch.testing.assert_close(found["it"].bound, bound)


def test_queries_in_two_buckets_exceed_the_bound_at_n_b_keys_but_not_that_at_their_own_number():
    q, k = inputs(1, 1, 32, 2, size=0.1)
    q[..., 24:, :] = q[..., :8, :] = 0.5  # first and last queries score high, alike, in both buckets
    bound, found = utilities({"lha": linear_hash(2, enlarge=1.0)}, q, k, keys=16)
    mine = found["lha"]
    assert mine.utility > bound + 0.05
    assert mine.utility <= mine.bound
    assert mine.keys > 16


@pytest.mark.parametrize("enlarge", [1.0, math.sqrt(2)])
@pytest.mark.parametrize("hash", ["linear", "mlp"])
def test_no_selection_exceeds_the_bound_at_its_own_number_of_keys(enlarge, hash):
    q, k = inputs(2, 3, 40, 8, seed=1)
    bound = sq.LearnedHash(buckets=5, hash=hash, enlarge=enlarge).bind(heads=3, head_dim=8)
    found = attention_utility(bound, q, k)
    assert (found.utility < found.bound).all()
    assert (found.utility > 0.1).all()


def test_one_bucket_has_a_utility_of_one():
    q, k = inputs(2, 2, 13, 8)
    found = attention_utility(sq.LearnedHash(buckets=1).bind(heads=2, head_dim=8), q, k)
    torch.testing.assert_close(found.utility, torch.ones_like(found.utility))
    torch.testing.assert_close(found.keys, torch.full_like(found.keys, 13))


def test_the_right_buckets_of_block_diagonal_attention_have_a_utility_of_one():
    blocks = torch.arange(20).remainder(4)
    q = k = 12 * torch.nn.functional.one_hot(blocks, 4).float()[None, None]
    right, wrong = linear_hash(4, enlarge=1.0), linear_hash(4, enlarge=1.0)
    wrong.learned.key.weights[0].data.copy_(torch.eye(4).roll(1, 0))
    assert attention_utility(right, q, k).utility > 1 - 1e-6
    assert attention_utility(wrong, q, k).utility < 1e-6


def test_the_definition_written_out():
    q, k = inputs(2, 4, 11, 8, size=1.3)
    k = k[:, :2]  # grouped-query heads
    mask = sq.Mask.padding([11, 7])
    bound = sq.LearnedHash(buckets=3).bind(heads=4, kv_heads=2, head_dim=8)
    query, key, _, call = bound.prepare(q, k, k, mask=mask)
    met = sum(part.multiplicity(11, 11, mask) for part in bound.method.meetings(query, key, call)) > 0
    logits = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~mask.key_padding(11)[:, None, None], -torch.inf)
    weights = logits.softmax(-1)
    best, found = utilities({"lha": bound}, q, k, keys=torch.tensor([3, 2]), mask=mask)
    for item, (n, keys) in enumerate([(11, 3), (7, 2)]):
        for head in range(4):
            rows = [(weights[item, head, i], met[item, head, i]) for i in range(n)]
            mass = sum(float(w[m].sum()) for w, m in rows) / n
            most = sum(float(w.topk(int(m.sum())).values.sum()) for w, m in rows) / n
            assert float(found["lha"].utility[item, head]) == pytest.approx(mass, abs=1e-6)
            assert float(found["lha"].bound[item, head]) == pytest.approx(most, abs=1e-6)
            assert float(found["lha"].keys[item, head]) == pytest.approx(sum(int(m.sum()) for _, m in rows) / n)
            fixed = sum(float(w.topk(keys).values.sum()) for w, _ in rows) / n
            assert float(best[item, head]) == pytest.approx(fixed, abs=1e-6)


def test_a_bias_is_part_of_exact_attention():
    q, k = inputs(1, 2, 6, 4)
    bias = torch.full((1, 1, 6, 6), -100.0)
    bias[..., 2] = 0.0  # every query sees key 2
    assert upper_bound(q, k, 1).max() < 0.9
    torch.testing.assert_close(upper_bound(q, k, 1, bias=bias), torch.ones(1, 2, dtype=torch.float64))


def test_under_a_causal_mask_no_mass_is_in_the_future():
    q, k = inputs(1, 1, 16, 4)
    everything = Fixed((Buckets(*[torch.arange(16).view(1, 1, 1, 16)] * 2),))
    found = attention_utility(everything, q, k, mask=sq.Mask.causal())
    assert float(found.utility) == pytest.approx(1.0)
    assert float(found.keys) == pytest.approx(8.5)


def test_more_keys_than_there_are_count_as_all_and_a_longer_item_does_not_matter():
    q, k = inputs(1, 2, 9, 4)
    torch.testing.assert_close(upper_bound(q, k, 99), torch.ones(1, 2, dtype=torch.float64))
    padded = (torch.cat([x, 100 * torch.ones(1, 2, 5, 4)], 2) for x in (q, k))
    torch.testing.assert_close(upper_bound(*padded, 2, mask=sq.Mask.padding([9])), upper_bound(q, k, 2))


def test_some_queries_at_a_time_are_as_all_at_once(monkeypatch):
    q, k = inputs(2, 2, 37, 8)
    bound = sq.LearnedHash(buckets=3).bind(heads=2, head_dim=8)
    options = {"mask": sq.Mask.causal() & sq.Mask.padding([37, 20])}
    whole, at_once = utilities({"it": bound}, q, k, keys=4, **options)
    monkeypatch.setattr(utility, "CHUNK", 5 * 2 * 2 * 37)
    parts, found = utilities({"it": bound}, q, k, keys=4, **options)
    torch.testing.assert_close(parts, whole)
    for name in ("utility", "keys", "bound"):
        torch.testing.assert_close(getattr(found["it"], name), getattr(at_once["it"], name))


def test_long_inputs_take_little_memory():
    q, k = inputs(1, 2, 4096, 8)
    bound = sq.LearnedHash(buckets=16).bind(heads=2, head_dim=8)
    peak, found = peak_extra_mib(lambda: attention_utility(bound, q, k))
    assert peak < 160  # one 4096 × 4096 matrix in fp32 for both heads is 128, and there would be several
    assert (found.utility > 1 / 16).all()


@pytest.mark.parametrize(("method", "options", "message"), [
    (sq.Clustered(), {}, "'clustered' does not declare which keys a query meets"),
    (sq.LearnedHash(), {}, "'lha' has learned parameters: give what method.bind"),
    (sq.LearnedHash().bind(heads=2, head_dim=4), {"mask": sq.Mask.window(2)}, "does not support a window"),
    (sq.LearnedHash().bind(heads=2, head_dim=4), {"mask": sq.Mask.segments([[0, 0, 1]])}, "packs segments"),
    (sq.LearnedHash().bind(heads=3, head_dim=4), {}, "bound for 3 heads"),
])  # fmt: skip
def test_what_cannot_be_read_says_why(method, options, message):
    with pytest.raises(ValueError, match=message):
        attention_utility(method, *inputs(1, 2, 3, 4), **options)


# ---------------------------------------------------------------------- dynamics


def test_negative_entropy_is_between_evenly_spread_and_one_bucket():
    assert float(negative_entropy(torch.full((1, 2, 3, 8), 0.3))) == pytest.approx(-math.log(8))
    assert float(negative_entropy(torch.eye(4)[None, None])) == 0.0
    half = torch.tensor([[[[1.0, 1.0], [0.0, 0.0], [5.0, 0.0]]]])  # the second is padding
    assert float(negative_entropy(half)) == pytest.approx(-math.log(2) / 2)


def test_dynamics_are_the_parts_of_the_loss():
    q, k = inputs(2, 2, 24, 8)
    bound = sq.LearnedHash(buckets=4).bind(heads=2, head_dim=8)
    mask = sq.Mask.padding([24, 10])
    bound.train()(q, k, k, mask=mask)
    state = hash_dynamics(bound, q, k, mask=mask)
    assert state.kl_query + state.kl_key == pytest.approx(bound.auxiliary_loss().item(), rel=1e-5)
    assert -math.log(4) <= state.negative_entropy_query < 0
    assert -math.log(4) <= state.negative_entropy_key < 0
    short = hash_dynamics(bound, q[1:, :, :10], k[1:, :, :10])
    long = hash_dynamics(bound, q[1:], k[1:], mask=sq.Mask.padding([10]))
    assert asdict(long) == pytest.approx(asdict(short), rel=1e-5)


def test_dynamics_are_of_lha_only():
    with pytest.raises(ValueError, match="'clustered' has no utilities of buckets"):
        hash_dynamics(sq.Clustered().bind(heads=2, head_dim=4), *inputs(1, 2, 3, 4))
