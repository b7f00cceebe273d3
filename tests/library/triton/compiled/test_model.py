"""Tests of what the cost model and the table of resources record: real launches of whole methods."""

import importlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad.kernels.triton.recording import OtherCall, recording
from subquad.kernels.triton.resources import CHIPS, Resources, compile_for
from subquad.kernels.triton.tiles import FIXED, MEASURED, TABLE, Tiles, candidates, entry, overridden, tiles_of
from subquad.tools.measure import gpu_model as model
from subquad.tools.measure.gpu_model import GpuLoad, launches_of, record
from tests.library.triton.compiled.fits import distinct, meta

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """One of the benchmarks, as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def others_of(call):
    others: list[OtherCall] = []
    with recording(others):
        call()
    return others


@pytest.mark.parametrize("name", ["clustered", "i-clustered", "clustered-tail"])
def test_both_passes_of_a_method_are_recorded(name):
    found = record(sq.parse_method(name), GpuLoad(1024))
    ours = [[step for step in steps if step.programs is not None] for steps in (found.forward, found.backward)]
    assert all(sum(step.products for step in steps) > 10**8 for steps in ours)
    assert not {step.name for step in ours[0]} & {"members_to_queries"}
    assert "members_to_queries" in {step.name for step in ours[1]}
    assert ("list_row" in {step.name for step in found.forward if step.operations}) == (name != "clustered")


def test_the_work_of_a_method_grows_with_its_length():
    short, long = (record(sq.parse_method("i-clustered"), GpuLoad(length)) for length in (4096, 16384))
    work = [sum(step.products for step in found.forward) for found in (short, long)]
    assert work[1] / work[0] == pytest.approx(4, rel=0.2)


def test_a_method_with_parameters_and_one_without_kernels():
    found = record(sq.parse_method("linformer:k=16"), GpuLoad(256))
    assert {step.kind for step in found.forward if step.name == "bmm"} <= {"16 bits", "fp32"}
    assert sum(step.products for step in found.forward) > 0


def test_kernels_that_multiply_fp32_whatever_comes_in():
    """The model has a list of them: each of these products is in TF32, and no other kernel's is."""
    with recording() as launches:
        sq.attention(*(meta(1, 32, 1024, 64) for _ in range(3)), method="clustered-tail")
    in_tf32 = set()
    for launch in distinct(launches):
        if launch.cost.products and "tf32" in compile_for(launch, CHIPS["sm_90"]).kinds:
            in_tf32.add(launch.name)
    assert in_tf32 == set(model.FP32_KERNELS)


def test_calls_of_torch_move_what_they_read_and_write_once():
    x = meta(8, 16, dtype=torch.float32)
    assert others_of(lambda: x + x) == [OtherCall("add", 128, 4 * 128 * 2)]
    assert others_of(lambda: x.zero_()) == [OtherCall("zero_", 128, 4 * 128)]
    assert others_of(lambda: x.new_zeros(3)) == [OtherCall("new_zeros", 3, 12)]
    expanded = meta(8, 1, dtype=torch.float32).expand(8, 16)
    assert others_of(lambda: expanded.exp()) == [OtherCall("exp", 128, 4 * (8 + 128))]


def test_products_of_torch_are_counted():
    a, b = meta(2, 3, 5), meta(2, 5, 7)
    (call,) = others_of(lambda: torch.bmm(a, b))
    assert (call.products, call.upcast) == (2 * 3 * 5 * 7, False)
    (call,) = others_of(lambda: torch.mm(a[0].float(), b[0].float()))[-1:]
    assert (call.products, call.upcast) == (3 * 5 * 7, True)


def test_views_and_empty_tensors_are_nothing():
    x = meta(8, 16)
    assert others_of(lambda: (x[:, 2:].transpose(0, 1).view(14, 8), torch.empty_like(x), x.new_empty(3))) == []


# ---------------------------------------------------------------------- tiles


