"""Whole requests in a comparison: first token, generated tokens, and all of it."""

import json
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from subquad.core.errors import InputError
from subquad.tools.cli.main import app
from subquad.tools.compare.compare_jobs import STEPS
from subquad.tools.compare.page import html
from subquad.tools.compare.printed import markdown, rich_table
from subquad.tools.compare.run import measure, prepare
from subquad.tools.compare.settings import CompareSettings
from subquad.tools.compare.tables import request_table, requests_caption
from subquad.tools.models import generation
from subquad.tools.plan.settings import PlanSettings
from tests.tools.report import sample
from tests.tools.workflows.reports import report_of

pytestmark = pytest.mark.usefixtures("undisturbed")
HALVES, WINDOW = "clustered:clusters=4,block=16,last=4", "local:window=4"


@pytest.fixture(scope="module")
def settings(model, text):
    def make(name="llama", **changed):
        small = CompareSettings(
            model=model(name),
            text=(text,),
            methods=(HALVES, WINDOW),
            lengths=(48, 96),
            op_lengths=(32,),
            dtype="fp32",
            new_tokens=9,
        )
        return replace(small, **changed)

    return make


@pytest.fixture(scope="module")
def compared(settings, tmp_path_factory):
    return measure(settings(), tmp_path_factory.mktemp("compare"))


@pytest.fixture
def report(compared):
    return report_of(compared)


def rows_of(report):
    return {method["method"]: method for method in report["methods"]}


def test_a_request_is_its_prefill_and_its_steps(report):
    for name, row in rows_of(report).items():
        assert set(row["step"]) == set(row["request"]) == {"48", "96"}
        for length, request in row["request"].items():
            assert request["new_tokens"] == 9
            assert request["extra_mib"] == row["model"][length]["extra_mib"]
            assert row["step"][length]["repeats"] == generation.ROUNDS
            if name == "full":
                assert request["ms"] == pytest.approx(row["model"][length]["ms"] + 8 * row["step"][length]["ms"])
                assert request["speedup"] == 1.0
            else:
                assert request["verdict"] in ("faster", "slower", "within the noise")
    assert set(report["noise"]["step"]) == set(report["noise"]["request"]) == {"48", "96"}


def test_the_cache_is_in_the_memory_of_a_request(compared, settings, tmp_path, report):
    without = report_of(measure(settings(new_tokens=0, lengths=(48,)), tmp_path))
    more = rows_of(report)["full"]["request"]["48"]["extra_mib"]
    assert more > rows_of(without)["full"]["model"]["48"]["extra_mib"]
    # Two layers with a key and a value of 2 heads of 8 for each of 48 tokens.
    assert report["requests"]["cache_mib"]["48"] == {"fp32": pytest.approx(2 * 2 * 2 * 8 * 48 * 4 / 2**20)}


def test_the_report_says_which_steps_are_exact(report):
    rows = rows_of(report)
    assert max(rows[HALVES]["step_kl"].values()) < 1e-9
    assert rows[WINDOW]["step_kl"]["96"] > 1e-6
    said = requests_caption(sample.record(report))
    assert "A request generates 9 tokens" in said
    assert re.search(
        rf"exact attention by construction, .*, except those of {WINDOW} \(a KL of .* after 96 tokens\)", said
    )


def test_the_tables_have_the_three_figures(report):
    groups = [group for group, _ in request_table(sample.record(report)).groups]
    of_48 = ["48: first token", "48: each further token", "48 + 9: request"]
    assert groups == of_48 + [group.replace("48", "96") for group in of_48]
    for width in (80, 300):
        console = Console(file=StringIO(), width=width)
        console.print(rich_table(sample.record(report)))
        assert "Whole requests" in console.file.getvalue()
        assert "exact attention by construction" in " ".join(console.file.getvalue().split())
    assert "## Whole requests" in markdown(sample.record(report))
    assert "48 + 9: request" in html(sample.record(report), {})


def test_no_new_tokens_measure_no_steps(settings, tmp_path):
    comparison = measure(settings(new_tokens=0, lengths=(48,)), tmp_path)
    report = report_of(comparison)
    assert not list(comparison.results.all(STEPS))
    assert not any("step" in row or "request" in row for row in report["methods"])
    assert "requests" not in report
    assert not request_table(sample.record(report)).columns
    assert not any("No requests after" in note for note in report["notes"])


