"""The main job, end to end on tiny models."""

import copy
import json
import math
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import subquad as sq
from subquad.core.errors import InputError
from subquad.tools.cli.commands import command_line
from subquad.tools.compare.attachment import chosen_by_comparison, methods_by_layer
from subquad.tools.compare.compare_jobs import OP, SEQUENCE
from subquad.tools.compare.comparison import Comparison
from subquad.tools.compare.page import html
from subquad.tools.compare.printed import markdown, rich_table
from subquad.tools.compare.run import measure, prepare
from subquad.tools.compare.schema import Attachment
from subquad.tools.compare.settings import CompareSettings
from subquad.tools.compare.tables import legend, main_table, op_table, use
from subquad.tools.compare.write import write_report
from subquad.tools.measure.noise import AGAIN
from subquad.tools.models import saving
from subquad.tools.models.saved_card import Measured
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.runs.machine import Use
from tests.tools.report import sample
from tests.tools.workflows.reports import read_anew, report_of

pytestmark = pytest.mark.usefixtures("undisturbed")

PLAN = partial(command_line, "plan")
METHODS = (
    "clustered:clusters=4",
    "i-clustered:clusters=4,topk=4",
    "i-clustered:clusters=4,topk=200",
    "oracle-top:topk=2",
)


@pytest.fixture(scope="module")
def settings(model, text):
    def make(name, **changed):
        small = CompareSettings(
            model=model(name),
            text=(text,),
            methods=METHODS,
            lengths=(48, 96),
            op_lengths=(32, 64),
            passages=6,
            dtype="fp32",
            layers=True,
        )
        return replace(small, **changed)

    return make


@pytest.fixture(scope="module")
def measured(settings, tmp_path_factory):
    """A comparison with these settings, which is measured once."""
    kept = {}

    def make(name, **changed):
        given = settings(name, **changed)
        if given not in kept:
            kept[given] = measure(given, tmp_path_factory.mktemp("compare"))
        return replace(kept[given], results=copy.deepcopy(kept[given].results))

    return make


def by_method(report):
    return {method["method"]: method for method in report["methods"]}


def test_embedding_model(measured):
    report = report_of(measured("bert"))
    rows = by_method(report)
    assert list(rows) == ["full", *METHODS]
    assert rows["full"]["status"] == "exact"
    for row in rows.values():
        assert set(row["model"]) == set(row["quality"]) == {"48", "96"}
        assert set(row["op"]) == {"32", "64"}
        assert all(cost["ms"] > 0 and cost["speedup"] > 0 for cost in row["model"].values())
        assert row["model"]["96"]["extra_mib"] > 0
    exact, everything = rows["full"]["quality"]["48"], rows["i-clustered:clusters=4,topk=200"]["quality"]["48"]
    for figures in (exact, everything):
        assert figures["cosine_mean"] == pytest.approx(1.0, abs=1e-5)
        assert figures["top1"] == figures["recall10"] == 1.0
    assert everything["weights_l1"] == pytest.approx(0.0, abs=1e-4)
    rough, better = (rows[name]["quality"]["48"] for name in METHODS[:2])
    assert 0 < better["weights_l1"] <= rough["weights_l1"] <= 2  # proposition 2
    assert set(rough["layer_error"]) == {"0", "1"}
    assert min(rough["layer_error"].values()) > 1e-3
    assert rough["cosine_mean"] < everything["cosine_mean"]
    assert rows[METHODS[0]]["model"]["48"]["repeats"] == 9
    assert rows["full"]["model"]["48"]["speedup"] == 1.0


def test_the_report_is_complete_and_serialisable(measured, tmp_path):
    report = report_of(measured("bert", seed=3))
    assert json.loads(json.dumps(report)) == report
    assert report["settings"]["seed"] == 3
    assert report["versions"]["torch"]
    assert report["hardware"]["cores"]
    assert report["model"]["position_limit"] == 64
    assert report["text"]["documents"] == 12
    assert report["recommendation"]["headline"]
    assert "--lengths 48,96" in report["command"]
    names = {path.name for path in write_report(sample.record(report), tmp_path)}
    assert {"report.json", "report.md", "report.html"} <= names
    assert any("For retrieval, do not embed longer inputs whole" in note for note in report["notes"])


@pytest.mark.parametrize(("longest", "model_lengths", "call_lengths"), [
    (None, [64, 2048, 4096], (512, 1024, 2048, 4096, 8192, 16384)),
    (48, [48], (48,)),
    (1024, [64], (512, 1024)),
    (2048, [64, 2048], (512, 1024, 2048)),
])  # fmt: skip
def test_nothing_longer_than_the_maximum_length_is_measured(longest, model_lengths, call_lengths, settings):
    """The model has 64 positions."""
    asked = settings("bert", max_length=longest, lengths=None, op_lengths=None)
    prepared = prepare(asked)
    assert (prepared.lengths, asked.call_lengths) == (model_lengths, call_lengths)


