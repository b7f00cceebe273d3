"""compare with learned parameters: adapters, calibration on the way, and rows without either."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad as sq
from subquad import hf
from subquad.core.errors import InputError
from subquad.methods import parse_method
from subquad.tools.calibrate import run as fitting
from subquad.tools.compare import comparison
from subquad.tools.compare.code import code_of
from subquad.tools.compare.reading import marks, notes
from subquad.tools.compare.run import measure, prepare
from subquad.tools.compare.schema import Attachment, MethodReport
from subquad.tools.compare.settings import CompareSettings
from subquad.tools.measure.exact_limits import exact_up_to
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.models.pretrained import load
from subquad.tools.runs.records import from_plain
from tests.tools.report import sample
from tests.tools.workflows.reports import report_of

pytestmark = pytest.mark.usefixtures("undisturbed")

LHA = "lha:buckets=3,hidden=8"


@pytest.fixture
def settings(model, text):
    return CompareSettings(
        model=model("bert"),
        text=(text,),
        methods=(LHA, "lsh:buckets=3"),
        lengths=(48, 96),
        op_lengths=(32,),
        passages=4,
        layers=True,
    )


@pytest.fixture
def adapter(settings, other_text, tmp_path):
    small = fitting.CalibrateSettings(method=LHA, text=(other_text,), model=settings.model, steps=3, max_length=48)
    fitted, generator = fitting.calibrate(small, tmp_path / "mine"), torch.Generator().manual_seed(0)
    for bound in fitted.bounds.values():
        for parameter in bound.parameters():  # three steps may leave the best ones where they began
            parameter.data += torch.randn(parameter.shape, generator=generator)
    return fitting.save(fitted, tmp_path / "mine")


def notes_of(report):
    return notes(sample.record(report))


def marks_of(report, row):
    return marks(sample.record(report), from_plain(MethodReport, row))


def by_method(report):
    return {method["method"]: method for method in report["methods"]}


def test_learned_parameters_that_nobody_fitted_are_said_to_be_so(settings, tmp_path):
    report = report_of(measure(settings, tmp_path))
    assert set(by_method(report)[LHA]["model"]) == {"48", "96"}
    assert f"{LHA}: not calibrated: its learned parameters are those that it starts with." in report["notes"]
    assert not any(note.startswith("lsh:buckets=3: not calibrated") for note in report["notes"])
    assert marks_of(report, by_method(report)[LHA]) == ["not calibrated"]
    assert marks_of(report, by_method(report)["lsh:buckets=3"]) == []


def test_an_adapter_is_a_row_of_its_own(settings, adapter, tmp_path):
    report = report_of(measure(replace(settings, adapters=(adapter,)), tmp_path / "out"))
    rows = by_method(report)
    assert list(rows) == ["full", LHA, "lsh:buckets=3", f"{LHA}@mine"]
    plain, fitted = rows[LHA]["quality"]["48"], rows[f"{LHA}@mine"]["quality"]["48"]
    assert plain["layer_error"] != fitted["layer_error"]
    assert 0 < fitted["weights_l1"] < 2
    assert f"--adapter {adapter}" in report["command"]
    attached, read = Attachment(dtype="fp32", steps={"0": f"{LHA}@mine"}, lengths=[48]), sample.record(report)
    code = code_of(attached, read.methods, read.model, settings.model)
    made: dict[str, Any] = {}
    exec(code, made)
    assert code.endswith(f'sq.hf.load_adapter(model, "{adapter}")')
    assert set(map(str, sq.hf.describe(made["model"]).methods.values())) == {LHA}


@pytest.mark.parametrize("name", ["linformer:k=5", "mixed-heads:methods=local:window=4+linformer:k=5"])
def test_parameters_for_a_length_run_up_to_it_and_the_report_says_so(settings, tmp_path, name):
    asked = replace(settings, methods=(name,), op_lengths=(32, 96))
    report = report_of(measure(asked, tmp_path / "out"))
    rows = by_method(report)
    assert rows[name]["quality"]["48"]["layer_error"]
    assert set(rows["full"]["quality"]) == {"48", "96"}
    assert set(rows["full"]["op"]) == {"32", "96"}
    assert set(rows[name]["quality"]) == {"48"}
    assert set(rows[name]["op"]) == {"32"}
    assert notes_of(report) == [f"{name}: its parameters are for at most 64 tokens, and it was not run on more"]
    assert not any("was left out" in note for note in report["notes"])
    beyond = report_of(measure(replace(asked, op_lengths=(96,)), tmp_path / "beyond"))
    assert "crossover" not in by_method(beyond)[name]


def test_an_adapter_for_shorter_inputs_than_the_main_length_is_refused(settings, tmp_path):
    loaded = load(settings.model)
    hf.swap(loaded.model, "linformer:k=5", max_length=32)
    hf.save_adapter(loaded.model, tmp_path / "short")
    report = report_of(measure(replace(settings, adapters=(tmp_path / "short",)), tmp_path / "out"))
    refused = by_method(report)["linformer:k=5@short"]
    assert refused["status"] == "refused"
    assert refused["reason"] == "its parameters are for at most 32 tokens"
    assert set(by_method(report)[LHA]["model"]) == {"48", "96"}


def test_the_row_of_an_adapter_in_the_working_folder_has_its_name(settings, adapter, monkeypatch):
    monkeypatch.chdir(adapter)
    assert prepare(replace(settings, adapters=(Path("."),))).rows[-1].name == f"{LHA}@mine"


def test_a_row_that_is_too_slow_is_told_apart_from_one_that_cannot_run(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "_worth", lambda row, seconds, growth: row.is_exact)
    report = report_of(measure(replace(settings, methods=("lsh:buckets=3", "linformer:k=5")), tmp_path / "out"))
    assert [note.partition(":")[0] for note in report["notes"] if "was left out from 96" in note] == ["lsh"]
    assert [note.partition(":")[0] for note in notes_of(report)] == ["linformer"]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("linformer:projection=mean-pool,k=48", 48),
        ("nystrom:landmarks=50", 50),
        ("local:window=48", 48),
        ("lha-tail:keys=60", 60),
        ("clustered:clusters=64", 64),
        ("i-clustered:topk=64", 64),
        ("tilted-pool:window=50", 50),
        ("tilted-pool:window=0,pools=50", 50),
        ("sinkhorn:block=64", 64),
        ("lsh:buckets=1,bucket_size=60", 60),
        ("lha:buckets=1", math.inf),
        ("smyrf:clusters=1", math.inf),
        ("smyrf:clusters=2", 0),
        ("performer", 0),
    ],
)
def test_settings_tell_where_a_method_is_exact(settings, name, most):
    method = parse_method(name)
    assert exact_up_to(method, False, torch.float32) == most
    q, k, v = (torch.randn(1, 2, 48, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    bound = method.bind(heads=2, head_dim=8, max_length=48) if method.traits.learned else method
    error = relative_error(bound(q, k, v).detach(), sq.attention(q, k, v, method="full"))
    assert error < 1e-4 if most else error > 1e-2


def test_exact_by_its_settings_is_said_below_the_table_and_never_recommended(settings, tmp_path):
    name = "linformer:k=48,projection=mean-pool"
    report = report_of(measure(replace(settings, methods=(name,), min_fidelity=1e-6), tmp_path))
    assert notes_of(report) == [f"{name}: is exact attention on at most 48 tokens; a speed-up there is due to chance"]
    at_own, longer, *_ = report["recommendation"]["reasons"]
    assert name not in at_own
    assert name in longer
    larger = report_of(measure(replace(settings, methods=("lha:buckets=1", "local:window=47")), tmp_path / "more"))
    assert notes_of(larger) == [
        "lha:buckets=1: is exact attention with these settings; a speed-up there is due to chance"
    ]


def test_an_adapter_alone_is_enough(settings, adapter, tmp_path):
    report = report_of(measure(replace(settings, methods=(), adapters=(adapter,)), tmp_path / "out"))
    assert list(by_method(report)) == ["full", f"{LHA}@mine"]


def test_other_parameters_are_measured_anew(settings, adapter):
    first = prepare(replace(settings, adapters=(adapter,)))
    again = prepare(replace(settings, adapters=(adapter,)))
    assert first.fingerprint() == again.fingerprint()
    next(iter(again.rows[-1].bounds[0].parameters())).data += 1
    assert first.fingerprint() != again.fingerprint()


def test_adapters_of_other_models_are_refused(settings, adapter, model):
    with pytest.raises(InputError, match="was made for a BertModel"):
        prepare(replace(settings, model=model("masked"), adapters=(adapter,)))


def test_an_adapter_that_mixes_methods_is_refused(settings, tmp_path):
    loaded = load(settings.model).model
    hf.swap(loaded, {0: LHA, 1: "lha:buckets=2"})
    hf.save_adapter(loaded, tmp_path / "mixed")
    with pytest.raises(InputError, match=r"mixes methods \(lha:buckets=2, lha:buckets=3,hidden=8\)"):
        prepare(replace(settings, adapters=(tmp_path / "mixed",)))


def test_calibrate_fits_what_can_be_fitted_first(settings, other_text, quick, tmp_path):
    asked = replace(settings, calibrate=(other_text,))
    rows = by_method(report_of(measure(asked, tmp_path / "out")))
    folder = tmp_path / "out" / "adapters" / "lha-buckets-3-hidden-8"
    assert list(rows) == ["full", f"{LHA}@{folder.name}", "lsh:buckets=3"]
    assert hf.read_adapter(folder).record["text"]["source"] == [str(other_text)]
    assert not (folder / ".progress").exists()
    assert quick == [LHA]
    measure(asked, tmp_path / "out")
    assert quick == [LHA]  # the adapter of the run before serves again
    measure(replace(asked, lengths=(32, 96)), tmp_path / "out")
    assert quick == [LHA, LHA]


def test_what_is_exact_anyway_is_compared_without_calibration(settings, other_text, quick, tmp_path):
    asked = replace(settings, methods=(LHA, "lha-tail:keys=48"), calibrate=(other_text,))
    report = report_of(measure(asked, tmp_path / "out"))
    exact = by_method(report)["lha-tail:keys=48"]
    assert exact["quality"]["48"]["cosine_mean"] == pytest.approx(1.0, abs=1e-6)
    assert marks_of(report, exact) == ["not calibrated"]


def test_a_damaged_adapter_of_an_earlier_run_is_fitted_again(settings, other_text, quick, tmp_path):
    asked = replace(settings, calibrate=(other_text,))
    measure(asked, tmp_path / "out")
    (tmp_path / "out" / "adapters" / "lha-buckets-3-hidden-8" / "adapter.safetensors").write_bytes(b"")
    measure(asked, tmp_path / "out")
    assert quick == [LHA, LHA]


def test_what_a_causal_model_cannot_run_is_not_fitted(settings, other_text, quick, model, tmp_path):
    names = ("tilted-pool", "learned-feature-map")
    asked = replace(settings, model=model("gpt2"), methods=names, calibrate=(other_text,))
    comparison = prepare(asked, tmp_path / "out")
    assert quick == ["learned-feature-map"]
    assert [row.name for row in comparison.rows] == ["full", "learned-feature-map@learned-feature-map"]
    assert [row.name for row in comparison.refused] == ["tilted-pool"]


def test_the_text_compared_on_is_not_calibrated_on(settings, text):
    for given in (text, text.parent, text / "1.txt"):
        with pytest.raises(InputError, match=r"of --text, .*: a method would be measured on what it was fitted on"):
            prepare(replace(settings, calibrate=(given,)))


def test_a_copy_of_the_text_compared_on_is_not_calibrated_on(settings, text, other_text, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(other_text, copy)
    for file in text.glob("*.txt") if text.is_dir() else [text]:
        shutil.copy(file, copy / f"again-{file.name}")
    with pytest.raises(InputError, match=r"copy has the documents of 100% of --text .*: a method would be measured on"):
        prepare(replace(settings, calibrate=(copy,)))


def test_nothing_to_calibrate_is_named(settings, other_text):
    with pytest.raises(InputError, match=r"none of the methods has .* those of lha, .*tilted-pool, .* can be"):
        prepare(replace(settings, methods=("lsh:buckets=3",), calibrate=(other_text,)))
