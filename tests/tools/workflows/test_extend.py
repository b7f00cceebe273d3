"""Models whose positions are extended by --extend, in comparisons and in plans."""

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import transformers
from rich.console import Console

import subquad as sq
from subquad.core.errors import InputError
from subquad.tools.compare.code import code_of
from subquad.tools.compare.page import html
from subquad.tools.compare.printed import rich_table
from subquad.tools.compare.run import measure, prepare
from subquad.tools.compare.schema import Attachment
from subquad.tools.compare.settings import CompareSettings
from subquad.tools.models import pretrained
from subquad.tools.models.generation import prompt_tokens
from subquad.tools.plan.prepared import prepare as prepare_plan
from subquad.tools.plan.run import make
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.runs.jobs import silent
from tests.tools.report import sample
from tests.tools.workflows.reports import report_of

pytestmark = pytest.mark.usefixtures("undisturbed")

OWN, LONG, REACH = 64, 128, 144
HALVES = "clustered-tail:block=16,last=4"


@pytest.fixture(scope="module")
def decoder(model, tmp_path_factory):
    """A decoder with 64 rotary positions."""
    folder = tmp_path_factory.mktemp("decoder")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model("llama"))
    loaded.config.max_position_embeddings = OWN
    loaded.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model("llama")).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def settings(decoder, text):
    return CompareSettings(
        model=decoder, text=(Path(text),), methods=(HALVES,), lengths=(48, LONG), extend=REACH, op_lengths=(32,),
        dtype="fp32", new_tokens=9,
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(settings, tmp_path_factory):
    return report_of(measure(settings, tmp_path_factory.mktemp("compare")))


def test_the_report_has_the_exact_models_perplexity_in_each_quarter(report):
    assert list(report["quarters"]) == [str(LONG)]
    quarters = report["quarters"][str(LONG)]
    assert len(quarters) == 4
    # The passages of equal parts: their mean logarithm is that of the whole.
    exact = next(row for row in report["methods"] if row["method"] == "full")
    whole = math.log(exact["quality"][str(LONG)]["perplexity"])
    assert sum(map(math.log, quarters)) / 4 == pytest.approx(whole, rel=0.02)
    line = f"The exact model's perplexity in the four quarters of {LONG} tokens: {quarters[0]:.2f}, "
    assert any(caution.startswith(line) for caution in report["cautions"])
    assert any("are read by YaRN (factor 2.25)" in caution for caution in report["cautions"])


def test_terminal_and_page_show_them(report):
    console = Console(file=StringIO(), width=300)
    console.print(rich_table(sample.record(report)))
    for shown in (console.file.getvalue(), html(sample.record(report), {})):
        assert f"in the four quarters of {LONG} tokens" in shown.replace("&#39;", "'")


def test_the_code_of_the_report_extends_the_model_as_far(report):
    attached, read = Attachment(dtype="fp32", steps={"0": HALVES}, lengths=[LONG]), sample.record(report)
    code = code_of(attached, read.methods, read.model, "here")
    assert f"sq.hf.extend_positions(model, {REACH}, tokenizer=tokenizer)" in code


def test_all_lengths_past_the_own_positions_are_read_by_the_same_extension(settings):
    comparison = prepare(replace(settings, lengths=(48, 60, 80, LONG)))
    longer = comparison._model_for(80, "fp32")
    assert sq.hf.rotary_limit(longer.model) == REACH
    assert comparison._model_for(48, "fp32").model is comparison.pretrained.model
    assert comparison.new_tokens_after(48) == 9
    # A request whose prompt fits the own positions stays within them, as its cache cannot change them.
    assert [prompt_tokens(comparison.pretrained, length, 9) for length in (48, 60, LONG)] == [48, OWN - 9, LONG]


def test_extend_without_lengths_adds_its_own(settings):
    asked = replace(settings, lengths=None, new_tokens=None)
    prepared = prepare(asked)
    assert prepared.lengths[-1] == REACH
    assert prepared.asked == asked  # the command in the report is the one that was given
    with pytest.raises(InputError, match=f"--extend {REACH} is more than --max-length 100; leave --max-length out"):
        replace(asked, max_length=100)


@pytest.mark.parametrize(("changed", "message"), [
    ({"extend": None}, "--lengths 128 is past the 64 positions of .*; --extend 128 extends them by YaRN"),
    ({"extend": 100}, "--lengths 128 is beyond --extend 100; give --extend 128"),
    ({"extend": 64, "lengths": (48,)}, "--extend 64 is within the 64 positions"),
])  # fmt: skip
def test_lengths_that_need_an_extension(settings, changed, message):
    with pytest.raises(InputError, match=message):
        prepare(replace(settings, **changed))


def test_extend_must_be_a_length(settings):
    with pytest.raises(InputError, match="--extend 0 must be at least 1"):
        replace(settings, extend=0)


def test_positions_that_cannot_be_extended_are_named(settings, decoder, tmp_path):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(decoder)
    loaded.config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    loaded.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(decoder).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"--extend 144: the rotary positions of .* scaled already, by .*'linear'"):
        prepare(replace(settings, model=str(tmp_path)))


def test_a_model_without_a_limit_has_nothing_to_extend(decoder):
    loaded = replace(pretrained.load(decoder), limit=None)
    with pytest.raises(InputError, match=r"the positions of .* have no limit; leave it out"):
        loaded.extended_to(REACH)


def test_a_plan_records_the_extension_and_asks_for_it(decoder, text, tmp_path):
    planned = PlanSettings(
        model=decoder, text=(Path(text),), lengths=(32, LONG), extend=REACH, methods=(HALVES,), max_kl=10.0,
        minutes=0.5, new_tokens=0,
    )  # fmt: skip
    plan = make(planned, tmp_path / "out", silent).plan
    plan.save(tmp_path / "plan")
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["made_on"]["extended_to"] == REACH
    again, loaded = sq.load_plan(tmp_path / "plan"), transformers.AutoModelForCausalLM.from_pretrained(decoder)
    with pytest.raises(ValueError, match=r"call sq\.hf\.extend_positions\(model, 144\) first"):
        sq.hf.swap(loaded, again)
    sq.hf.swap(sq.hf.extend_positions(loaded, REACH), again)
    assert loaded.config.subquad


def test_a_plan_without_extension_keeps_to_the_own_positions(decoder, text, tmp_path):
    planned = PlanSettings(model=decoder, text=(Path(text),), methods=(HALVES,))
    with pytest.raises(InputError, match="--lengths 512 is past the 64 positions"):
        prepare_plan(replace(planned, lengths=(512,)), tmp_path, silent)
    assert [load.length for load in prepare_plan(planned, tmp_path, silent).loads] == [OWN]