@pytest.mark.parametrize(("longest", "lengths"), [
    (None, [512, 2048, 4096]),
    (1024, [512]),
    (4096, [512, 2048, 4096]),
])  # fmt: skip
def test_the_maximum_length_does_not_move_the_main_one_of_an_encoder_with_long_positions(
    settings, model, tmp_path, longest, lengths
):
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    config = AutoConfig.from_pretrained(model("bert"), max_position_embeddings=8192)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model("bert")).save_pretrained(tmp_path)
    asked = settings("bert", model=str(tmp_path), max_length=longest, lengths=None, op_lengths=None)
    assert prepare(asked).lengths == lengths


def test_lengths_that_exceed_the_maximum_are_named(measured, settings, tmp_path):
    done = measure(settings("bert", max_length=48, lengths=None, op_lengths=None, methods=METHODS[:1]), tmp_path)
    report = report_of(done)
    note = "Not measured, because they exceed --max-length 48: 512, 1,024, 2,048, 4,096, 8,192, 16,384 tokens."
    assert note in report["notes"]
    assert all(list(row["model"]) == list(row["op"]) == ["48"] for row in report["methods"])
    assert not any("Not measured" in note for note in report_of(measured("bert"))["notes"])


def test_masked_language_model_gets_pseudo_perplexity(measured):
    rows = by_method(report_of(measured("masked")))
    exact, rough = rows["full"]["quality"]["48"], rows["clustered:clusters=4"]["quality"]["48"]
    assert exact["perplexity"] > 1
    assert rough["perplexity"] != exact["perplexity"]
    assert rows["clustered:clusters=4"]["fidelity"]["96"] <= 1.0
    assert "cosine_mean" not in exact


@pytest.fixture(scope="module")
def overflowing(model, tmp_path_factory):
    """The folder of a tiny model whose activations are too large for fp16, by name."""
    from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

    def make(name):
        folder = tmp_path_factory.mktemp("overflowing")
        kind = AutoModelForMaskedLM if name == "masked" else AutoModel
        loaded = kind.from_pretrained(model(name))
        layer = (loaded.bert if name == "masked" else loaded).encoder.layer[0]
        layer.intermediate.dense.weight.data.mul_(400.0)
        layer.output.dense.weight.data.mul_(50.0)
        loaded.save_pretrained(folder)
        AutoTokenizer.from_pretrained(model(name)).save_pretrained(folder)
        return str(folder)

    return make


SHORT = {"methods": METHODS[:1], "lengths": (48,), "op_lengths": (32,), "layers": False}


@pytest.mark.parametrize("name", ["masked", "bert"])
def test_a_row_whose_outputs_overflow_has_no_fidelity(settings, overflowing, tmp_path, monkeypatch, name):
    monkeypatch.setattr("subquad.tools.compare.recommend.is_faster", lambda method, length: True)
    asked = settings("bert", model=overflowing(name), dtype="fp16", **SHORT)
    report = report_of(measure(asked, tmp_path))
    rows = by_method(report)
    assert rows["full"]["fidelity"] == {"48": pytest.approx(1.0)}
    for row in list(rows.values())[1:]:
        assert row["fidelity"] == {}
        assert row["remarks"][0] == "its outputs are NaN or infinite at 48 tokens"
    assert report["recommendation"]["choice"] == "full"
    assert "Of the settings tried, use" not in report["recommendation"]["headline"]
    assert write_report(sample.record(report), tmp_path / "shown")


@pytest.mark.parametrize("task", ["labelled", "sts", "retrieval"])
def test_a_row_whose_embeddings_overflow_has_no_score_and_ends_nothing(settings, overflowing, tmp_path, task):
    words = ["key value query", "head layer model", "token reads keeps", "cluster of softmax"]
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text("text,label\n" + "".join(f"{w},{i % 2}\n" for i, w in enumerate(words)))
    (tmp_path / "sts.tsv").write_text("".join(f"{w}\t{words[0]}\t{i}\n" for i, w in enumerate(words)))
    lines = [json.dumps({"question": word, "passage": word}) for word in words]
    (tmp_path / "retrieval.jsonl").write_text("\n".join(lines))
    asked = settings("bert", model=overflowing("bert"), dtype="fp16", task=task, data_dir=tmp_path, **SHORT)
    rows = by_method(report_of(measure(asked, tmp_path / "out")))
    assert not any(map(math.isnan, rows["full"]["task"].values()))
    for row in list(rows.values())[1:]:
        assert row["task"].keys() == rows["full"]["task"].keys()
        assert all(map(math.isnan, row["task"].values()))


def test_a_causal_language_model_is_judged_by_its_next_tokens(measured):
    halves = "clustered:clusters=4,block=16,last=4"
    report = report_of(measured("gpt2", methods=(halves, "smyrf:clusters=4", "clustered:clusters=4")))
    rows = by_method(report)
    assert [rows[name]["status"] for name in (halves, "smyrf:clusters=4")] == ["measured", "refused"]
    assert "not causal" in rows["smyrf:clusters=4"]["reason"]
    assert rows["smyrf:clusters=4"]["reason"].endswith("such as 'clustered-tail' for long prompts, or 'local'")
    for length, exact in rows["full"]["quality"].items():
        other = rows[halves]["quality"][length]
        assert exact["kl"] == exact["kl_last_quarter"] == 0
        assert exact["agreement"] == exact["agreement_last_quarter"] == 1
        assert exact["perplexity"] > 1
        assert 0 < other["kl"] < 1
        assert 0 <= other["agreement"] <= 1
        assert rows[halves]["fidelity"][length] == math.exp(-other["kl"])
    assert report["settings"]["floor"] == {"figure": "kl", "bound": 0.002}
    assert report["recommendation"]["choice"] == "full"  # one block of 1,024 tokens is exact attention
    assert "Stay with exact attention" in report["recommendation"]["headline"]
    extended = " ".join(report["cautions"])
    assert "are interpolated without training" in extended
    assert "For retrieval" not in extended  # it is no model of embeddings


