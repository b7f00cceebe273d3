"""`subquad inspect`: what it measures in a tiny model, what it writes, how it ends on bad input."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import subquad as sq
from subquad.tools.cli.main import app
from subquad.tools.inspect.report import report_of
from subquad.tools.inspect.run import Inspection, measure
from subquad.tools.inspect.schema import InspectedFit, LayerMetrics
from subquad.tools.inspect.settings import INSPECTED, InspectSettings
from subquad.tools.measure.capture import recorded
from subquad.tools.measure.singular_values import cumulative, needed, singular_values
from subquad.tools.measure.utility import attention_utility, utilities
from subquad.tools.models.pretrained import load

run = CliRunner().invoke
FILES = {
    "results.json", "results.md", "utility.png", "bucket-sizes.png", "bucket-histograms.png", "attention-maps.png"
}  # fmt: skip
METHODS = ("clustered:clusters=4", "lsh:buckets=4", "smyrf:clusters=4,rounds=1", "lha:buckets=4,hidden=4")


def inspected(model, text, folder, **settings):
    given = InspectSettings(model=model, text=(text,), **{"methods": METHODS, "sequences": 2, "tokens": 8} | settings)
    return report_of(measure(given, folder), given)


def of(report, name):
    return next(method for method in report.methods if method.method.startswith(name))


@pytest.fixture(scope="module")
def report(model, text, tmp_path_factory):
    return inspected(model("bert"), text, tmp_path_factory.mktemp("out"))


def test_the_figures_are_those_of_the_measures(model, text, report):
    pretrained = load(model("bert"))
    inspection = Inspection.prepare(InspectSettings(model=model("bert"), text=(text,), methods=METHODS, sequences=2))
    method = sq.RandomHash(buckets=4)
    found = []
    for item in inspection.items:
        with recorded(pretrained.model) as calls:
            pretrained.forward([item])
        q, k, scale = calls[1].query, calls[1].key, calls[1].options["scale"]
        found.append((
            utilities({}, q, k, keys=16, scale=scale)[0][0],
            attention_utility(method, q, k, scale=scale).utility[0],
            attention_utility(replace(method, enlarge=1.0), q, k, scale=scale).utility[0],
        ))  # fmt: skip
    bound, given, lean = (torch.stack(values).mean(0).tolist() for values in zip(*found, strict=True))
    layer = of(report, "lsh").layers["1"]
    assert report.bounds["1"] == pytest.approx(bound)
    assert layer.utility["given"].utility == pytest.approx(given)
    assert layer.utility["n_b"].utility == pytest.approx(lean)


def test_every_layer_has_utilities_within_their_bounds_and_sizes_that_add_up(report):
    for name in ("lsh", "smyrf", "lha"):
        for layer in of(report, name).layers.values():
            for figures in layer.utility.values():
                assert all(u <= b + 1e-6 for u, b in zip(figures.utility, figures.bound, strict=True))
                assert all(16 <= keys <= 64 for keys in figures.keys)
            for side in ("queries", "keys"):
                assert torch.tensor(getattr(layer, side)).shape == (2, 4, 4)  # sequences, heads, buckets
                assert (torch.tensor(getattr(layer, side)).sum(-1) == 64).all()
        assert set(vars(of(report, name).imbalance)) == {"size", "size_of_filled", "ratio", "ratio_of_both"}
    assert of(report, "smyrf").layers["0"].utility["n_b"].keys == [16.0] * 4


def test_what_chooses_no_keys_is_in_the_maps_alone(report):
    assert of(report, "clustered").layers == {"0": LayerMetrics(), "1": LayerMetrics()}
    blind = "In the attention maps alone, because these do not declare which keys a query attends to: clustered"
    assert any(note.startswith(blind) for note in report.notes)
    assert list(report.maps.weights) == ["full", *(method.method for method in report.methods)]


def test_learned_methods_are_not_calibrated_without_an_adapter(report):
    assert of(report, "lha").method == "lha:buckets=4,hidden=4 (not calibrated)"
    assert of(report, "lha").calibrated is False
    assert of(report, "lsh").calibrated is None
    assert any("Not calibrated" in note for note in report.notes)


def test_maps_are_the_weights_of_the_head_that_is_asked_for(model, text, tmp_path):
    asked = inspected(model("bert"), text, tmp_path, tokens=64, layer=0, head=2, methods=("clustered:clusters=4",))
    maps = asked.maps
    weights = {name: torch.tensor(of) for name, of in maps.weights.items()}
    assert (maps.layer, maps.head, len(maps.tokens)) == (0, 2, 64)
    assert (maps.tokens[0], maps.tokens[-1]) == ("[CLS]", "[SEP]")
    for of_method in weights.values():
        torch.testing.assert_close(of_method.sum(-1), torch.ones(64), atol=1e-4, rtol=0)
    assert not weights["full"].allclose(weights["clustered:clusters=4"], atol=0.01)
    other = inspected(model("bert"), text, tmp_path, tokens=64, layer=0, head=3, methods=("clustered:clusters=4",))
    assert not weights["full"].allclose(torch.tensor(other.maps.weights["full"]), atol=0.01)


def test_an_adapter_brings_its_own_parameters(model, text, tmp_path):
    pretrained = load(model("bert")).model
    method = sq.LearnedHash(buckets=4, hidden=4)
    bounds = {n: method.bind(heads=4, head_dim=8) for n in range(2)}
    sq.hf.save_adapter(pretrained, tmp_path / "as-it-starts", bounds=bounds)
    for bound in bounds.values():
        torch.nn.init.normal_(bound.learned.query.weights[0], std=5.0, generator=torch.Generator().manual_seed(0))
    history = [{"step": 0, "layers": {"0": {"kl_query": 1.0}}}]
    sq.hf.save_adapter(pretrained, tmp_path / "changed", bounds=bounds, record={"history": history})
    adapters = (tmp_path / "as-it-starts", tmp_path / "changed")
    found = inspected(model("bert"), text, tmp_path / "out", adapters=adapters)
    start, same, other = (of(found, f"lha:buckets=4,hidden=4{end}") for end in (" (", "@as", "@changed"))
    assert same.calibrated is True
    assert same.layers == start.layers
    assert other.layers != start.layers
    assert f"--adapter {tmp_path}/changed" in found.command
    assert found.fits == [InspectedFit(other.method, 4, history)]


def save_adapter(model, folder, buckets, spread):
    """Save an adapter of `lha` with these numbers of buckets by layer, and its parameters drawn with this spread."""
    bounds = {n: sq.LearnedHash(buckets=count).bind(heads=4, head_dim=8) for n, count in enumerate(buckets)}
    for parameter in (p for bound in bounds.values() for p in bound.parameters()):
        torch.nn.init.normal_(parameter, std=spread, generator=torch.Generator().manual_seed(0))
    return sq.hf.save_adapter(model, folder, bounds=bounds)


def test_layers_of_an_adapter_may_have_different_numbers_of_buckets(model, text, tmp_path):
    folder = save_adapter(load(model("bert")).model, tmp_path / "mixed", (4, 8), spread=1.0)
    given = InspectSettings(model=model("bert"), text=(text,), methods=(), adapters=(folder,), sequences=2, tokens=8)
    (found,) = report_of(measure(given, tmp_path / "out"), given).methods
    few, many = (found.layers[number].imbalance for number in "01")
    assert found.imbalance.size == pytest.approx((4 * few.size + 8 * many.size) / 12)
    assert found.imbalance.ratio == pytest.approx((4 * few.ratio + 8 * many.ratio) / 12)
    done = run(app, ["inspect", model("bert"), "--text", str(text), "--adapter", str(folder), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output


def test_two_adapters_whose_folders_have_one_name_are_refused(model, text, tmp_path):
    bert = load(model("bert")).model
    folders = [save_adapter(bert, tmp_path / name / "same", (4, 4), n) for n, name in enumerate(("a", "b"), 1)]
    given = [part for folder in folders for part in ("--adapter", str(folder))]
    done = run(app, ["inspect", model("bert"), "--text", str(text), *given, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2, done.output
    assert "two rows are called 'lha:buckets=4@same'" in done.stderr


def test_a_method_that_reads_the_layers_input_is_left_out_with_its_reason(model, text, tmp_path):
    found = inspected(model("bert"), text, tmp_path, methods=("lsh:buckets=4", "synthesizer:logits=dense"))
    assert "reads the layer's input" in of(found, "synthesizer").layers["0"].reason
    assert of(found, "lsh").layers["0"].utility is not None
    assert list(found.maps.weights) == ["full", "lsh:buckets=4"]
    assert any("synthesizer" in note and "layers 0, 1" in note for note in found.notes)


def test_a_model_with_capped_logits_is_refused_before_anything_is_measured(model, text, tmp_path):
    done = run(app, ["inspect", model("gemma2"), "--text", str(text), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2, done.output
    assert "attention layer 0 (" in done.stderr
    assert "has capped logits" in done.stderr


def test_a_layer_that_runs_several_times_is_noted(model, text, tmp_path):
    report = inspected(model("albert"), text, tmp_path, methods=("lsh:buckets=4",))
    assert list(report.bounds) == ["0"]
    assert any(note.startswith("Layer 0 runs 3 times on each sequence") for note in report.notes)


def test_causal_layers_have_the_utility_of_causal_attention(model, text, tmp_path):
    found = inspected(model("gpt2"), text, tmp_path, tokens=64)
    full = torch.tensor(found.maps.weights["full"])
    assert full.triu(1).abs().max() == 0
    assert found.maps.weights.keys() == {
        "full",
        "clustered:clusters=4",
        "lsh:buckets=4",
        "lha:buckets=4,hidden=4 (not calibrated)",
    }
    assert "causal" in of(found, "smyrf").layers["0"].reason
    assert any("smyrf" in note and "layers 0, 1" in note for note in found.notes)
    assert any("Causal layers" in note for note in found.notes)
    assert all(keys <= 32.5 for keys in of(found, "lsh").layers["0"].utility["given"].keys)


def test_default_methods_take_the_number_of_buckets(model, text, tmp_path):
    found = inspected(model("bert"), text, tmp_path, methods=INSPECTED, buckets=8)
    assert of(found, "lsh").settings["buckets"] == 8
    assert of(found, "smyrf").settings["clusters"] == 8
    assert found.settings["keys"] == 8


def test_the_spectrum_is_that_of_the_measure_and_comes_when_it_is_asked_for(model, text, tmp_path, report):
    assert report.spectrum is None
    assert "--spectrum" not in report.command
    asked = inspected(model("bert"), text, tmp_path, methods=("lsh:buckets=4",), spectrum=True)
    assert asked.command.endswith("--spectrum")
    assert any("low rank" in note for note in asked.notes)
    found = asked.spectrum
    assert (found.index, found.at[:16], found.at[-1]) == (16, list(range(1, 17)), 64)
    pretrained = load(model("bert"))
    settings = InspectSettings(model=model("bert"), text=(text,), methods=(), sequences=2)
    values = []
    for item in Inspection.prepare(settings).items:
        with recorded(pretrained.model) as calls:
            pretrained.forward([item])
        values.append(singular_values(calls[1].query, calls[1].key, scale=calls[1].options["scale"])[0])
    shares = torch.stack([cumulative(each) for each in values]).mean(0)[:, [j - 1 for j in found.at]]
    layer = found.layers["1"]
    torch.testing.assert_close(torch.tensor(layer.curves).double(), shares, atol=1e-5, rtol=0)
    assert layer.needed == pytest.approx(torch.stack([needed(each, 0.9) for each in values]).mean(0).tolist())


def test_an_interrupted_run_goes_on(model, text, tmp_path, monkeypatch):
    whole = inspected(model("bert"), text, tmp_path / "whole", spectrum=True)
    maps = Inspection.maps

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Inspection, "maps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        inspected(model("bert"), text, tmp_path / "out", spectrum=True)
    monkeypatch.setattr(Inspection, "maps", maps)
    rest = inspected(model("bert"), text, tmp_path / "out", spectrum=True)
    assert any("4 of 9 units come from an earlier, interrupted run" in note for note in rest.notes)
    assert (rest.methods, rest.spectrum) == (whole.methods, whole.spectrum)


# ---------------------------------------------------------------------- the command


def test_the_command_writes_its_files_and_prints_a_table(model, text, tmp_path):
    given = ["inspect", model("bert"), "--text", str(text), "--methods", " ".join(METHODS[1:]), "--sequences", "1"]
    done = run(app, [*given, "--tokens", "8", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for word in ("utility", "uneven", "not calibrated", "upper bound", "results.json"):
        assert word in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert "### Layer 1" in (tmp_path / "results.md").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["command"].startswith("subquad inspect ")


def test_json_alone(model, text, tmp_path):
    given = ["inspect", model("bert"), "--text", str(text), "--methods", "lsh:buckets=4", "--sequences", "1"]
    done = run(app, [*given, "--spectrum", "--out", str(tmp_path), "--json"])
    assert len(json.loads(done.stdout)["spectrum"]["layers"]) == 2
    assert (tmp_path / "spectrum.png").exists()
    assert json.loads(done.stdout)["kind"] == "subquad inspect"


def test_bad_input_is_one_line_and_exit_code_2(model, text, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "hollow").mkdir()
    bounds = {n: sq.LearnedHash(buckets=4).bind(heads=4, head_dim=8) for n in range(2)}
    sq.hf.save_adapter(load(model("masked")).model, tmp_path / "other", bounds=bounds)
    bad = {
        "--buckets 0 must be at least 1": ["--buckets", "0"],
        "--buckets 65 is more than the 64 tokens": ["--buckets", "65"],
        "a length of 3 leaves 1 token besides the special ones; passages have 16 or more": ["--length", "3"],
        "a length of 1 leaves 0 tokens beside": ["--length", "1", "--spectrum"],
        "--sequences 0 must be at least 1": ["--sequences", "0"],
        "--tokens 0 must be at least 1": ["--tokens", "0"],
        "--length 65 is past the 64 positions": ["--length", "65"],
        "no layer 2: ": ["--layer", "2"],
        "no layer -1: ": ["--layer", "-1"],
        "has heads 0 to 3": ["--head", "4"],
        "did you mean 'lsh'": ["--methods", "lhs"],
        "buckets=0 takes their number": ["--methods", "lsh:buckets=0"],
        "no file or folder at": ["--text", str(tmp_path / "missing.txt")],
        "no adapter at": ["--adapter", str(tmp_path / "hollow")],
        "was made for a BertForMaskedLM": ["--adapter", str(tmp_path / "other")],
        "is a file; give a folder": ["--out", str(tmp_path / "file")],
        "no device 'tpu9'": ["--device", "tpu9"],
    }
    for message, arguments in bad.items():
        where = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
        given = [] if "--text" in arguments else ["--text", str(text)]
        done = run(app, ["inspect", model("bert"), *arguments, *given, *where])
        assert done.exit_code == 2, (message, done.output, done.exception)
        assert message in done.stderr, (message, done.stderr)
        assert done.stderr.strip().splitlines()[-1].startswith("error:")
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_value_that_is_not_finite_names_its_layer(model, text, tmp_path):
    done = run(app, ["inspect", model("nan"), "--text", str(text), "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "key of attention layer 1" in done.stderr
