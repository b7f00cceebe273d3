"""The model at hand, and calibration on the way to a figure."""

import pytest

from subquad.core.errors import InputError
from subquad.research.papers.at_hand import AtHand, at_hand, calibrate, calibrated_row
from subquad.research.papers.base import Context


def context(folder, key, *after):
    (folder / key).mkdir(parents=True, exist_ok=True)
    return Context(folder / key, None, "cpu", lambda what, done, total: None, after)


def test_calibration_leaves_an_adapter_for_other_cells_and_is_not_done_twice(tmp_path):
    own = context(tmp_path, "fit")
    at = at_hand("random", own)
    asked = {"steps": 2, "length": 48}
    first = calibrate(at, "lha:buckets=4", ["fit.txt"], own, **asked)
    assert first["metric"] == "utility"
    assert first["steps"] == 2
    assert 0.0 < first["start"] <= first["kept"] < 1.0
    written = (own.folder / "adapter" / "adapter.safetensors").stat().st_mtime_ns
    assert calibrate(at, "lha:buckets=4", ["fit.txt"], own, **asked) == first
    assert (own.folder / "adapter" / "adapter.safetensors").stat().st_mtime_ns == written
    row = calibrated_row(at.load("cpu"), "fit", context(tmp_path, "other", "fit"))
    assert row.layers == [0, 1]


def test_text_without_a_data_folder_is_refused():
    with pytest.raises(InputError, match=r"reads fit\.txt: --data-dir FOLDER"):
        AtHand(None, None).texts(["fit.txt"])
