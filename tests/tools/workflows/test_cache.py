"""Results of jobs that are kept: found again, checked, and cleared without touching what is somebody else's."""

import json
import shutil
from pathlib import Path

import pytest

from subquad.core import files
from subquad.core.errors import InputError
from subquad.research.papers.catalogue import load
from subquad.research.papers.run import cells_in
from subquad.tools.runs.cache import MARK, PROGRESS, clear, run_cache
from subquad.tools.runs.jobs import Job


def never(progress):
    raise AssertionError("it was kept")


def test_a_job_runs_once(tmp_path):
    assert run_cache(tmp_path, {"a": 1}).get(Job("unit", lambda progress: [1, None, 0.1])) == [1, None, 0.1]
    again = run_cache(tmp_path, {"a": 1})
    assert again.resumed == 1
    assert again.get(Job("unit", never)) == [1, None, 0.1]
    assert run_cache(tmp_path, {"a": 2}).resumed == 0


def test_a_damaged_result_is_named_and_the_remedy_works(tmp_path):
    store = run_cache(tmp_path, {})
    store.get(Job("unit", lambda progress: 0.125))
    (path,) = store.folder.glob("*.json")
    path.write_text(path.read_text().replace("0.125", "0.625"))
    with pytest.raises(InputError, match=r"\.json is damaged: its contents differ from .*; remove this file and"):
        store.get(Job("unit", never))
    path.unlink()
    assert store.get(Job("unit", lambda progress: 0.125)) == 0.125


def test_a_result_under_the_name_of_another_is_named(tmp_path):
    store = run_cache(tmp_path, {})
    store.get(Job("one", lambda progress: 1))
    (path,) = store.folder.glob("*.json")
    store.get(Job("two", lambda progress: 2))
    (other,) = set(store.folder.glob("*.json")) - {path}
    other.write_bytes(path.read_bytes())
    with pytest.raises(InputError, match="it is of the key 'one', not of 'two'"):
        store.get(Job("two", never))


def test_clearing_forgets_all_runs(tmp_path):
    for number in range(2):
        run_cache(tmp_path, {"a": number}).get(Job("unit", lambda progress: 1))
    clear(tmp_path)
    assert list(tmp_path.iterdir()) == []
    clear(tmp_path)


def test_a_progress_folder_of_somebody_else_is_refused_and_stays(tmp_path):
    theirs = tmp_path / PROGRESS / "thesis.txt"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    with pytest.raises(InputError, match=r"\.progress was not made by subquad; give another folder"):
        run_cache(tmp_path, {})
    clear(tmp_path)
    assert theirs.read_text() == "mine"
    assert [path.name for path in theirs.parent.iterdir()] == ["thesis.txt"]


def test_what_somebody_puts_beside_our_results_stays(tmp_path):
    run_cache(tmp_path, {}).get(Job("unit", lambda progress: 1))
    (tmp_path / PROGRESS / "notes").mkdir()
    (tmp_path / PROGRESS / "notes" / "a").write_text("mine")
    clear(tmp_path)
    assert {path.name for path in (tmp_path / PROGRESS).iterdir()} == {"notes", MARK}
    assert run_cache(tmp_path, {}).resumed == 0


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PROGRESS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="was not made by"):
        run_cache(tmp_path / "out", {})
    (tmp_path / "elsewhere" / MARK).write_text("")
    clear(tmp_path / "out")
    assert (tmp_path / "elsewhere" / MARK).exists()


def test_killed_while_it_was_made_it_is_ours(tmp_path):
    (tmp_path / PROGRESS).mkdir()
    (tmp_path / PROGRESS / f".{MARK}.01234567{files.PART}").write_text("half of")
    run_cache(tmp_path, {}).get(Job("unit", lambda progress: 1))
    clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_loses_no_result(tmp_path, monkeypatch):
    store = run_cache(tmp_path, {})
    store.get(Job("one", lambda progress: 1))

    def full(path, data):
        path.write_bytes(data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_to_disk", full)
    with pytest.raises(InputError, match=r"cannot write .*\.json: No space left on device; free some space there"):
        store.get(Job("two", lambda progress: 2))
    assert [json.loads(path.read_text())["result"] for path in store.folder.iterdir()] == [1]


def test_a_result_that_an_earlier_commit_kept_is_read(tmp_path):
    cache = cells_in(tmp_path)
    shutil.copy(Path(__file__).with_name("records") / "spectrum_untrained.json", cache.folder)
    key = next(cell.key for cell in load("spectrum").cells(load("spectrum").scales["smoke"]) if "untrained" in cell.key)
    result = cache.get(Job(key, never))
    assert result["at"] == list(range(1, 33))
    assert cache.read(key, dict).seconds >= 0.0
