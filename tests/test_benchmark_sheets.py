"""The benchmarks that make tables run at small sizes and say what they must."""

import ast
import copy
import importlib
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

import subquad as sq
from tests.tools.report import sample

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """One of the scripts, as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)  # as for a script
    return importlib.import_module


@pytest.fixture
def made(script, run_script, tmp_path: Path):
    """Run a script as from the command line; the lines of its tables, by their first cell, as the file has them."""

    def run(name: str, *words: str) -> dict[str, list[str]]:
        threads = str(torch.get_num_threads())
        given = ["--threads", threads, *words, "--out", str(tmp_path / "out.md")]
        run_script(script(name), *given)
        written = (tmp_path / "out.md").read_text("utf-8")
        assert f"`python benchmarks/{name}.py --threads" in written
        lines = [line.strip("|").split("|") for line in written.splitlines() if line.startswith("|")]
        return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}

    return run


def test_a_slope_is_the_exponent_of_a_power(script):
    assert script("sheet").slope([2, 4, 16], [3 * n**1.5 for n in (2, 4, 16)]) == pytest.approx(1.5)


def test_growth_has_the_exponents_of_the_work(made):
    short = ["--lengths", "128 256", "--work", "256 512", "--seconds", "0"]
    lines = made("growth", *short, "--methods", "full local:window=16 linear linformer:k=8")
    assert (lines["full"][0], lines["full"][2]) == ("n²", "2.00")
    for method in ("local:window=16", "linear", "linformer:k=8"):
        assert float(lines[method][2]) == pytest.approx(1.0, abs=0.1)


def test_all_methods_of_the_growth_table_exist(script):
    for name in script("growth").PUBLISHED:
        sq.parse_method(name)


def test_prefix_sums_leave_out_what_does_not_fit(made):
    lines = made("prefix_sums", "--lengths", "64 128", "--seconds", "0", "--methods", "linear", "--gib", "0.0003")
    assert "–" not in lines["64"]
    assert (lines["128"][1], lines["128"][4]) == ("–", "–")
    assert lines["exponent"][1] == "–"


def test_the_masked_form_is_causal_linear_attention(script):
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    expected = sq.attention(q, k, v, method="linear", is_causal=True)
    torch.testing.assert_close(script("prefix_sums").masked(q, k, v), expected)


def test_memory_is_given_a_token_and_sdpa_only_where_it_is_asked_for(made, script, monkeypatch):
    monkeypatch.setattr(script("sheet"), "peak_alone", lambda load, method, threads: (7 + load.causal) * load.length)
    words = ["--lengths", "64 128", "--sdpa", "64", "--methods", "full linear", "--causal", "linear"]
    lines = made("memory_growth", *words)
    assert (lines["SDPA"], lines["linear"], lines["linear, causal"]) == (["7", "–"], ["7", "7"], ["8", "8"])


def test_causal_attention_is_compared_with_sdpa_and_long_calls_are_not_run(made):
    shape = ["--heads", "4", "--key-heads", "2", "--head-dim", "16", "--turns", "1"]
    spec = "clustered-tail:block=16,last=0,clusters=2,topk=2,cells=2"
    words = [*shape, "--lengths", "48 96", "--methods", spec, "--dtypes", "bfloat16"]
    lines = made("causal_attention", *words, "--passes", "forward+backward", "--limit", "0")
    inputs, dtype, passes, method, _, speedup, error, sdpa_error = lines["48"]
    assert (inputs, dtype, passes, method) == ("random", "bfloat16", "forward+backward", f"`{spec}`")
    assert float(speedup.removesuffix("×")) > 0
    assert 0 < float(sdpa_error) < 0.02 < float(error) < 1
    assert lines["96"][4:] == ["not run", "not run", "–", "–"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_a_process_of_its_own_counts_the_matrix_of_a_naive_softmax(script):
    sheet: ModuleType = script("sheet")
    matrix = 4 * 2 * 2048**2
    assert matrix < sheet.peak_alone(sheet.load_of(2048, heads=2), "naive", 1) < 4 * matrix


@pytest.mark.data
def test_kept_tokens_have_a_cosine_and_a_time_each(made):
    words = ["--lengths", "96", "--passages", "2", "--rounds", "1"]
    lines = made("keep", *words, "--methods", "local:window=8 full")
    assert lines["method"][:3] == ["cosine, keep nothing", "cosine, `first`", "cosine, `ends`"]
    nothing, first, ends = map(float, lines["`local:window=8`"][:3])
    assert nothing < first < 1
    assert nothing < ends < 1
    assert lines["`full`"][:3] == ["1.000", "1.000", "1.000"]
    assert all(float(time) > 0 for time in lines["`full`"][3:])


@pytest.mark.slow
@pytest.mark.data
def test_more_keys_have_smaller_errors_at_each_length(made):
    words = ["--lengths", "48 96", "--steps", "1"]
    sizes = ["lha-tail:buckets=4,keys=8,cells=2", "lha-tail:buckets=4,keys=32,cells=2"]
    few, many = (made("hash_growth", *words, "--methods", " ".join(sizes))[f"`{size}`"] for size in sizes)
    assert all(0 < float(more) < float(fewer) < 1 for fewer, more in zip(few, many, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "time"), [("0", r"–"), ("1", r"\d+\.\d\d")])
def test_small_numbers_are_compared_with_exact_attention_in_fp32(made, tmp_path: Path, rounds: str, time: str):
    made("small_numbers", "--lengths", "32", "--passages", "1", "--methods", "full", "--rounds", rounds)
    lines = (tmp_path / "out.md").read_text("utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `full`")]
    rows = [row for row in rows if "torchao" not in row[1]]  # measured where it is installed
    assert [row[1] for row in rows] == ["fp32", "bf16", "int8 dynamic (torch)"]
    fp32, bf16, int8 = (float(row[3]) for row in rows)
    assert (fp32, bf16) == (1.0, 1.0)
    assert 0.9 < int8 < 1.0
    sizes = [float(row[2]) for row in rows]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.05)
    assert sizes[0] > sizes[2]
    assert all(re.fullmatch(time, row[4]) for row in rows)


@pytest.mark.slow
def test_rounded_weights_of_a_decoder_are_compared_by_its_next_tokens(made, tmp_path: Path):
    words = ["--lengths", "32", "--passages", "1", "--methods", "full", "--rounds", "0"]
    made("small_numbers", "--model", "demo-decoder", *words)
    lines = (tmp_path / "out.md").read_text("utf-8").splitlines()
    rows = {
        cells[1]: cells for cells in (line.strip("| ").split(" | ") for line in lines if line.startswith("| `full`"))
    }
    kl = {kind: float(cells[3]) for kind, cells in rows.items()}
    assert kl["fp32"] == 0.0
    assert 0 < kl["bf16"] < 0.1
    assert 10 * kl["bf16"] < kl["int8 dynamic (torch)"]
    assert rows["fp32"][4] == "1.000"


# ---------------------------------------------------------------------- the published figures of compare


def a_comparison(script) -> dict:
    """A report with the rows that the published table has."""
    report: dict = sample.encoder()
    names = list(script("compare_default").ROWS)
    exact, *others = report["methods"][: len(names) - 1]
    named = zip([exact, copy.deepcopy(exact), *others], names, strict=True)
    report["methods"] = [method | {"method": name} for method, name in named]
    return report


@pytest.fixture
def published(script, tmp_path: Path) -> Path:
    """A folder with what a comparison publishes, in which one row has no figures at 4,096 tokens."""
    made = script("compare_default")
    report = a_comparison(script)
    del report["methods"][3]["model"]["4096"], report["methods"][3]["fidelity"]["4096"]
    for name in (made.PAGE, *(name for names in made.RESULTS.values() for name in names[:2] if name)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before\n<!-- table:begin -->\nold\n<!-- table:end -->\nafter\n")
    made.publish("demo-encoder", report, tmp_path)
    for run in ("demo-decoder", "longer"):
        made.publish(run, sample.causal(), tmp_path)
    return tmp_path


def rows_of(path: Path) -> list[str]:
    """The lines of the table between the marks."""
    text = path.read_text("utf-8")
    assert text.startswith("before\n<!-- table:begin -->\n| ")
    assert text.endswith("|\n<!-- table:end -->\nafter\n")
    return text.splitlines()[2:-2]


def test_the_published_table_has_a_cosine_at_every_length_that_has_a_speed(script, published: Path):
    made = script("compare_default")
    head, _, *rows = rows_of(published / made.PAGE)
    assert head.count("cosine") == head.count("speed") == 3
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in rows}
    assert list(cells) == list(made.ROWS.values())
    assert cells["`full` (exact, SDPA)"] == ["1.000", "1.00×"] * 3
    assert cells["`clustered:clusters=25`"] == ["0.712", "≈0.99×", "0.650", "≈1.00×", "0.601", "≈1.00×"]
    assert cells["`i-clustered:clusters=25`"][4:] == ["–", "–"]
    for result, plot, _ in made.RESULTS.values():
        assert "## Whole forward passes" in (published / result).read_text("utf-8")
        assert plot is None or (published / plot).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [(), ("--busy",)])
def test_a_busy_machine_makes_no_published_figures(script, run_script, monkeypatch, tmp_path: Path, words):
    made, report, published = script("compare_default"), a_comparison(script), []
    report["noise"] = report["noise"] | {"busy": True, "says": "The machine was busy."}
    monkeypatch.setattr(made, "measured", lambda run, texts, work: report)
    monkeypatch.setattr(made, "publish", lambda run, report: published.append(run))
    words = ("novel.txt", "--work", str(tmp_path / "work"), *words)
    if "--busy" in words:
        run_script(made, *words)
    else:
        with pytest.raises(SystemExit, match="nothing is written"):
            run_script(made, *words)
    assert published == (list(made.RESULTS) if "--busy" in words else [])


def measured_rows(made: ModuleType) -> dict[str, dict[str, str]]:
    """The rows of "Whole forward passes" in benchmarks/results/compare-encoder.md, by method."""
    result, *_ = made.RESULTS["demo-encoder"]
    text = (made.ROOT / result).read_text("utf-8").partition("## Whole forward passes")[2].partition("##")[0]
    head, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()]
    return {line[0].partition(" (")[0].partition("@")[0]: dict(zip(head, line, strict=True)) for line in lines}


def test_the_published_table_is_that_of_the_result_file(script):
    """Every figure of the page's table is in the row of its method in benchmarks/results/compare-encoder.md."""
    made = script("compare_default")
    rows = measured_rows(made)
    _, _, *shown = made.TABLE.search((made.ROOT / made.PAGE).read_text("utf-8"))[0].splitlines()
    assert len(shown) == len(made.ROWS)
    for name, line in zip(made.ROWS, shown, strict=True):
        called, *figures = (cell.strip() for cell in line.split("|")[1:-1])
        assert called == made.ROWS[name]
        for length, cosine, speed in zip(("512", "2,048", "4,096"), figures[::2], figures[1::2], strict=True):
            assert float(cosine) == pytest.approx(float(rows[name][f"{length} tokens: cosine mean"]), abs=6e-4)
            assert speed == rows[name][f"{length} tokens: speed-up"].strip("↓")


