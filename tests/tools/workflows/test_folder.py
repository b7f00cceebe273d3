"""Whose run a folder is: shown, continued, refused or replaced."""

import json
from dataclasses import replace

import pytest

from subquad.core.errors import InputError
from subquad.tools.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    """The folder of a run with these settings."""
    return lambda **settings: RunFolder(tmp_path, "subquad draw", settings, "run.json", ("parts",))


def work(run):
    """Begin a run, and leave a part of it."""
    run.begin()
    (run.folder / "parts").mkdir(exist_ok=True)
    (run.folder / "parts" / "1").write_text("")


def finish(run, **content):
    run.results.write_text(json.dumps(content))


def test_a_run_begins_continues_and_is_shown(folder):
    run = folder(sizes=(1, 2))
    assert run.finished() is None
    work(run)
    assert run.finished() is None
    finish(run, squares=[1, 4])
    assert run.finished() == {"squares": [1, 4]}
    assert run.finished(again=True) is None


def test_again_removes_a_finished_run_and_never_an_unfinished_one(folder, tmp_path):
    work(folder(size=1))
    folder(size=1).begin(again=True)
    assert (tmp_path / "parts" / "1").exists()
    for again in (True, False):
        with pytest.raises(InputError, match=r"another run, unfinished, with size '1' \(now '2'\); give .*out$"):
            folder(size=2).finished(again)
    finish(folder())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"another run with size '1' \(now '2'\); .*, or --again to replace it$"):
        folder(size=2).finished()
    assert folder(size=2).finished(again=True) is None
    folder(size=2).begin(again=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "run.json"]
    assert json.loads((tmp_path / "run.json").read_text()) == {"size": 2}


@pytest.mark.parametrize("left", [[], ["run.json"], ["run.json", "results.json"]])
def test_a_replacement_that_was_cut_off_goes_on(folder, tmp_path, left):
    """It was killed after it had removed everything but these files."""
    work(folder(size=1))
    finish(folder())
    (tmp_path / "parts" / "1").unlink()
    for name in {"run.json", "results.json"} - {*left}:
        (tmp_path / name).unlink()
    if "results.json" not in left:
        (tmp_path / "parts").rmdir()
    run = folder(size=2)
    assert run.finished(again=True) is None
    run.begin(again=True)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["run.json"]


def test_nested_settings_have_their_names_and_five_are_shown(folder):
    tables = [{"model": {"width": 1}}, {"model": {"width": 2}}]
    work(folder(settings=tables, gone=1))
    with pytest.raises(InputError, match=r"settings\.1\.model\.width '2' \(now '3'\), gone '1' \(now not given\);"):
        folder(settings=[tables[0], {"model": {"width": 3}}]).finished()
    with pytest.raises(InputError, match=r"e not given \(now '5'\) and 4 more; give"):
        folder(**dict(zip("abcdef", range(1, 7), strict=True))).finished()


@pytest.mark.parametrize("file", ["run.json", "results.json"])
def test_a_damaged_file_is_named(folder, tmp_path, file):
    work(folder(size=1))
    finish(folder())
    (tmp_path / file).write_text("{")
    with pytest.raises(InputError, match=rf"{file} is damaged: it is not JSON"):
        folder(size=1).finished()


def test_a_folder_with_anything_else_is_refused(folder, tmp_path):
    (tmp_path / "parts").mkdir()
    with pytest.raises(InputError, match="is not empty and contains no run of subquad draw; give another folder"):
        folder().finished(again=True)


def test_a_finished_run_that_is_extended_is_not_finished_and_again_keeps_it(folder, tmp_path):
    work(folder(size=1))
    finish(folder(), trials=1)
    longer = replace(folder(size=1), is_complete=lambda content: content["trials"] >= 2)
    longer.begin()
    assert not longer.results.exists()
    longer.begin(again=True)
    assert (tmp_path / "parts" / "1").exists()


def test_a_run_that_has_not_done_anything_continues_beside_a_file_of_the_user(folder, tmp_path):
    folder(size=1).begin()
    (tmp_path / "notes.txt").write_text("mine")
    assert folder(size=1).finished() is None
    with pytest.raises(InputError, match=r"another run, unfinished, with size '1' \(now '2'\)"):
        folder(size=2).finished()
    folder(size=1).begin()
    assert (tmp_path / "notes.txt").read_text() == "mine"