def test_candidates_are_those_in_use_and_their_neighbours():
    own, *others = candidates("members_forward", torch.bfloat16, 100)
    assert own == tiles_of("members_forward", torch.bfloat16, 128) == TABLE["members_forward"][2][1]
    assert 3 <= len(others) <= 8
    for tiles in others:
        assert sum(a != b for a, b in zip(tiles, own, strict=True)) == 1
        assert min(tiles.rows, tiles.keys) >= 16


def test_tiles_can_be_others_inside_a_block():
    usual, others = tiles_of("cells_forward", torch.bfloat16, 64), Tiles(16, 16, 2, 3)
    with overridden("cells_forward", torch.bfloat16, 64, others):
        assert tiles_of("cells_forward", torch.bfloat16, 50) == others
        assert tiles_of("cells_forward", torch.bfloat16, 128) != others
        assert tiles_of("cells_forward", torch.float32, 64) != others
        assert tiles_of("cells_to_keys", torch.bfloat16, 64) != others
    assert tiles_of("cells_forward", torch.bfloat16, 64) == usual


def test_other_tiles_are_those_of_all_threads():
    others = Tiles(16, 16, 2, 3)
    with overridden("cells_forward", torch.bfloat16, 64, others), ThreadPoolExecutor() as pool:
        assert pool.submit(tiles_of, "cells_forward", torch.bfloat16, 64).result() == others


def test_tiles_of_the_architecture_go_before_the_table(monkeypatch):
    own = Tiles(32, 16, 2, 3)
    monkeypatch.setattr("subquad.kernels.triton.tiles.gpu_architecture", lambda: "sm_90")
    monkeypatch.setitem(MEASURED, "sm_90", {entry("cells_forward", torch.bfloat16, 64): own})
    assert tiles_of("cells_forward", torch.bfloat16, 64) == own
    assert candidates("cells_forward", torch.bfloat16, 64)[0] == own
    assert tiles_of("cells_forward", torch.bfloat16, 128) == TABLE["cells_forward"][2][1]
    monkeypatch.setattr("subquad.kernels.triton.tiles.gpu_architecture", lambda: "sm_80")
    assert tiles_of("cells_forward", torch.bfloat16, 64) == TABLE["cells_forward"][2][0]


def test_the_fastest_candidate_is_found(monkeypatch):
    from subquad.tools.bench import gpu_tiles
    from subquad.tools.bench.calls import Load as BenchLoad

    class Timer:
        """The kernel's time is the rows of its tiles; eight warps are too many."""

        def kernels(self, call):
            tiles = tiles_of("members_forward", torch.bfloat16, 64)
            if tiles.warps == 8:
                raise RuntimeError("out of resource")
            return {"members_forward": float(tiles.rows), "not in the table": 9.0}

    monkeypatch.setattr(gpu_tiles, "METHODS", (("i-clustered:clusters=4,topk=3", False),))
    load = BenchLoad(32, "bfloat16", "forward+backward", 1, 2, 64, "cpu", 0)
    tried = gpu_tiles.try_tiles(load, Timer(), lambda: True, lambda *of: None)
    assert [each.tiles for each in tried] == [tuple(t) for t in candidates("members_forward", torch.bfloat16, 64)]
    (best,) = gpu_tiles.fastest(tried)
    assert best.ms == min(each.tiles[0] for each in tried)
    assert {each.reason for each in tried if each.tiles[2] == 8} == {"out of resource"}
    assert gpu_tiles.try_tiles(load, Timer(), lambda: False, lambda *of: None) == []