def test_the_floor_of_a_causal_language_model_may_be_its_top_tokens(measured):
    halves = "clustered:clusters=4,block=16,last=4"
    done = measured("gpt2", methods=(halves,), min_agreement=0.25)
    report = report_of(done)
    row = by_method(report)[halves]
    assert row["fidelity"]["48"] == row["quality"]["48"]["agreement"]
    assert report["settings"]["min_fidelity"] == 0.25
    anew = read_anew(report, replace(done.settings, min_agreement=None, max_kl=0.1))
    assert by_method(anew)[halves]["fidelity"]["48"] == math.exp(-row["quality"]["48"]["kl"])


@pytest.mark.parametrize(("name", "options", "message"), [
    ("gpt2", {"min_fidelity": 0.9}, "--min-fidelity does not fit: the model is a causal language model; give --max-kl"),
    ("bert", {"max_kl": 0.1}, "--max-kl does not fit: the model is not a causal language model; give --min-fidelity"),
    ("gpt2", {"max_kl": 0.1, "min_agreement": 0.9}, "--max-kl and --min-agreement are both given; give one of them"),
    ("gpt2", {"max_kl": -1.0}, "max-kl -1 must be above 0"),
    ("gpt2", {"min_agreement": 2.0}, "min-agreement 2 must be above 0 and at most 1"),
])  # fmt: skip
def test_a_floor_of_another_kind_of_model_is_one_line(settings, name, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        prepare(settings(name, **options))


def test_layers_that_cannot_run_a_method_stay_exact(measured):
    rows = by_method(report_of(measured("modernbert", lengths=(48,))))
    clustered = rows["clustered:clusters=4"]
    assert clustered["layers"] == [0]
    assert "layers 1, 2 stay exact" in clustered["reason"]
    assert set(clustered["quality"]["48"]["layer_error"]) == {"0"}


# ---------------------------------------------------------------------- noise


@pytest.fixture
def made_up(measured):
    """The report of a comparison, with these seconds of exact attention, of each method, and of exact attention again.

    They are a function of the round; the others' use of the processors is `others` seconds of each second and core.
    """

    def make(exact, of_methods, again, others=0.0, **changed):
        done = measured("bert", **changed)
        stretched = [(done.results[SEQUENCE(n, i)], i) for n in done.lengths for i in range(done.sequence_count(n))]
        for unit, i in [*stretched, *((done.results[OP(n)], None) for n in done.settings.op_lengths)]:
            unit.use = Use(10.0, 10.0 * others * os.cpu_count())
            if i == 0:
                continue  # it warms up
            for name, row in unit.rows.items():
                seconds = {"full": exact, AGAIN: again}.get(name, of_methods)
                row.seconds = list(map(seconds, range(9))) if i is None else seconds(i)
        return report_of(done, PLAN)

    return make


def test_a_tie_is_no_gain_anywhere_in_the_report(made_up):
    """`shared-full` was "faster from 1,500" once: 1 % of difference, where exact attention differs by 3 % itself."""
    report = made_up(
        lambda i: 1.0, lambda i: 0.99, lambda i: 0.97, methods=("shared-full", "local:window=8"), min_fidelity=0.01
    )
    for name in ("shared-full", "local:window=8"):
        row = by_method(report)[name]
        assert row["crossover"] is None
        for part in ("model", "op"):
            assert {figures["verdict"] for figures in row[part].values()} == {"within the noise"}
            assert all(1.03 < factor < 1.04 for factor in report["noise"][part].values())
    assert report["recommendation"]["choice"] == "full"
    assert "(within the noise)" in report["recommendation"]["reasons"][0]
    page = html(sample.record(report), {})
    table = page[page.index("<table") : page.index("Notes</h2>")]
    assert 'class="faster"' not in table
    assert "≈1.01×" in table
    assert "none" in {line.cells[0].text for line in op_table(sample.record(report)).lines}


def test_a_gain_beyond_the_noise_is_one(made_up):
    report = made_up(lambda i: 1.0, lambda i: 0.5, lambda i: 0.97, methods=("local:window=8",), min_fidelity=0.01)
    row = by_method(report)["local:window=8"]
    assert {figures["verdict"] for part in ("model", "op") for figures in row[part].values()} == {"faster"}
    assert row["crossover"] == 32
    assert report["recommendation"]["choice"] == "local:window=8"


def test_time_and_speedup_of_a_row_cannot_contradict_each_other(made_up):
    """Every other round is slow for exact attention alone: by medians of their own the methods would be faster."""
    report = made_up(lambda i: 9.0 if i % 2 else 0.9, lambda i: 10.0 if i % 3 == 0 else 1.0, lambda i: 1.0)
    rows = by_method(report)
    for part in ("model", "op"):
        for length, exact in rows["full"][part].items():
            for name in METHODS:
                figures = rows[name][part][length]
                assert exact["ms"] / figures["ms"] == pytest.approx(figures["speedup"])


@pytest.mark.parametrize(("others", "busy"), [(0.02, False), (0.7, True)])
def test_a_busy_machine_is_measured_and_said(made_up, others, busy):
    report = made_up(lambda i: 1.0, lambda i: 0.5, lambda i: 1.0, others=others, methods=METHODS[:1])
    assert report["noise"]["busy"] is busy
    assert report["noise"]["load"]["others"] == pytest.approx(others)
    assert report["recommendation"].get("warning", "").startswith("The machine was busy") is busy
    for text in (markdown(sample.record(report)), html(sample.record(report), {})):
        assert ("Repeat the command on an idle machine" in text) is busy
        assert (
            f"other processes used {'70' if busy else '2.0'} % of the processors&#39; time".replace(
                "&#39;", "'" if text.startswith("#") else "&#39;"
            )
            in text
        )


@pytest.mark.parametrize("name", ["bert", "masked"])
def test_fidelity_is_measured_at_every_length_that_has_a_speed(measured, name):
    report = report_of(measured(name))
    for row in report["methods"]:
        assert set(row["fidelity"]) == set(row["model"]) == {"48", "96"}
        assert all(0 <= fidelity <= 1 + 1e-9 for fidelity in row["fidelity"].values())
    assert report["settings"]["sequences"] == {"96": 10}
    assert "over 6 passages at 48, 10 sequences at 96" in legend(sample.record(report))
    assert 0 < by_method(report)["oracle-top:topk=2"]["fidelity"]["96"] < 1


def test_the_order_of_the_rows_changes_from_turn_to_turn(measured):
    done = measured("bert")
    orders = [list(done.results[SEQUENCE(48, i)].rows) for i in range(1, 10)]
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(["full", AGAIN, *METHODS]))}
    assert len({tuple(order) for order in orders}) > 5
    assert len({order.index("full") for order in orders}) > 2


