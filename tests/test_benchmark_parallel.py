"""The model of sequence parallelism on many GPUs has the limits that it must have."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("parallel_model")


def test_on_one_gpu_nothing_is_sent(model: ModuleType):
    machine, layer = model.Machine(start=0.0), model.Layer(10**6)
    assert model.ring(machine, layer, 1) == model.exact_products(machine, layer, 1)
    assert model.by_heads(machine, layer, 1, model.exact_products) == model.exact_products(machine, layer, 1)
    assert model.clustered(machine, layer, 1) == model.clustered_products(machine, layer, 1)


def test_time_beyond_the_products_does_not_grow_with_the_length_for_summaries_alone(model: ModuleType):
    machine = model.Machine()
    short, long = model.Layer(10**6), model.Layer(10**7)

    def sending(way, products, layer) -> float:
        return way(machine, layer, 8) - products(machine, layer, 8)

    for way, products in (
        (model.clustered, model.clustered_products),
        (model.linear, model.linear_products),
    ):
        assert sending(way, products, long) == pytest.approx(sending(way, products, short))
    assert model.exchange_of_heads(machine, long, 8) > 9 * model.exchange_of_heads(machine, short, 8)


def test_what_is_combined_by_shares_does_not_grow_with_the_ranks(model: ModuleType):
    machine, layer = model.Machine(start=0.0), model.Layer(10**6)

    def sending(way, products, ranks) -> float:
        return way(machine, layer, ranks) - products(machine, layer, ranks)

    for way, products in (
        (model.clustered, model.clustered_products),
        (model.linear, model.linear_products),
    ):
        assert sending(way, products, 512) < 1.4 * sending(way, products, 32)  # at most 2 · 1, after 2 · 3/4


def test_a_ring_hides_what_it_sends_where_there_is_enough_to_compute(model: ModuleType):
    machine = model.Machine()
    assert model.ring(machine, model.Layer(10**8), 512) == model.exact_products(machine, model.Layer(10**8), 512)
    assert model.ring(machine, model.Layer(10**6), 512) > model.exact_products(machine, model.Layer(10**6), 512)


def test_heads_need_no_more_gpus_than_heads(model: ModuleType):
    assert model.exchange_of_heads(model.Machine(), model.Layer(10**6), 33) is None
    (row,) = model.rows(model.Machine(), [10**6], [64])
    ways = dict(zip(model.WAYS, row[2:], strict=True))
    assert ways["full, heads"] == "–"
    assert ways["full, ring"].startswith("**")


def test_the_table_of_the_design_page_is_what_the_script_prints(model: ModuleType):
    page = (ROOT / "docs" / "design" / "parallel.md").read_text("utf-8")
    for row in model.rows(model.Machine(), [10**6, 10**7], [8, 32, 128, 512]):
        assert f"| {' | '.join(row)} |" in page