def test_what_scripts_import_from_the_library_exists():
    for path in sorted(BENCHMARKS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "subquad":
                exec(compile(ast.unparse(node), str(path), "exec"), {})


def test_caches_are_timed_with_each_method(made, tmp_path: Path):
    words = ["--dry-run", "--lengths", "24", "--dtypes", "float32", "--seconds", "0", "--methods", "own full"]
    made("caches", *words, "--batch", "2", "--shortest", "8", "--longest", "16", "--frames", "12")
    rows = [line.strip("| ").split(" | ") for line in (tmp_path / "out.md").read_text("utf-8").splitlines()]
    steps = [row for row in rows if row[0] == "24" and len(row) == 7]
    assert [row[2] for row in steps] == ["`own`", "`full`"]
    assert steps[0][3].endswith("(1.00×)")
    assert [row[5:] for row in steps] == [["–", "–"]] * 2
    batches, speech = ([row[1] for row in rows if row[0] == "float32" and len(row) == n] for n in (5, 3))
    assert batches == speech == ["`own`", "`full`"]
    assert [len(row) for row in rows if row[0] == "24"] == [7, 7, 4]


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (["1"], "of a step, a token"),
        (["2"], "of a step of 2 requests together, a token"),
        (["2", "--shortest", "8"], "together, the shortest of 8 tokens and padded on the left, a token"),
    ],
)
def test_the_parts_of_a_step_are_the_step(made, tmp_path: Path, batch: list[str], what: str):
    words = ["--dry-run", "--lengths", "24", "--dtypes", "float32", "--steps", "3", "--methods", "own full"]
    made("profile_step", *words, "--caches", "dynamic growing", "--batch", *batch)
    sheet = (tmp_path / "out.md").read_text("utf-8")
    assert what in sheet
    rows = [line.strip("| ").split(" | ") for line in sheet.splitlines()]
    steps = [row for row in rows if row[0] == "24"]
    assert [row[2:4] for row in steps] == [
        [kind, f"`{name}`"] for kind in ("dynamic", "growing") for name in ("own", "full")
    ]
    for row in steps:
        assert all(float(part) > 0 for part in row[4:])