def test_methods_are_counted_rather_than_called_all(measured):
    report = report_of(measured("bert"))
    tried = f"4 of the library's {len(sq.list_methods())} methods are in this comparison, with these settings only"
    assert any(note.startswith(tried) for note in report["notes"])
    assert "all methods" not in json.dumps(report).lower()


def test_the_next_command_plans_for_the_same_model_and_text(measured, text):
    comparison = measured("bert")
    model = comparison.settings.model
    shown = f"subquad plan {model} --text {text} --lengths 48,96 --dtype fp32"
    assert report_of(comparison, PLAN)["recommendation"]["next"] == shown
    given = {"min_fidelity": 0.9, "column": "body", "adapters": (Path("my adapter"),)}
    comparison.settings = replace(comparison.settings, **given)
    report = report_of(comparison, PLAN)
    shown = (
        f"subquad plan {model} --text {text} --column body --min-fidelity 0.9 --lengths 48,96 --adapter 'my adapter' "
        "--dtype fp32"
    )
    assert report["recommendation"]["next"] == shown
    assert shown in markdown(sample.record(report))
    terminal = Console(file=StringIO(), width=1000)
    terminal.print(rich_table(sample.record(report)))
    assert shown in terminal.file.getvalue()


def test_there_is_no_next_command_for_lengths_of_which_the_text_has_too_few_passages(measured):
    comparison = measured("bert")
    comparison.reading = replace(comparison.reading, tokens=comparison.reading.tokens[: 5 * 96 - 1])
    assert "--lengths 48" in report_of(comparison, PLAN)["recommendation"]["next"].split(" --text ")[1]
    assert "96" not in report_of(comparison, PLAN)["recommendation"]["next"].rpartition("--lengths")[2]
    comparison.reading = replace(comparison.reading, tokens=comparison.reading.tokens[: 5 * 48 - 1])
    assert "next" not in report_of(comparison, PLAN)["recommendation"]


class Stop(Exception):
    """The user pulls the plug."""


def test_an_interrupted_run_resumes(settings, tmp_path, monkeypatch):
    def stop_at_the_stretches(what, done, total):
        if what.startswith("timing the model with each method at 96 tokens, turn 1"):
            raise Stop

    with pytest.raises(Stop):
        measure(settings("bert"), tmp_path, stop_at_the_stretches)
    assert not (tmp_path / "report.json").exists()
    monkeypatch.setattr(Comparison, "quality", lambda *_: pytest.fail("done before"))
    comparison = measure(settings("bert"), tmp_path)
    assert comparison.resumed == 5 + 2  # what was read, and the first two batches at the model's own length
    assert any("interrupted run" in note for note in report_of(comparison)["notes"])


