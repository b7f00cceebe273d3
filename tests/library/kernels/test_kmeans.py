import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subquad.kernels.dispatch import use_backend
from subquad.kernels.native import interface
from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.selection.kmeans.op import hamming_kmeans
from subquad.testing.oracle import normal

pytestmark = pytest.mark.usefixtures("implementation")


def slow_kmeans(codes: list[int], clusters: int, bits: int, iterations: int) -> list[int]:
    """Lloyd's algorithm under Hamming distance, one integer at a time."""
    if len(codes) <= clusters:
        return list(range(len(codes)))
    centroids = [codes[c * len(codes) // clusters] for c in range(clusters)]

    def nearest(code: int) -> int:
        return min(range(clusters), key=lambda c: ((code ^ centroids[c]).bit_count(), c))

    for _ in range(iterations):
        labels = [nearest(code) for code in codes]
        for c in range(clusters):
            members = [code for code, label in zip(codes, labels, strict=True) if label == c]
            for bit in range(bits):
                ones = sum(code >> bit & 1 for code in members)
                if 2 * ones != len(members):  # a tied bit and an empty cluster keep the old value
                    centroids[c] = centroids[c] & ~(1 << bit) | (2 * ones > len(members)) << bit
    return [nearest(code) for code in codes]


def expected(codes: torch.Tensor, valid: torch.Tensor, clusters: int, bits: int, iterations: int) -> torch.Tensor:
    labels = torch.full_like(codes, clusters)
    for b, h in torch.cartesian_prod(torch.arange(codes.shape[0]), torch.arange(codes.shape[1])).tolist():
        kept = codes[b, h, valid[b]].tolist()
        labels[b, h, valid[b]] = torch.tensor(slow_kmeans(kept, clusters, bits, iterations), dtype=torch.int64)
    return labels


@st.composite
def problems(draw):
    bits, clusters, N = draw(st.integers(1, 63)), draw(st.integers(1, 6)), draw(st.integers(1, 20))
    word = st.integers(0, 2**bits - 1)
    few = draw(st.lists(word, min_size=1, max_size=4))  # many equal words: many ties
    item = st.lists(draw(st.sampled_from([word, st.sampled_from(few)])), min_size=N, max_size=N)
    codes = torch.tensor(draw(st.lists(item, min_size=4, max_size=4))).view(2, 2, N)
    valid = torch.tensor(draw(st.lists(st.lists(st.booleans(), min_size=N, max_size=N), min_size=2, max_size=2)))
    return codes, valid, clusters, bits, draw(st.integers(0, 4))


@given(problems())
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_the_slow_one_bit_for_bit(implementation, problem):
    codes, valid, clusters, bits, iterations = problem
    assert torch.equal(hamming_kmeans(codes, valid, clusters, bits, iterations), expected(*problem))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("bits", [7, 63])
def test_equals_the_slow_one_with_padding(side, bits):
    codes = hash_codes(normal(5, 2, 40, 4), bits, seed=0)
    valid = torch.arange(40) < torch.tensor([40, 0, 1, 6, 23])[:, None]
    valid = valid.flip(1) if side == "left" else valid
    assert torch.equal(hamming_kmeans(codes, valid, 6, bits, 10), expected(codes, valid, 6, bits, 10))


def test_no_padding_is_all_real():
    codes = hash_codes(normal(2, 2, 40, 4), 20, seed=0)
    everything = torch.ones(2, 40, dtype=torch.bool)
    assert torch.equal(hamming_kmeans(codes, None, 6, 20, 5), hamming_kmeans(codes, everything, 6, 20, 5))


def test_what_pads_hold_changes_nothing():
    codes = hash_codes(normal(1, 1, 40, 4), 20, seed=0)
    valid = torch.arange(40)[None] % 3 > 0
    other = torch.where(valid[:, None], codes, 12345)
    assert torch.equal(hamming_kmeans(codes, valid, 6, 20, 5), hamming_kmeans(other, valid, 6, 20, 5))


def test_no_more_tokens_than_clusters_gives_each_its_own():
    codes = torch.zeros(1, 1, 8, dtype=torch.int64)  # equal codes: distance alone would put all in one cluster
    valid = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 0]]).bool()
    assert hamming_kmeans(codes, valid, 3, 5, 2).tolist() == [[[3, 0, 1, 3, 2, 3, 3, 3]]]
    assert hamming_kmeans(codes, None, 9, 5, 2).tolist() == [[list(range(8))]]


def test_the_lowest_cluster_wins_a_tie():
    codes = torch.tensor([0b00, 0b11, 0b01]).view(1, 1, 3)
    assert hamming_kmeans(codes, None, 2, 2, 0).tolist() == [[[0, 1, 0]]]


def test_clear_clusters_are_found():
    centres = torch.tensor([0, 2**20 - 1, (2**20 - 1) // 3])
    codes = centres[torch.arange(30) % 3] ^ (1 << torch.arange(30) % 20)
    labels = hamming_kmeans(codes.view(1, 1, 30), None, 3, 20, 10)[0, 0]
    assert len({tuple(labels[i::3].unique().tolist()) for i in range(3)}) <= 3
    assert sum(len(labels[i::3].unique()) for i in range(3)) == 3


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("shape", [(1, 1, 20_000), (3, 5, 777)], ids=str)
@pytest.mark.parametrize("clusters", [3, 100, 300])
def test_all_implementations_agree_on_many_codes(shape, clusters):
    codes = hash_codes(normal(*shape, 8), 63, seed=0)
    valid = normal(shape[0], shape[2]) > -1
    with use_backend("reference"):
        want = hamming_kmeans(codes, valid, clusters, 63, 10)
    assert torch.equal(hamming_kmeans(codes, valid, clusters, 63, 10), want)


def test_the_number_of_threads_changes_no_label(monkeypatch):
    monkeypatch.setattr(interface, "SMALL", 0)
    for shape in ((1, 1, 20_000), (3, 2, 500)):
        codes, labels = hash_codes(normal(*shape, 8), 63, seed=0), []
        for threads in (1, 2, 5):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            labels.append(hamming_kmeans(codes, None, 20, 63, 10))
            torch.set_num_threads(before)
        assert all(torch.equal(one, labels[0]) for one in labels)
