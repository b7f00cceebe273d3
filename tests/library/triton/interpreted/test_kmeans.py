import pytest
import torch
from hypothesis import HealthCheck, given, settings

import subquad as sq
from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.selection.kmeans import triton as kmeans
from subquad.kernels.selection.kmeans.op import hamming_kmeans
from subquad.kernels.selection.kmeans.reference import hamming_kmeans as reference
from subquad.testing.oracle import normal
from tests.library.kernels.test_kmeans import problems
from tests.library.triton.interpreted.fences import fenced

LENGTHS = torch.tensor([77, 0, 1, 6, 40])


def codes_of(N, bits=63, B=5, H=1):
    return fenced(hash_codes(normal(B, H, N, 5), bits, seed=0))


def valid_of(N, side):
    valid = torch.arange(N) < LENGTHS.clamp(max=N)[:, None]
    return fenced(valid.flip(1) if side == "left" else valid)


def on_triton(*args):
    with sq.use_backend("triton"):
        return hamming_kmeans(*args)


@given(problems())
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_the_reference_on_words_with_ties(problem):
    assert torch.equal(on_triton(*problem), reference(*problem))


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize(("bits", "clusters", "together"), [(7, 6, 128), (63, 70, 128), (63, 70, 1), (63, 100, 128)])
def test_equals_the_reference(poisoned, monkeypatch, side, bits, clusters, together):
    monkeypatch.setattr(kmeans, "TOGETHER", together)
    codes, valid = codes_of(77, bits), side and valid_of(77, side)
    assert torch.equal(on_triton(codes, valid, clusters, bits, 3), reference(codes, valid, clusters, bits, 3))


@pytest.mark.parametrize("N", [0, 1, 17])
def test_short_ones(poisoned, N):
    codes, valid = codes_of(N), valid_of(N, "right")
    assert torch.equal(on_triton(codes, valid, 3, 63, 2), reference(codes, valid, 3, 63, 2))


@pytest.mark.parametrize("together", [1, 128])
@pytest.mark.parametrize("side", [None, "left"])
def test_each_item_has_its_own_number_of_clusters(poisoned, monkeypatch, side, together):
    monkeypatch.setattr(kmeans, "TOGETHER", together)
    codes, valid = codes_of(77), side and valid_of(77, side)
    counts, labels = torch.tensor([5, 1, 3, 9, 2]), torch.empty_like(codes)
    kmeans.fill_labels(labels, codes, kmeans.KMeansItems.make(valid, counts, 9, labels), 3)
    assert torch.equal(labels, reference(codes, valid, 9, 63, 3, counts))


@pytest.mark.parametrize("together", [16, 128])
def test_votes_in_several_runs_of_tokens(poisoned, monkeypatch, together):
    codes = codes_of(100, B=1)
    monkeypatch.setattr(kmeans, "EDGE", 16)
    monkeypatch.setattr(kmeans, "TOGETHER", together)
    assert torch.equal(on_triton(codes, None, 20, 63, 3), reference(codes, None, 20, 63, 3))


def test_codes_of_any_strides():
    codes = codes_of(77, B=2, H=2).transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(on_triton(codes, None, 6, 63, 2), reference(codes, None, 6, 63, 2))


def test_too_many_to_count_is_refused():
    with pytest.raises(ValueError, match="there are 131,073 clusters, and the kernels tell at most 131,072 apart"):
        on_triton(codes_of(3), None, 2**17 + 1, 63, 1)
    assert "16,777,217 tokens" in kmeans.refusal_of_sizes(2**24 + 1, 1)