def test_the_report_is_there_after_each_length_and_layers_come_last(settings, tmp_path):
    reports, under_way = [], []
    asked = settings("gpt2", methods=("clustered:clusters=4,block=16,last=4",), lengths=(48, 64))

    def refresh(unfinished):
        reports.append(report_of(unfinished))

    comparison = measure(asked, tmp_path, lambda what, *_: under_way.append(what), refresh=refresh)
    assert [list(by_method(each)["full"]["model"]) for each in reports] == [["48"], ["48", "64"]]
    for each in reports:
        assert each["notes"][0].startswith("Unfinished: a run that goes on writes")
        assert all(not row["op"] and "layer_error" not in row["quality"]["48"] for row in each["methods"])
        assert write_report(sample.record(each), tmp_path / "shown")
    kinds = [what.partition(" ")[0] for what in under_way if what not in ("loading", "done")]
    assert kinds[0] == "timing"
    assert kinds[-1] == "errors"
    assert "errors" not in kinds[: len(kinds) - kinds[::-1].index("eager")]
    whole = report_of(comparison)
    assert not any("Unfinished" in note for note in whole["notes"])
    assert all(row["quality"]["48"]["layer_error"] for row in whole["methods"] if row["status"] == "measured")


def test_errors_of_single_layers_are_measured_on_request(settings, measured, tmp_path):
    short = {"methods": ("local:window=4",), "lengths": (48,), "op_lengths": (32,)}
    for layers in (False, True):
        report = report_of(measure(settings("gpt2", layers=layers, **short), tmp_path / str(layers)))
        assert ("layer_error" in by_method(report)["local:window=4"]["quality"]["48"]) == layers
        assert any(note.startswith("Layer errors") for note in report["notes"]) == layers


def test_a_time_limit_leaves_out_what_is_predicted_to_exceed_it(settings, tmp_path):
    """Two batches at the model's own length run in any case."""
    asked = settings("bert", minutes=1e-4, layers=False)
    done = measure(asked, tmp_path)
    report = report_of(done)
    assert set(done.results._by_key) == {"stretch/48/0", "stretch/48/1"}
    row = by_method(report)["clustered:clusters=4"]
    assert list(row["model"]) == ["48"]
    assert 0 < row["fidelity"]["48"] < 1
    assert row["op"] == {}
    assert report["notes"][0] == (
        "Left out for lack of time (--minutes 0.0001): 8 of 10 batches of 48 tokens; 10 of 10 batches of 96 tokens; "
        "6 passages; eager attention at 48 and 96 tokens; one attention call at 32 and 64 tokens."
    )
    assert write_report(sample.record(report), tmp_path / "shown")
    terminal = Console(file=StringIO(), width=1000)
    terminal.print(rich_table(sample.record(report)))
    assert report["notes"][0] in terminal.file.getvalue()
    more = report_of(measure(replace(asked, minutes=5.0), tmp_path))
    assert not any(note.startswith("Left out for") for note in more["notes"])
    assert [note.partition(" tokens")[0] for note in more["cautions"]] == ["The model's positions reach 64"]


def test_a_length_has_its_figures_if_there_was_no_time_for_its_first_turns(settings, tmp_path, monkeypatch):
    has_time, late = Comparison.has_time, {SEQUENCE(96, i) for i in range(2)}
    monkeypatch.setattr(Comparison, "has_time", lambda self, key: key not in late and has_time(self, key))
    done = measure(settings("bert", layers=False, minutes=60.0), tmp_path)
    report = report_of(done)
    assert report["settings"]["lengths"] == [48, 96]
    assert "2 of 10 batches of 96 tokens" in report["notes"][0]
    assert "96" in report["without_attention"]
    for row in report["methods"]:
        assert row["model"]["96"]["repeats"] == 7
        assert row["model"]["96"]["extra_mib"] > 0
    assert not any(has_time(done, key) for key in late)  # a resumed run must not warm up after the turns that count
    done.results._by_key.pop(SEQUENCE(96, 2))  # as if it was lost: then an earlier one has to warm up
    assert all(has_time(done, key) for key in late)


def test_a_batch_has_the_lengths_of_the_text(settings, tmp_path):
    report = report_of(measure(settings("bert", batch=4, methods=METHODS[:1], op_lengths=(32,)), tmp_path))
    counted = report["settings"]["batch_tokens"]
    assert 0 < counted["48"] <= 4 * 48 < counted["96"] < 4 * 96
    assert report["settings"]["sequences"] == {"96": 40}
    alone = report_of(measure(settings("bert", methods=METHODS[:1], op_lengths=(32,)), tmp_path / "alone"))
    memory = [by_method(each)["full"]["model"]["96"]["extra_mib"] for each in (alone, report)]
    assert memory[1] > 2 * memory[0]
    assert any("batches of 4 padded texts" in note for note in report["notes"])
    means = {n: counted[n] / 4 for n in ("48", "96")}
    groups = {column.group for column in main_table(sample.record(report)).columns}
    assert {f"{n} (mean {mean:,.0f})" for n, mean in means.items()} <= groups
    assert f"Batches of 4 texts, padded; their mean number of tokens is {means['48']:,.0f} at 48" in legend(
        sample.record(report)
    )
    assert {"48", "96"} <= {column.group for column in main_table(sample.record(alone)).columns}
    pages = [html(sample.record(each), {}) for each in (alone, report)]
    assert ["One sequence at a time" in page for page in pages] == [True, False]
    assert "4 sequences at a time; time and quartiles" in pages[1]


