"""The registry of strategies, on one rank, which needs no other processes."""

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

import subquad as sq
from subquad.distributed.run import refusal_of_method, way_of_method
from subquad.distributed.strategies import ring_of, summary_of
from subquad.testing.oracle import qkv
from tests.library.distributed.cases.registered import MeanOfValues, strategy


@dataclass(frozen=True)
class Inherited(MeanOfValues):
    """A class that computes something else than the one that it inherits from."""

    def read(self, query, sums):
        return 2 * super().read(query, sums)


def test_a_strategy_is_for_the_class_that_registered_it_and_for_settings_that_fit(alone: None):
    sequence = sq.distributed.Sequence.even(21, mode="auto")
    ways = [way_of_method(method, sq.Mask(), sequence, 2) for method in (MeanOfValues(), MeanOfValues(3), Inherited())]
    assert ways == ["summary", "heads", "heads"]
    q, k, v = qkv(21)
    have = sq.attention(q, k, v, method=Inherited(), parallel=sequence)
    assert (have - sq.attention(q, k, v, method=Inherited())).abs().max() < 1e-6


def test_a_refusal_says_what_the_settings_must_be(alone: None):
    sequence = sq.distributed.Sequence.even(21, mode="summary")
    assert refusal_of_method(MeanOfValues(), sq.Mask(), sequence, 2) is None
    assert refusal_of_method(MeanOfValues(3), sq.Mask(), sequence, 2).endswith("use mode='heads', or a power of 1 or 2")
    assert refusal_of_method(Inherited(), sq.Mask(), sequence, 2).endswith("use mode='heads'")


def test_a_second_strategy_of_one_sort_is_refused():
    with pytest.raises(ValueError, match=r"MeanOfValues has a strategy of the kind 'partials'; .* 'halo', so register"):
        sq.distributed.register(MeanOfValues, replace(strategy, kind="halo"))
    assert summary_of(MeanOfValues()) is strategy


def test_a_strategy_is_registered_for_a_class():
    with pytest.raises(
        TypeError,
        match=r"for a class of methods, but this is MeanOfValues.*; give the class itself|Expected type: type",
    ):
        sq.distributed.register(MeanOfValues(), strategy)


def test_the_methods_of_this_package_have_theirs_by_their_settings():
    wanted = {
        "linear": "partials",
        "local": "halo",
        "longformer": "places",
        "bigbird": None,
        "bigbird:random=0": "places",
        "strided": None,
        "strided:sets=near": "halo",
        "clustered-tail": None,
        "clustered-tail:clusters=4,topk=4": "partials",
        "clustered-tail:clusters=4,topk=4,window=2": None,
        "lsh": None,
        "lsh:bucket_size=8": "partials",
        "sinkhorn": None,
        "full": None,
    }
    strategies = {text: summary_of(sq.parse_method(text)) for text in wanted}
    assert {text: None if x is None else x.kind for text, x in strategies.items()} == wanted
    assert [text for text in sq.list_methods() if ring_of(sq.parse_method(text))] == ["full", "shared-full"]
    assert ring_of(sq.parse_method("full:positions=relative")) is None


def test_importing_subquad_does_not_load_what_only_ranks_need():
    code = "import sys, subquad; print([name for name in sys.modules if name.startswith('subquad.distributed')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
