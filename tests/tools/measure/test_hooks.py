"""The diagnostics' hooks of a method."""

import pytest
import torch

import subquad as sq
from subquad.tools.measure.hooks import ChoosesKeys, Hashes, at_n_b, inner, meetings, scores
from tests.tools.measure.test_utility import inputs

HASHING = ("lha", "lha-tail", "lsh", "smyrf")


def bound(name):
    return sq.METHODS[name]().bind(heads=2, head_dim=8)


@pytest.mark.parametrize("name", HASHING)
def test_methods_that_hash_give_a_score_a_bucket_and_choose_keys(name):
    q, k = inputs(2, 2, 150, 8)
    of_query, of_key = scores(bound(name), q, k, mask=sq.Mask.padding([150, 30]))
    settings = sq.METHODS[name]().to_dict()
    buckets = settings.get("buckets", settings.get("clusters"))
    assert of_query.shape == of_key.shape == (2, 2, 150, buckets)
    assert len(of_query.argmax(-1).unique()) > 1
    met = sum(part.multiplicity(150, 150, sq.Mask()) for part in meetings(bound(name), q, k)) > 0
    assert met.any(-1).all()
    assert not met.all()


def test_the_asymmetric_transformation_makes_hashes_of_queries_and_keys_differ():
    q, _ = inputs(1, 2, 40, 8)
    of_query, of_key = scores(sq.Smyrf(clusters=4), q, q)
    assert not of_query.equal(of_key)
    plain, same = scores(sq.RandomHash(buckets=4), q, q)
    assert plain.equal(same)


@pytest.mark.parametrize(("method", "lean"), [
    (sq.LearnedHash(buckets=4), sq.LearnedHash(buckets=4, enlarge=1.0)),
    (sq.Smyrf(clusters=4, rounds=3), sq.Smyrf(clusters=4, rounds=1)),
    (sq.Clustered(), sq.Clustered()),
])  # fmt: skip
def test_at_n_b_takes_away_what_adds_keys(method, lean):
    assert at_n_b(method) == lean
    assert at_n_b(lean) is lean
    attached = method.bind(heads=2, head_dim=8)
    assert inner(at_n_b(attached)) == lean
    assert at_n_b(attached).learned is attached.learned


def test_at_n_b_a_query_meets_so_many_keys():
    q, k = inputs(1, 2, 64, 8)
    for method, keys in ((sq.Smyrf(clusters=4), 16), (sq.Smyrf(clusters=4, rounds=1), 16)):
        (part,) = meetings(at_n_b(method), q, k)
        assert (part.multiplicity(64, 64, sq.Mask()).sum(-1) == keys).all()


def test_only_those_with_the_hooks_have_them():
    assert not isinstance(sq.Clustered(), ChoosesKeys | Hashes)
    assert isinstance(sq.LearnedHash(), ChoosesKeys)
    assert isinstance(sq.LearnedHash(), Hashes)
    with pytest.raises(ValueError, match="'full' does not hash tokens"):
        scores(sq.Full(), *torch.randn(2, 1, 2, 3, 4))