def test_the_model_without_attention_is_the_bottom_of_the_scale(measured):
    for name in ("bert", "llama", "masked"):
        report = report_of(measured(name))
        bottoms = report["without_attention"]
        assert set(bottoms) == {"48", "96"}
        assert "Fidelity of the model without attention: " in legend(sample.record(report))
    assert 0 < report["without_attention"]["48"]["of_exact"] <= 1
    rows = by_method(report_of(measured("bert")))
    assert "without attention" not in rows
    quality = rows["clustered:clusters=4"]["quality"]["48"]
    assert 0 < quality["relative_error"] < 1
    assert quality["relative_error"] == pytest.approx(math.sqrt(2 * (1 - quality["cosine_mean"])), rel=0.5)


def test_a_batch_beyond_the_text_is_refused(settings, tmp_path):
    asked = settings("bert", batch=4000)
    with pytest.raises(InputError, match=r"--batch 4000 is more than the \d+ pieces of at most 48 tokens"):
        measure(asked, tmp_path)


def test_a_length_that_no_text_in_a_batch_has_is_not_run(settings, model, tmp_path):
    """The documents have about 300 tokens: batches of at most 4,096 would be those of at most 512."""
    prepared = prepare(settings("bert", batch=4, lengths=None))
    assert prepared.lengths == [64]
    asked = settings("bert", batch=4, **SHORT | {"lengths": None})
    report = report_of(measure(asked, tmp_path))
    assert report["settings"]["lengths"] == [64]
    note = next(note for note in report["cautions"] if note.startswith("Not run at 2,048 and 4,096 tokens: "))
    assert re.search(r"the longest document has [\d,]+ tokens, and a batch needs 4 pieces", note)
    assert not any("longer sequences repeat it" in note for note in report["notes"])
    assert prepare(settings("bert", lengths=None)).lengths == [64, 2048, 4096]
    with pytest.raises(InputError, match=r"--lengths 4096: .*the longest document has [\d,]+ tokens"):
        prepare(settings("bert", batch=4, lengths=(48, 96, 4096)))


def test_a_batch_of_more_texts_than_a_longer_length_has_is_refused_before_anything_runs(settings):
    """12 documents: they make many pieces of 48 tokens, and 12 of 256 or fewer."""
    with pytest.raises(InputError, match=r"--lengths 280: .* a batch needs 40 pieces; give shorter lengths"):
        prepare(settings("bert", batch=40, lengths=(48, 96, 280)))


def test_eager_attention_takes_more_memory(measured):
    report = report_of(measured("bert"))
    for length, eager in report["eager"].items():
        assert eager["extra_mib"] > by_method(report)["full"]["model"][length]["extra_mib"]
    assert "With eager attention: " in legend(sample.record(report))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), None])