def test_a_script_reads_its_options_from_its_main(script, run_script, capsys):
    """Several values are one text, and wrong ones are named together with the right ones."""
    sheet, found = script("sheet"), []
    module = ModuleType("example", "What the script does.")
    module.sheet = sheet

    def main(text: str, lengths: tuple[int, ...] = (512, 2048), methods: tuple[str, ...] = (), turns: int = 3) -> None:
        sheet.check_known("--methods", methods, ("full", "local:window=3,sinks=1"))
        found.append((text, lengths, methods, turns))

    main.__module__, module.main = __name__, main
    run_script(module, "a")
    run_script(module, "a", "--lengths", "3 4", "--methods", "full local:window=3,sinks=1", "--turns", "5")
    run_script(module, "a", "--lengths", "3,4")
    assert found == [
        ("a", (512, 2048), (), 3),
        ("a", (3, 4), ("full", "local:window=3,sinks=1"), 5),
        ("a", (3, 4), (), 3),
    ]
    run_script(module, "--help")
    assert "512 2048" in capsys.readouterr().out
    for words, option, message in [
        (("--lengths", "3 x"), "--lengths", "'3 x' must be whole numbers separated by spaces"),
        (("--lengths", ""), "--lengths", "'' must be whole numbers separated by spaces"),
        (("--lengths", "3", "4"), "--lengths", "several values need quotes: --lengths '3 4'"),
        (("--methods", "ful"), "--methods", "'ful' is none of full, local:window=3,sinks=1"),
    ]:
        with pytest.raises(SystemExit):
            run_script(module, "a", *words)
        error = " ".join(capsys.readouterr().err.split())
        assert option in error
        assert message in error


