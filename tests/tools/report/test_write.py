import json
import os

import pytest

from subquad.tools.compare import tables, write
from subquad.tools.compare.write import write_report
from tests.tools.report import sample

NAMES = {"report.json", "report.md", "report.html", *tables.PLOTS}


def test_writes_into_the_folder_itself(tmp_path, unpainted):
    folder = tmp_path / "new" / "folder"
    report = sample.encoder()
    paths = write_report(sample.record(report), folder)
    assert set(paths) == {folder / name for name in NAMES} == set(folder.iterdir())
    assert json.loads((folder / "report.json").read_text()) == report


def test_nothing_is_written_when_drawing_fails(tmp_path, monkeypatch):
    def fail(report):
        raise RuntimeError("no ink")

    monkeypatch.setattr(write, "plots", fail)
    with pytest.raises(RuntimeError, match="no ink"):
        write_report(sample.record(sample.encoder()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_earlier_report_survives_a_full_disk(tmp_path, monkeypatch, undrawn):
    write_report(sample.record(sample.encoder()), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(write, "html", lambda report, plots: _Unwritable())
    with pytest.raises(TypeError):
        write_report(sample.record(sample.causal()), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class _Unwritable(str):
    """Encodes to something that cannot be written, so that the last file fails."""

    def encode(self, *_):
        return None


def test_plots_of_an_earlier_report_do_not_stay(tmp_path, undrawn):
    (tmp_path / "error-by-layer.png").write_bytes(b"old")
    (tmp_path / "mine.png").write_bytes(b"mine")
    write_report(sample.record(sample.encoder()), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "report.md", "report.html", "mine.png"}


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
def test_files_have_the_usual_mode(tmp_path, undrawn):
    usual = tmp_path / "usual"
    usual.touch()
    paths = write_report(sample.record(sample.encoder()), tmp_path)
    assert {path.stat().st_mode for path in paths} == {usual.stat().st_mode}


def test_infinity_is_null_in_json(tmp_path, undrawn):
    report = sample.encoder()
    report["methods"][1]["quality"]["512"]["weights_l1"] = float("inf")
    write_report(sample.record(report), tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["methods"][1]["quality"]["512"]["weights_l1"] is None
