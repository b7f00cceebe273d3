"""The command line: what it prints, and how it ends on bad input."""

import json
import warnings

import pytest
from typer.testing import CliRunner

import subquad as sq
from subquad.tools.cli.common import with_lines_for_warnings
from subquad.tools.cli.main import app
from subquad.tools.compare.comparison import Comparison
from subquad.tools.compare.tables import PLOTS

run = CliRunner().invoke
METHODS = ["--methods", "clustered:clusters=4 i-clustered:clusters=4,topk=4"]


def test_compare_writes_its_report_and_prints_a_table(model, text, short, tmp_path, painted):
    out = tmp_path / "out"
    done = run(app, ["compare", model("bert"), "--text", str(text), *METHODS, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "i-clustered" in done.stdout
    assert "Recommendation" in done.stdout
    report = json.loads((out / "report.json").read_text())
    assert [m["method"] for m in report["methods"]] == ["full", "clustered:clusters=4", "i-clustered:clusters=4,topk=4"]
    files = {"report.json", "report.md", "report.html", *PLOTS} - {"error-by-layer.png"}
    assert {p.name for p in out.iterdir()} == files
    done = run(app, ["compare", model("bert"), "--text", str(text), *METHODS, "--out", str(tmp_path / "l"), "--layers"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "l" / "error-by-layer.png").exists()


def test_compare_says_what_it_reads_what_it_measures_and_what_is_not_fitted(model, text, short, tmp_path):
    methods = ["--methods", "local:window=4 lha:buckets=2 rfa:features=4"]
    done = run(app, ["compare", model("bert"), "--text", str(text), *methods, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    said = done.stderr.splitlines()
    assert said[0] == f"{text}: 12 files (0.txt, 1.txt, 10.txt, …) read"
    start = "warning: not fitted, so measured with the parameters that they start with: "
    fits, trains = said[1:3]
    assert fits.startswith(f"{start}lha:buckets=2; --calibrate TEXT fits them first")
    assert "`subquad calibrate`" in fits
    assert trains == f"{start}rfa:features=4; only training fits them"
    steps = [line.split(",")[0] for line in said[3:]]
    assert steps[0] == "0/28 timing the model with each method at 64 tokens"
    assert steps[1:3] == [f"figures at {tokens} tokens: {tmp_path / 'report.html'}" for tokens in (64, 96)]
    assert said[-1] == "28/28 done"
    quiet = run(app, ["compare", model("bert"), *METHODS, "--text", str(text), "--out", str(tmp_path / "q"), "--quiet"])
    assert quiet.stderr == ""


def test_compare_says_nothing_of_methods_that_are_fitted_or_files_that_are_named(model, text, short, tmp_path):
    words = ["compare", model("bert"), "--text", str(text / "0.txt"), *METHODS, "--out", str(tmp_path)]
    said = run(app, words).stderr
    assert "not fitted" not in said
    assert "read" not in said.replace("reading the text", "")


def test_compare_json_prints_the_report_alone(model, text, short, tmp_path):
    methods = ["--methods", "smyrf:clusters=4 nystrom:landmarks=4"]
    command = ["compare", model("gpt2"), "--text", str(text), *methods, "--max-kl", "0.5", "--out", str(tmp_path)]
    done = run(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["settings"]["floor"] == {"figure": "kl", "bound": 0.5}
    assert [m["status"] for m in report["methods"]] == ["exact", "refused", "refused"]


def test_mpnet_runs_what_takes_its_bias_and_refuses_the_rest(model, text, short, tmp_path):
    methods = ["--methods", "oracle-top:topk=4 oracle-top:topk=64 clustered-tail:clusters=4"]
    done = run(app, ["compare", model("mpnet"), "--text", str(text), *methods, "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    exact, few, many, refused = json.loads(done.stdout)["methods"]
    assert (exact["status"], refused["status"]) == ("exact", "refused")
    assert "supports no additive bias and this layer adds a position bias" in refused["reason"]
    assert few["fidelity"]["62"] < 0.99
    assert many["fidelity"]["62"] > 0.9999  # all keys are exact


def test_methods_may_be_repeated(model, text, short, tmp_path):
    twice = ["--methods", "clustered:clusters=4", "--methods", "clustered:clusters=5"]
    run(app, ["compare", model("bert"), "--text", str(text), *twice, "--out", str(tmp_path)])
    names = [m["method"] for m in json.loads((tmp_path / "report.json").read_text())["methods"]]
    assert names == ["full", "clustered:clusters=4", "clustered:clusters=5"]


def bad_inputs(model, text, folder):
    (folder / "empty.txt").write_text(" \n")
    (folder / "binary.txt").write_bytes(b"\x7fELF\0\xff")
    (folder / "rows.jsonl").write_text('{"body": "text"}\n')
    (folder / "broken.jsonl").write_text("{oops\n")
    (folder / "file").write_text("")
    (folder / "good.tsv").write_text("a\tb\t1\na\tc\t2\n")
    (folder / "word.txt").write_text("hi")
    (folder / "one").mkdir()
    for part in ("train", "test"):
        (folder / "one" / f"{part}.csv").write_text("text,category\na,x\n")
    (folder / "hollow").mkdir()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "config.json").write_text("{not json")
    bert = model("bert")
    return {
        "no model at": ["/no/such/model"],
        "has no config.json": [str(folder / "hollow")],
        "config.json is not JSON": [str(folder / "damaged")],
        "DebertaModel computes its attention itself": [model("deberta")],
        "is an encoder-decoder (t5); this command accepts encoders": [model("t5")],
        "key of attention layer 1 (encoder.layer.1.attention.self) is not finite": [model("nan")],
        "no file or folder at": [bert, "--text", str(folder / "missing.txt")],
        "is empty": [bert, "--text", str(folder / "empty.txt")],
        "is not a text file": [bert, "--text", str(folder / "binary.txt")],
        "no text in the folder": [bert, "--text", str(folder / "hollow")],
        "has no column 'text'; it has body": [bert, "--text", str(folder / "rows.jsonl")],
        "line 1: not JSON": [bert, "--text", str(folder / "broken.jsonl")],
        "leaves 8 tokens besides the special ones": [bert, "--max-length", "10"],
        "leaves 0 tokens": [bert, "--max-length", "0"],
        "a passage has at least 16 tokens, but the longest document has": [bert, "--text", str(folder / "word.txt")],
        "--methods is empty": [bert, "--methods", ""],
        "one class only": [bert, "--task", "banking77", "--data-dir", str(folder / "one")],
        "all scores are alike": [bert, "--task", "sts", "--data-dir", str(folder / "sts.tsv")],
        "cannot write to the folder": [bert, "--out", str(folder / "file" / "below")],
        "no model 'nosuchmodel': there is no such folder, and no model of this name is in the cache": ["nosuchmodel"],
        "did you mean 'clustered'": [bert, "--methods", "clusterd"],
        "did you mean 'clusters'": [bert, "--methods", "clustered:cluster=4"],
        "clusters=0, but it must be a whole number ≥ 1": [bert, "--methods", "clustered:clusters=0"],
        "clusters='many' is not a whole number": [bert, "--methods", "clustered:clusters=many"],
        "must be above 0 and at most 1": [bert, "--min-fidelity", "1.5"],
        "no task 'bank'; did you mean 'banking77'? There are banking77": [bert, "--task", "bank"],
        "needs its data: --data-dir": [bert, "--task", "banking77"],
        "examples 1 is too few": [bert, "--task", "sts", "--data-dir", str(folder / "sts.tsv"), "--examples", "1"],
        "no data folder at": [bert, "--task", "sts", "--data-dir", str(folder / "nowhere")],
        "no train.csv at": [bert, "--task", "banking77", "--data-dir", str(folder)],
        "needs an embedding model": [model("gpt2"), "--task", "sts", "--data-dir", str(folder / "good.tsv")],
        "is a file; give a folder": [bert, "--out", str(folder / "file")],
        "no device 'tpu9'": [bert, "--device", "tpu9"],
    }


def test_bad_input_is_one_line_and_exit_code_2(model, text, short, tmp_path, monkeypatch):
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)
    (tmp_path / "sts.tsv").write_text("a\tb\t1\n")
    for message, arguments in bad_inputs(model, text, tmp_path).items():
        out = tmp_path / "out"
        where = [] if "--out" in arguments else ["--out", str(out)]
        given = [] if "--text" in arguments else ["--text", str(text)]
        done = run(app, ["compare", *arguments, *given, *where])
        assert done.exit_code == 2, (message, done.output, done.exception)
        assert message in done.stderr, (message, done.stderr)
        assert done.stderr.count("error:") == 1
        assert "Traceback" not in done.output
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("error:"), done.stderr
        assert not list(out.glob("report*")) if out.exists() else True


def test_topk_past_the_keys_is_allowed(model, text, short, tmp_path):
    given = ["compare", model("bert"), "--text", str(text), "--methods", "oracle-top:topk=9999", "--out", str(tmp_path)]
    assert run(app, given).exit_code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["methods"][1]["quality"]["64"]["cosine_mean"] == pytest.approx(1.0, abs=1e-5)


def test_an_interruption_ends_with_130_and_keeps_what_was_done(model, text, short, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Comparison, "op", interrupted)
    done = run(app, ["compare", model("bert"), "--text", str(text), *METHODS, "--out", str(tmp_path)])
    assert done.exit_code == 130
    assert "resumes from here" in done.stderr
    assert len(list((tmp_path / ".progress").rglob("*.json"))) == 3 + 20 + 2  # texts, batches, eager attention
    assert json.loads((tmp_path / "report.json").read_text())["notes"][0].startswith("Unfinished")


def test_a_mistake_of_ours_is_not_hidden(model, text, short, tmp_path, monkeypatch):
    def bug(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(Comparison, "op", bug)
    done = run(app, ["compare", model("bert"), "--text", str(text), *METHODS, "--out", str(tmp_path)])
    assert isinstance(done.exception, ZeroDivisionError)


def test_methods_lists_all_with_their_abilities():
    done = run(app, ["methods"])
    for name in sq.list_methods():
        assert name in done.stdout
    traits = json.loads(run(app, ["methods", "--json"]).stdout)
    assert traits["clustered"]["causal"] == "values-only"
    assert traits["i-clustered"]["settings"]["topk"] == 32


def test_doctor_names_versions_and_backends():
    printed = run(app, ["doctor"]).stdout
    for word in ("torch", "subquad", "cores", "backend reference", "backend cpu"):
        assert word in printed


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_has_two_spellings(flag):
    for command in ([flag], ["compare", flag]):
        done = run(app, command)
        assert done.exit_code == 0
        assert "Usage" in done.stdout


def test_version():
    done = run(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"subquad {sq.__version__}\n")


def test_a_warning_is_one_line(capsys):
    @with_lines_for_warnings
    def command(**given):
        warnings.warn("the plan was made\non other hardware", stacklevel=2)
        warnings.warn("old", DeprecationWarning, stacklevel=2)

    before = warnings.showwarning
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        command()
    assert capsys.readouterr().err == "warning: the plan was made on other hardware\n"
    assert [str(other.message) for other in others] == ["old"]
    assert warnings.showwarning is before