def test_sampled_rows_read_passages_of_the_folder(script, monkeypatch, tmp_path):
    sampled_rows, folders = script("sampled_rows"), []
    passages = script("decoder_passages")

    def read(pretrained, data, length, count):
        folders.append(data / "gutenberg")
        raise InterruptedError

    monkeypatch.setattr(sampled_rows, "load", lambda model: None)
    monkeypatch.setattr(passages, "passages", read)
    with pytest.raises(InterruptedError):
        sampled_rows.decoder_inputs(tmp_path, 64)
    assert folders == [tmp_path / "gutenberg"]


def test_putting_a_method_into_the_encoder_is_not_timed(script, monkeypatch):
    encoder_attention = script("encoder_attention")

    class Encoder:
        model = None

        def embed(self, items):
            time.sleep(0.02)
            return torch.ones(1, 2)

    @contextmanager
    def slowly(model, name):
        time.sleep(0.2 * (name is not None))
        yield

    monkeypatch.setattr(encoder_attention, "running", slowly)
    (row,) = encoder_attention.of_encoder(Encoder(), [1, 2], "float32", ("full",), 3)
    assert [row[0], row[1], row[4]] == ["whole encoder", "`full`", "cosine 1.0000"]
    assert float(row[3].removesuffix("×")) > 0.4


def test_every_length_of_an_audit_is_measured(script, run_script, monkeypatch, tmp_path):
    audit = script("audit")
    monkeypatch.setattr(audit, "coverage", lambda audits: "coverage")
    monkeypatch.setattr(audit, "drift", lambda data, passages: "drift")
    monkeypatch.setattr(audit, "overhead", lambda data, length: f"At {length:,} tokens.")
    run_script(audit, "--lengths", "512 1024", "--out", str(tmp_path / "out.md"))
    assert "At 512 tokens.\nAt 1,024 tokens.\n" in (tmp_path / "out.md").read_text("utf-8")


def test_plans_of_other_minutes_are_made_again(script, run_script, monkeypatch, tmp_path):
    plans, made = script("plans"), []

    def row(pretrained, texts, on, other, settings):
        made.append(settings.minutes)
        return {"on": on, "length": 64, "seed": 0, "floor": 0.99, "shift": 1.6, "minutes": settings.minutes}

    monkeypatch.setattr(plans, "row", row)
    monkeypatch.setattr(plans, "load", lambda model: None)
    monkeypatch.setattr(plans, "table", lambda rows: "")
    texts = []
    for name in ("novels", "speeches"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("Some text.", "utf-8")
        texts.append(str(tmp_path / name))
    words = [*texts, "--lengths", "64", "--out", str(tmp_path / "plans.jsonl")]
    for minutes in ("8", "2", "2"):
        run_script(plans, *words, "--minutes", minutes)
    assert made == [8.0, 8.0, 2.0, 2.0]
    (tmp_path / "plans.jsonl").write_text('{"on": "novels", "length": 64, "seed": 0, "floor": 0.99, "shift": 1.6}\n')
    run_script(plans, *words)
    assert made[4:] == [8.0]  # the row of an older file is of the default


def test_exact_attention_is_measured_in_two_dtypes_and_says_so(made, tmp_path):
    made("exact_kernel", "--lengths", "16", "--seconds", "0")
    assert ", fp32 and bf16." in (tmp_path / "out.md").read_text("utf-8")