def test_eager_attention_that_runs_out_of_memory_ends_nothing(settings, tmp_path, monkeypatch, error):
    def run(call, device=None):
        if error is not None:
            raise error
        raise RuntimeError("another one")

    monkeypatch.setattr("subquad.tools.compare.comparison.stopwatch", run)
    asked = settings("bert", **SHORT)
    if error is None:
        with pytest.raises(RuntimeError, match="another one"):
            measure(asked, tmp_path)
        return
    comparison = measure(asked, tmp_path)
    report = report_of(comparison)
    assert comparison.is_finished
    assert report["eager"] == {}
    assert "Eager attention ran out of memory at 48 tokens." in report["notes"]
    assert comparison.pretrained.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("changed", "message"), [
    ({"batch": 0}, "--batch 0 must be at least 1"),
    ({"passages": 0}, "--passages 0 must be at least 1"),
    ({"minutes": 0.0}, "--minutes 0 must be above 0 and finite"),
    ({"lengths": (64, 0)}, "--lengths 64,0: a length must be at least 1"),
    (
        {"lengths": (64, 256), "max_length": 64},
        "--lengths 64,256 names more tokens than --max-length 64; give shorter lengths, or leave --max-length out",
    ),
    ({"examples": 5}, "--examples 5 chooses examples of a task, but no --task is given"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(changed, message):
    with pytest.raises(InputError, match=re.escape(message)):
        CompareSettings(**changed)


def test_one_layer_of_a_causal_model_is_timed_up_to_its_positions(settings):
    prepared = prepare(settings("gpt2", lengths=(), op_lengths=None, methods=("local:window=4",)))
    prepared.pretrained = replace(prepared.pretrained, limit=2048)
    assert prepared.call_lengths == [512, 1024, 2048]


@pytest.mark.parametrize(
    "changed", [{"seed": 1}, {"lengths": (40, 96)}, {"methods": METHODS[:1]}, {"op_lengths": (32,)}]
)
def test_results_of_other_settings_are_not_reused(settings, tmp_path, changed):
    first = prepare(settings("bert")).fingerprint()
    assert prepare(settings("bert")).fingerprint() == first
    assert prepare(settings("bert", **changed)).fingerprint() != first


def test_the_model_is_left_as_it_was(measured):
    comparison = measured("bert")
    model = comparison.pretrained.model
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "subquad")
    assert model.embeddings.position_embeddings.num_embeddings == 64


def test_results_for_other_labels_are_not_resumed(settings, tmp_path):
    """The texts are the same."""
    marks = []
    for labels in ((0, 1), (1, 0)):
        for part in ("train", "test"):
            lines = [f"key value {i},{labels[i % 2]}" for i in range(8)]
            (tmp_path / f"{part}.csv").write_text("\n".join(["text,label", *lines]))
        (tmp_path / "sts.tsv").write_text(f"a\tb\t{labels[0]}\na\tc\t{labels[1]}\n")
        asked = (settings("bert", task=task, data_dir=tmp_path) for task in ("labelled", "sts"))
        marks.append([prepare(each).fingerprint()["task"] for each in asked])
    assert all(one != other for one, other in zip(*marks, strict=True))


def test_a_task_adds_its_score(settings, tmp_path):
    data = tmp_path / "banking77"
    data.mkdir()
    for part, rows in (("train", 24), ("test", 8)):
        lines = [f'"{"key value query" if i % 2 else "head layer model"} {i}",{i % 2}' for i in range(rows)]
        (data / f"{part}.csv").write_text("\n".join(["text,category", *lines]))
    report = report_of(measure(settings("bert", task="banking77", data_dir=tmp_path), tmp_path / "out"))
    rows = by_method(report)
    assert rows["full"]["task"]["accuracy"] >= 0.9
    assert rows["full"]["task"]["cosine"] == 1.0
    assert 0 < rows["clustered:clusters=4"]["task"]["cosine"] < 1.0
    assert report["task"]["baselines"]["majority class"] == 0.5
    assert report["task"]["examples"] == 32


@pytest.fixture
def plan(model, tmp_path):
    """A plan for the tiny encoder: another method in each layer."""
    from transformers import AutoModel

    kind = sq.hf.adapters.describe_model(AutoModel.from_pretrained(model("bert")))
    layers = {0: sq.ByLength({0: "full", 60: "clustered:clusters=4"}), 1: sq.Local(window=2)}
    return sq.Plan(kind, (96,), layers, {}).save(tmp_path / "mine")


def test_a_plan_is_a_row_of_its_own(settings, plan, tmp_path):
    given = settings("bert", methods=("local:window=2",), plans=(plan,))
    report = report_of(measure(given, tmp_path / "out"))
    rows = by_method(report)
    assert set(rows) == {"full", "local:window=2", "plan:mine"}
    mine = rows["plan:mine"]
    assert mine["status"] == "measured"
    assert mine["op"] == {}
    assert set(mine["model"]) == {"48", "96"}
    assert mine["quality"]["48"]["layer_error"]["0"] < 1e-5  # exact below 60 tokens
    alone = rows["local:window=2"]["quality"]["48"]["layer_error"]
    assert mine["quality"]["48"]["layer_error"]["1"] == pytest.approx(alone["1"])
    assert mine["fidelity"]["48"] > rows["local:window=2"]["fidelity"]["48"]
    by_layer = "by layer (0: by-length:steps=0:full+60:clustered:clusters=4, 1: local:window=2)"
    assert any(by_layer in note for note in report["notes"])
    assert not any("plan:mine was left out" in note for note in report["notes"])
    write_report(sample.record(report), tmp_path / "out")


def test_two_folders_of_one_name_are_refused(settings, plan, tmp_path):
    """Their figures would be kept under one name."""
    other = shutil.copytree(plan, tmp_path / "elsewhere" / plan.name)
    with pytest.raises(InputError, match=f"two rows are called 'plan:mine', of {plan} and {other}: rename one"):
        prepare(settings("bert", plans=(plan, other)))


def test_plans_of_other_models_and_folders_without_one_are_refused(settings, plan, tmp_path):
    with pytest.raises(InputError, match="this plan was made for a BertModel"):
        prepare(settings("modernbert", plans=(plan,), lengths=(48,)))
    with pytest.raises(InputError, match=r"no plan at .*: there is no such folder"):
        prepare(settings("bert", plans=(tmp_path / "nowhere",)))


EVERYTHING = "i-clustered:clusters=4,topk=200"


def test_fidelity_in_16_bits_is_to_exact_attention_in_fp32(settings, tmp_path):
    report = report_of(measure(settings("bert", dtype="bf16", methods=("clustered:clusters=4", EVERYTHING)), tmp_path))
    rows = by_method(report)
    assert list(rows) == ["full", "full in bf16", "clustered:clusters=4 in bf16", f"{EVERYTHING} in bf16"]
    assert [row["dtype"] for row in rows.values()] == ["fp32", *["bf16"] * 3]
    rounding, all_keys, approximate = (1 - rows[name]["fidelity"]["48"] for name in list(rows)[1:2] + list(rows)[:1:-1])
    assert 1e-7 < rounding < 0.01
    assert 1e-7 < all_keys < 0.01
    assert approximate > 2 * all_keys
    for name, row in rows.items():
        costs = row["model"]["48"]
        assert ("speedup_fp32" in costs) == (name != "full")
        if name != "full":
            over = rows["full in bf16"]["model"]["48"]["speedup_fp32"]
            assert costs["speedup_fp32"] == pytest.approx(costs["speedup"] * over, rel=0.8)
        assert bool(row["op"]) == (name == "full")
    assert rows["full in bf16"]["model"]["48"]["speedup"] == 1.0
    assert any(note.startswith("In bf16, weights and activations have 16 bits") for note in report["notes"])
    assert not any("left out" in note for note in report["notes"])  # one attention call is timed in fp32 alone
    for text in (markdown(sample.record(report)), html(sample.record(report), {})):
        assert "over fp32" in text
    assert write_report(sample.record(report), tmp_path / "shown")


@pytest.mark.parametrize(("products", "expected"), [
    (True, ["full", METHODS[0], "full in bf16", f"{METHODS[0]} in bf16"]),
    (False, ["full", METHODS[0]]),
])  # fmt: skip
def test_auto_adds_bf16_if_the_processor_has_its_products(settings, monkeypatch, products, expected):
    monkeypatch.setattr("subquad.tools.compare.run.has_products", lambda device, dtype: products)
    rows = prepare(settings("bert", dtype="auto", methods=METHODS[:1])).rows
    assert [row.name for row in rows] == expected


@pytest.mark.parametrize("method", METHODS[:2])
def test_a_finished_report_is_saved_on_a_machine_without_the_products_of_its_dtype(
    settings, tmp_path, monkeypatch, method
):
    steps = {"0": f"{method} in bf16"}
    asked = settings("bert", dtype="auto", min_fidelity=1e-6, **SHORT)
    with monkeypatch.context() as patched:
        patched.setattr("subquad.tools.compare.run.has_products", lambda device, dtype: True)
        report = sample.record(report_of(measure(asked, tmp_path)))
    advice = replace(report.recommendation, attachment=Attachment(dtype="bf16", steps=steps, lengths=[48]))
    report = replace(report, recommendation=advice)
    if method == METHODS[0]:
        chosen = chosen_by_comparison(asked, report, tmp_path)
        assert set(map(str, chosen.methods.values())) == {METHODS[0]}
        return
    # A method that is tried by default on another processor only:
    with pytest.raises(InputError, match=r"this machine does not compare .* --save on the one that measured it"):
        chosen_by_comparison(asked, report, tmp_path)


def test_a_dtype_without_products_is_said(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("subquad.tools.compare.notes.has_products", lambda device, dtype: dtype == "fp32")
    asked = settings("bert", dtype="bf16", methods=METHODS[:1], lengths=(48,), op_lengths=(32,))
    assert any("has no products in bf16" in note for note in report_of(measure(asked, tmp_path))["notes"])


def test_exact_attention_in_16_bits_can_be_recommended(made_up):
    report = made_up(
        lambda i: 1.0, lambda i: 0.5, lambda i: 1.0, methods=(EVERYTHING,), dtype="bf16", min_fidelity=0.9, layers=False
    )
    advice = report["recommendation"]
    assert advice["choice"] in ("full in bf16", f"{EVERYTHING} in bf16")
    assert "2.00× the speed of exact attention in fp32" in advice["headline"]
    assert advice["next"].endswith("--dtype bf16")
    assert "dtype=torch.bfloat16" in use(sample.record(report))


def test_the_headline_may_name_the_dtype_of_a_saved_model(settings, tmp_path):
    """The weights are saved in the dtype that is recommended."""
    import torch

    asked = settings("bert", dtype="bf16", methods=(EVERYTHING,), lengths=(48,), op_lengths=(32,), layers=False)
    done = measure(asked, tmp_path / "out")
    row = next(row for row in done.rows if row.name == "full in bf16")
    chosen = saving.Chosen("full in bf16", methods_by_layer({0: row}, done.pretrained.model), [48],
                           Measured([], "", {}, "bf16"), torch.bfloat16, pays_in_dtype=True)  # fmt: skip
    saving.save(chosen, asked, tmp_path / "saved")
    from transformers import AutoModel

    assert AutoModel.from_pretrained(tmp_path / "saved").dtype == torch.bfloat16


def test_figures_of_one_dtype_are_not_taken_for_those_of_another(settings, tmp_path):
    short = {"methods": ("clustered:clusters=4",), "lengths": (48,), "op_lengths": (32,)}
    qualities = []
    for folder, dtype in (("first", "fp32"), ("first", "bf16"), ("second", "bf16")):
        report = report_of(measure(settings("bert", dtype=dtype, **short), tmp_path / folder))
        qualities.append(report["methods"][-1]["quality"])
    assert qualities[0] != qualities[1] == qualities[2]


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InputError, match="--dtype 'float8' is none of fp32, bf16, fp16, auto"):
        CompareSettings(dtype="float8")
    with pytest.raises(InputError, match="--dtype 'auto' is none of fp32, bf16, fp16"):
        PlanSettings(dtype="auto")


def test_the_shortest_of_some_lengths_is_the_main_one(settings):
    for lengths, own in (((96, 40), [40, 96]), ((96,), [64, 96])):  # its positions are 64
        for longest in (None, 96):
            assert prepare(settings("bert", lengths=lengths, max_length=longest)).lengths == own