@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_tiles_whose_results_are_not_numbers_are_no_candidates(monkeypatch, wrong):
    from subquad.tools.bench import gpu_tiles
    from subquad.tools.bench.calls import Calls
    from subquad.tools.bench.calls import Load as BenchLoad

    class Timer:
        def kernels(self, call):
            return {"members_forward": 1.0}

    class WrongOnce(Calls):
        calls = 0

        def call_of(self, method):
            right = super().call_of(method)

            def call():
                self.calls += 1
                out = right()
                if self.calls == 2:
                    spoiled = out if wrong == "output" else self.inputs[1].grad
                    spoiled.detach().fill_(torch.nan)
                return out

            return call

    monkeypatch.setattr(gpu_tiles, "Calls", WrongOnce)
    monkeypatch.setattr(gpu_tiles, "METHODS", (("linear", False),))
    load = BenchLoad(32, "bfloat16", "forward+backward", 1, 2, 64, "cpu", 0)
    tried = gpu_tiles.try_tiles(load, Timer(), lambda: True, lambda *of: None)
    assert [each.reason for each in tried] == [None, "its results differ", *[None] * (len(tried) - 2)]


def test_methods_whose_tiles_are_tried_launch_every_kernel_of_the_table():
    from subquad.tools.bench.gpu_tiles import METHODS

    found = {x.name for method, causal in METHODS for x in launches_of(sq.parse_method(method), GpuLoad(256), causal)}
    assert set(TABLE) <= found


def test_a_kernel_that_cannot_choose_its_rows_has_no_candidates_for_them():
    assert {tiles.rows for tiles in candidates("chunk_slopes", torch.bfloat16, 64)} == {FIXED}


def test_a_method_that_does_not_run_has_no_tiles(monkeypatch):
    from subquad.tools.bench import gpu_tiles
    from subquad.tools.bench.calls import Load as BenchLoad

    class Timer:
        """Nothing runs."""

        def kernels(self, call):
            raise RuntimeError("an illegal\naccess")

    load = BenchLoad(32, "bfloat16", "forward", 1, 2, 64, "cpu", 0)
    tried = gpu_tiles.try_tiles(load, Timer(), lambda: True, lambda *of: None)
    assert [(each.kernel, each.ms, each.reason) for each in tried] == [
        (f"all of {method}", None, "an illegal access") for method, _ in gpu_tiles.METHODS
    ]
    assert gpu_tiles.fastest(tried) == []


# ---------------------------------------------------------------------- scripts


def test_the_page_of_the_model(script, run_script, tmp_path, capsys):
    page = tmp_path / "page.md"
    words = ["--lengths", "1024 4096", "--widths", "64", "--methods", "i-clustered clustered-tail local:window=5"]
    run_script(script("gpu_model"), *words, "--out", str(page))
    text = page.read_text("utf-8")
    assert text == capsys.readouterr().out.removesuffix("\n")
    assert "| i-clustered, 4,096 | 1.3× |" in text
    assert "4,096 tokens: 91 clusters, 182 keys" in text
    assert text.count("### ") == 8  # GPUs and passes
    assert "`python benchmarks/gpu_model.py --lengths '1024 4096' --widths 64 --methods" in text


def test_the_page_of_the_resources(script, run_script, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    words = ["--lengths", "1024 4096", "--widths", "64", "--methods", "clustered", "--chips", "sm_80"]
    module = script("gpu_resources")
    made = Resources(registers=100, spills=0, stack=0, shared=2048, threads=128, products=3)
    spilled = replace(made, spills=8)
    of = {"members_to_queries": spilled}
    monkeypatch.setattr(module, "compile_for", lambda launch, chip: of.get(launch.name, made))
    run_script(module, *words, "--out", str(page))
    text = page.read_text("utf-8")
    assert "| `members_sums` | bf16 D=64 | 1 | 100 · 2 · 4 · 3 |" in text
    assert "| `members_to_queries` | bf16 D=64 | 1 | 100 · 2 · 4 · 3 · **8 B spilled** |" in text
    assert (
        "`python benchmarks/gpu_resources.py --lengths '1024 4096' --widths 64 --methods clustered --chips sm_80"
        in text
    )
    assert "compiled for sm_80; 2 of these" in text
