"""A run of `subquad needle`: its prompts and rows, what it refuses, and what it says."""

import math
import re
from dataclasses import replace

import pytest

from subquad.core.errors import InputError
from subquad.hf.positions import extended_positions
from subquad.tools.measure.intervals import interval_of_mean, interval_of_share
from subquad.tools.models.pretrained import load
from subquad.tools.needle import run as needle
from subquad.tools.needle.report import report_of
from subquad.tools.needle.run import ANSWER, ORACLE, NeedleRun, check, measure
from subquad.tools.needle.scoring import AnswerScore
from subquad.tools.needle.settings import NeedleSettings
from tests.tools.workflows import tiny

HALVES = "clustered-tail:clusters=4,topk=4,cells=2,block=32,last=8"
SETTINGS = {"lengths": (300,), "depths": (0.5,), "samples": 1, "methods": (HALVES,), "tasks": ("niah_single", "fwe")}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "all.txt"
    path.write_text("\n".join(tiny.documents()))
    return path


@pytest.fixture
def settings(llama, text):
    def make(**changes):
        return NeedleSettings(**{"model": llama, "text": (text,), **SETTINGS, **changes})

    return make


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny model of a kind, by its name."""
    return lambda name: str(tiny.save(name, tmp_path_factory.mktemp("models") / name))


def refusal(settings):
    with pytest.raises(InputError) as error:
        NeedleRun.prepare(settings)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_prompts_are_made_for_each_length_sample_task_and_depth(settings):
    run = NeedleRun.prepare(settings(lengths=(310, 300), depths=(1.0, 0.0, 0.0), samples=2))
    spots = [(spot.length, spot.sample, spot.task, spot.depth) for spot in run.prompts]
    of_sample = [("niah_single", 0.0), ("niah_single", 1.0), ("fwe", None)]
    assert spots == [(n, i, *each) for n in (300, 310) for i in (0, 1) for each in of_sample]
    assert all(len(prompt.tokens) + len(prompt.answer) == spot.length for spot, prompt in run.prompts.items())


def test_depths_that_are_close_have_results_of_their_own(settings):
    run = NeedleRun.prepare(settings(depths=(0.3333333, 0.3333334, 0.0), tasks=("niah_single",)))
    keys = [job.key for job in run.jobs()]
    assert len(set(keys)) == len(keys) == 3 * 3  # with exact attention and the oracle
    assert keys[0].split("/")[3] == "0"


def test_the_oracle_reads_the_first_sample_up_to_its_length(settings):
    run = NeedleRun.prepare(settings(lengths=(300, 310), samples=2, oracle_length=300))
    with_oracle = {(spot.length, spot.sample) for spot in run.prompts if ORACLE in run.rows_at(spot)}
    assert with_oracle == {(300, 0)}
    assert len(list(run.jobs())) == 8 * 2 + 2
    assert run.matched == HALVES
    none = NeedleRun.prepare(settings(oracle_length=0))
    assert not none.oracles
    assert len(list(none.jobs())) == 4


@pytest.mark.parametrize(("limit", "lengths"), [(8192, [2048, 4096, 8192]), (5000, [2048, 4096]), (512, [512])])
def test_default_lengths_are_those_that_the_positions_reach(settings, monkeypatch, limit, lengths):
    monkeypatch.setattr(needle, "load", lambda *words, **others: replace(load(*words, **others), limit=limit))
    monkeypatch.setattr(needle, "standard_library", lambda: tiny.documents(count=40))
    assert NeedleRun.prepare(settings(text=(), lengths=None, oracle_length=0)).lengths == lengths


def test_positions_are_extended_for_longer_prompts_and_said(settings, tmp_path):
    asked = settings(lengths=(300, 600), extend=700, tasks=("niah_single",))
    run = measure(asked, tmp_path)
    report = report_of(run, asked)
    assert report.model["extended_to"] == 700
    assert any("longer ones, up to 700, are read by YaRN" in note for note in report.notes)
    assert "--extend 700" in report.command
    short = measure(settings(lengths=(300,), tasks=("niah_single",)), tmp_path / "short")
    spot = next(iter(short.prompts))
    assert run.score(spot, "full") == short.score(spot, "full")  # within the model's own positions nothing changes
    assert {each["length"] for each in extended_positions(run.pretrained.model).values()} == {700}
    assert NeedleRun.prepare(settings(lengths=None, extend=700, tasks=("niah_single",))).lengths == [512, 700]


def test_a_dtype_is_that_of_the_model_and_of_another_run(settings, tmp_path):
    asked = settings(dtype="bf16", tasks=("niah_single",))
    run = measure(asked, tmp_path)
    assert report_of(run, asked).model["dtype"] == "bfloat16"
    assert "--dtype bf16" in report_of(run, asked).command
    assert run.fingerprint()["model"] != NeedleRun.prepare(settings(tasks=("niah_single",))).fingerprint()["model"]


def test_other_prompts_are_another_run(settings):
    prints = [
        NeedleRun.prepare(settings(**changes)).fingerprint()
        for changes in ({}, {}, {"seed": 1}, {"methods": ("local",)})
    ]
    assert prints[0] == prints[1]
    assert prints[0]["prompts"] != prints[2]["prompts"]
    assert prints[0]["methods"] != prints[3]["methods"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("niah-single",)}, "no task 'niah-single'; did you mean 'niah_single'? `subquad needle"),
        ({"tasks": ("passkey",)}, "no task 'passkey'; `subquad needle --help` lists all 7"),
        ({"depths": (0.5, 1.5)}, "--depths has 1.5, but a depth is from 0"),
        ({"depths": (float("nan"),)}, "--depths has nan"),
        ({"samples": 0}, "--samples 0 must be at least 1"),
        ({"oracle_length": -1}, "--oracle-length -1 must be 0 or more"),
        ({"methods": ("full",)}, "no methods to measure besides exact attention"),
        ({"methods": ("clusterd",)}, "did you mean 'clustered'"),
        ({"methods": ("smyrf",)}, "smyrf cannot run in .*causal.*take one that can, such as clustered-tail or local"),
        ({"lengths": (513,)}, "--lengths 513 is past the 512 positions"),
        ({"lengths": (513,)}, "--extend 513 extends them by YaRN"),
        ({"lengths": (600,), "extend": 550}, "--lengths 600 is beyond --extend 550"),
        ({"extend": 400}, "--extend 400 is within the 512 positions"),
        ({"model": "gpt2", "extend": 600}, "--extend 600 extends rotary positions only, and those of .* are learned"),
        ({"extend": 0}, "--extend 0 must be at least 1"),
        ({"dtype": "float32"}, "--dtype 'float32' is none of fp32, bf16, fp16"),
        ({"lengths": (60,)}, "60 tokens are too few for the task niah_single"),
        ({"lengths": (0,)}, "0 tokens are too few"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(settings, folder, changes, message):
    if "model" in changes:
        changes = changes | {"model": folder(changes["model"])}
    assert re.search(message.replace("?", r"\?"), refusal(settings(**changes)))


@pytest.mark.parametrize(
    "changes", [{"tasks": ("x",)}, {"depths": (2.0,)}, {"methods": ("clusterd",)}, {"model": "/no"}]
)
def test_mistakes_are_checked_before_the_model_is_loaded(settings, changes, monkeypatch):
    monkeypatch.setattr("subquad.tools.needle.run.load", None)
    with pytest.raises(InputError):
        check(settings(**changes))


@pytest.mark.parametrize(("model", "kind"), [("bert", "embedding"), ("masked", "masked-lm")])
def test_an_encoder_is_refused_with_a_model_that_works(settings, folder, model, kind):
    message = refusal(settings(model=folder(model)))
    assert f"is of the kind {kind}; subquad needle needs a causal language model, such as demo-decoder" in message


def test_a_text_that_is_too_short_is_refused(settings, tmp_path):
    (tmp_path / "short.txt").write_text("the model keeps each token.")
    assert "tokens of text, but the text has" in refusal(settings(text=(tmp_path / "short.txt",)))


def test_the_report_has_every_cell_and_says_what_the_oracle_is(settings, tmp_path):
    asked = settings(lengths=(300, 310), samples=2, methods=(HALVES, "local:window=16"), oracle_length=300)
    run = measure(asked, tmp_path)
    report = report_of(run, asked)
    assert [(m.method, m.role, len(m.cells)) for m in report.methods] == [
        ("full", "exact", 4),
        (HALVES, "measured", 4),
        ("local:window=16", "measured", 4),
        (ORACLE, "oracle", 2),
    ]
    for method in report.methods:
        for cell in method.cells:
            assert cell.samples == (1 if method.role == "oracle" else 2)
            exact = [run.score(spot, "full") for spot in run.prompts if _is_of(spot, cell)][: cell.samples]
            mine = [run.score(spot, method.method) for spot in run.prompts if _is_of(spot, cell)
                    and method.method in run.rows_at(spot)]  # fmt: skip
            mean = sum(score.log_likelihood for score in mine) / len(mine)
            assert cell.log_likelihood == pytest.approx(mean)
            assert cell.difference == pytest.approx(mean - sum(s.log_likelihood for s in exact) / len(exact))
            assert cell.right == sum(score.right for score in mine) / len(mine)
            assert cell.differences == [m.log_likelihood - e.log_likelihood for m, e in zip(mine, exact, strict=True)]
            assert cell.right_interval == list(interval_of_share(cell.right, len(mine)))
            if method.role == "oracle":
                assert cell.interval is None
            else:
                assert cell.interval == list(interval_of_mean(cell.differences))
    notes = " ".join(report.notes)
    assert f"as many as {HALVES} meets exactly" in notes
    assert "left out at 310 tokens, because it is slow; --oracle-length 310 includes them" in notes
    assert "the first of the 2 prompts" in notes


def test_another_kernel_of_exact_attention_is_a_row_that_does_not_differ(settings, tmp_path):
    asked = settings(methods=("full", "full:kernel=subquad"), samples=2, tasks=("niah_single",))
    report = report_of(measure(asked, tmp_path), asked)
    assert [(method.method, method.role) for method in report.methods] == [
        ("full", "exact"),
        ("full:kernel=subquad", "measured"),
    ]
    assert report.methods[1].cells[0].difference == pytest.approx(0.0, abs=1e-4)


def test_an_answer_of_no_likelihood_has_no_mean_and_no_intervals_but_a_share(settings, tmp_path):
    asked = settings(samples=2, tasks=("fwe",))
    run = measure(asked, tmp_path)
    spot = list(run.prompts)[1]
    run.results[ANSWER(*spot.parts, HALVES)] = AnswerScore(-math.inf, False)
    cell = report_of(run, asked).methods[1].cells[0]
    assert (cell.log_likelihood, cell.difference, cell.differences, cell.interval) == (None,) * 4
    assert cell.right_interval is not None


def _is_of(spot, cell):
    return (spot.task, spot.length, spot.depth) == (cell.task, cell.length, cell.depth)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"oracle_length": 0}, "Without the oracle: no length is at most --oracle-length 0"),
        ({"methods": ("local:window=16",)}, "Without the oracle: no method is causal by halves"),
        ({"methods": ("clustered-tail",)}, "clustered-tail is exact attention on at most 1,024 tokens"),
    ],
)
def test_notes_say_why_there_is_no_oracle_and_what_is_exact(settings, tmp_path, changes, reason):
    asked = settings(tasks=("niah_single",), **changes)
    assert reason in " ".join(report_of(measure(asked, tmp_path), asked).notes)


def test_an_interrupted_run_resumes(settings, tmp_path, monkeypatch):
    whole = measure(settings(), tmp_path / "whole")
    answer, calls = NeedleRun.answer, []

    def interrupted(self, prompt, row):
        calls.append(row.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer(self, prompt, row)

    monkeypatch.setattr(NeedleRun, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(settings(), tmp_path / "out")
    resumed = measure(settings(), tmp_path / "out")
    assert len(calls) == 3 + 6 - 2
    assert resumed.resumed == 2
    assert any("2 of 6 units come from an earlier" in note for note in report_of(resumed, settings()).notes)
    assert [resumed.score(spot, "full") for spot in whole.prompts] == [
        whole.score(spot, "full") for spot in whole.prompts
    ]