def test_by_default_requests_end_where_the_positions_do(settings):
    fits = prepare(settings(new_tokens=None))
    assert fits.step_lengths == [48, 96]  # 512 positions
    assert fits.new_tokens_after(96) == generation.NEW_TOKENS == 128
    assert prepare(settings("gpt2", new_tokens=None, lengths=(48,))).step_lengths == []  # 64 positions


def test_a_length_without_requests_is_named(settings, tmp_path):
    report = report_of(measure(settings("gpt2", new_tokens=None, lengths=(48,)), tmp_path))
    why = "No requests after 48 tokens: the model has 64 positions"
    assert any(note.startswith(why) for note in report["notes"])


@pytest.mark.parametrize("made", [CompareSettings, PlanSettings])
@pytest.mark.parametrize("count", [-1, 1])
def test_a_number_that_is_none_is_refused(made, count):
    with pytest.raises(InputError, match=f"--new-tokens {count} must be 0, for no requests, or at least 2"):
        made(new_tokens=count)


def test_new_tokens_come_after_a_prompt_that_is_cut_if_positions_are_missing(settings, tmp_path):
    """The model has 64 positions: 20 tokens after 48 would need 68."""
    short = settings("gpt2", lengths=(48,), new_tokens=20, methods=(HALVES,), op_lengths=(32,))
    done = measure(short, tmp_path)
    report = report_of(done)
    assert (done.new_tokens_after(48), done.prompt_of_request(48)) == (20, 44)
    assert report["requests"]["prompts"] == {"48": 44}
    assert any("the new tokens of requests with 48 tokens come after the first 44" in note for note in report["notes"])
    assert "44 + 20: request" in [column.group for column in request_table(sample.record(report)).columns]
    assert done.results[STEPS(48)].times.cache_mib["fp32"] == pytest.approx(2 * 2 * 45 * 32 * 4 / 2**20, rel=0.03)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("gpt2", {}, "--new-tokens 9 after a prompt of 96 tokens makes 105, past the 64 positions of"),
        ("gpt2", {"lengths": (48,), "new_tokens": 24}, "after a prompt of 48 tokens makes 72, .* at most 40, or fewer"),
        (
            "gpt2",
            {"lengths": (48,), "new_tokens": 64},
            "after a prompt of 48 tokens makes 112, .*; give fewer new tokens",
        ),
        (
            "bert",
            {"lengths": (48,), "methods": ("clustered",)},
            "--new-tokens 9 is for causal language models, and .*bert",
        ),
    ],
)
def test_what_a_model_cannot_generate_is_refused(settings, name, changed, message):
    with pytest.raises(InputError, match=message):
        prepare(settings(name, **changed))


def test_steps_are_resumed_and_their_lengths_are_in_the_fingerprint(compared, settings, tmp_path):
    assert compared.fingerprint() == prepare(settings(new_tokens=20)).fingerprint()
    assert compared.fingerprint() != prepare(settings(new_tokens=0)).fingerprint()
    cut, shorter = (prepare(settings("gpt2", lengths=(48,), new_tokens=new)) for new in (19, 20))
    assert cut.fingerprint() != shorter.fingerprint()  # their prompts are cut, to 45 and 44 tokens


def test_batches_are_padded_on_the_left(settings, tmp_path):
    report = report_of(measure(settings(batch=3, lengths=(48,)), tmp_path))
    assert rows_of(report)[HALVES]["request"]["48"]["speedup"] > 0
    assert rows_of(report)[HALVES]["step_kl"]["48"] < 1e-9


def test_rows_in_16_bits_are_compared_in_both_dtypes(settings, tmp_path):
    report = report_of(measure(settings(dtype="bf16", lengths=(48,), methods=(HALVES,)), tmp_path))
    row = rows_of(report)[f"{HALVES} in bf16"]
    assert {"speedup", "speedup_fp32", "verdict_fp32"} <= set(row["request"]["48"])
    assert set(report["requests"]["cache_mib"]["48"]) == {"fp32", "bf16"}


def test_the_command_takes_the_option(settings, tmp_path):
    from typer.testing import CliRunner

    small = settings(lengths=(48,))
    words = ["compare", small.model, "--text", str(small.text[0]), "--methods", HALVES, "--max-length", "48"]
    words += ["--dtype", "fp32", "--new-tokens", "3", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["requests"]["new_tokens"] == 3
    assert "--new-tokens 3" in json.loads(done.stdout)["command"]
