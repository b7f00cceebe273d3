"""Whose run a folder is: shown, continued, refused or replaced."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial

import pytest

from subquad.core.checksums import sealed_json
from subquad.core.errors import InputError
from subquad.core.files import is_part
from subquad.tools.cli import folder as module
from subquad.tools.cli.folder import REMOVING, RunFolder, end_removal
from subquad.tools.cli.kinds import Kind


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a run with these settings, whose results are any JSON object but those of `subquad paint`."""
    paint = Kind("subquad paint", "colours.json", "", lambda content: "colours" in content, str)
    draw = Kind("subquad draw", "results.json", "", lambda content: "mine" not in content, str)
    monkeypatch.setattr(module, "kinds", lambda: (paint, draw))

    def images(content):
        return content.get("images", [])

    def make(**settings):
        return RunFolder(tmp_path, "subquad draw", settings, "run.json", r"parts|part-\d+", images)

    return make


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
        with pytest.raises(InputError, match=r"another run, unfinished, with size 1 \(now 2\); give .*out$"):
            folder(size=2).finished(again)
    finish(folder())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"another run with size 1 \(now 2\); .*, or --again to replace it$"):
        folder(size=2).finished()
    assert folder(size=2).finished(again=True) is None
    folder(size=2).begin(again=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "run.json"]
    assert json.loads((tmp_path / "run.json").read_text()) == {"size": 2}


class Killed(BaseException):
    """No `except Exception` catches it."""


def killed(monkeypatch, at, work, error=Killed):
    """True if `work` changes the disk `at` times or more; from the last of these changes on, it cannot."""
    left = at

    def change(real, *given, **options):
        nonlocal left
        left -= 1
        if left <= 0:  # a process that is killed does not tidy up
            raise error
        return real(*given, **options)

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, partial(change, getattr(os, name)))
        try:
            work()
        except (Killed, InputError, OSError):
            return True
    return False


def names(folder):
    """The files in a folder, temporary ones left out."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and not is_part(path)}


MINE = {"notes.txt", "mine.png", "parts-of-mine/1", "part-one"}
OF_RUN = {"run.json", "results.json", "drawn.png", "parts/1", "part-1"}


def finish_among_files_of_a_user(run):
    work(run)
    for name in sorted(MINE | OF_RUN - {"run.json", "results.json"}):
        (run.folder / name).parent.mkdir(exist_ok=True)
        (run.folder / name).write_text(name)
    finish(run, images=["drawn.png", "gone.png", "../mine.png", "parts-of-mine/1", "..", ""])


@pytest.mark.parametrize("error", [Killed, PermissionError(13, "Permission denied")])
@pytest.mark.parametrize("times", [1, 2])
def test_a_replacement_that_is_cut_off_anywhere_is_completed_and_takes_no_file_of_a_user(
    folder, tmp_path, monkeypatch, times, error
):
    new, points = folder(size=2), 0
    while True:
        points += 1
        finish_among_files_of_a_user(folder(size=1))
        ended = [not killed(monkeypatch, points, lambda: new.begin(again=True), error) for _ in range(times)]
        left = names(tmp_path)
        assert left >= MINE
        if REMOVING not in left:  # one of the runs is whole
            begun = json.loads((tmp_path / "run.json").read_text()) == {"size": 2}
            assert left == MINE | ({"run.json"} if begun else OF_RUN)
        if "results.json" in left:
            assert left >= OF_RUN
        else:
            assert new.finished() is None
        assert new.begin(again=True) in (True, False)
        assert names(tmp_path) == MINE | {"run.json"}
        assert json.loads((tmp_path / "run.json").read_text()) == {"size": 2}
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        if all(ended):
            break
    assert points > 10


def test_a_run_that_is_cleared_leaves_what_it_did_not_make(folder, tmp_path, monkeypatch):
    run, points = folder(size=1), 0
    while True:
        points += 1
        assert run.begin()
        work(run)
        (tmp_path / "notes.txt").write_text("mine")
        ended = not killed(monkeypatch, points, run.clear)
        if not ended and (tmp_path / REMOVING).exists():
            assert folder(size=2).finished() is None
        if not ended:
            folder(size=2 if (tmp_path / REMOVING).exists() else 1).begin()
            run.clear()
        assert names(tmp_path) == {"notes.txt"}
        (tmp_path / "notes.txt").unlink()
        if ended:
            break
    assert points > 5


def test_another_command_completes_a_removal_before_it_begins(folder, tmp_path, monkeypatch):
    finish_among_files_of_a_user(folder(size=1))
    points = 1
    while not (tmp_path / REMOVING).exists():
        points += 1
        assert killed(monkeypatch, points, lambda: folder(size=2).begin(again=True))
    assert (tmp_path / "results.json").exists()
    other = replace(folder(size=1), command="subquad other", file="other.json")
    with pytest.raises(InputError, match="contains a run of subquad draw; give another folder"):
        other.finished()
    (tmp_path / "results.json").unlink()
    assert other.finished() is None
    assert other.begin()
    assert names(tmp_path) == MINE | {"other.json"}


def test_a_list_of_names_to_remove_that_is_damaged_removes_nothing(folder, tmp_path):
    work(folder(size=1))
    for content in ("", '{"names": ["parts"]}', '{"names": ["parts"], "digest": "0"}'):
        (tmp_path / REMOVING).write_text(content)
        for call in (folder(size=1).finished, folder(size=1).begin, lambda: end_removal(tmp_path)):
            with pytest.raises(InputError, match=rf"{REMOVING} is damaged: .*; remove this file, or give another"):
                call()
    assert names(tmp_path) == {"run.json", "parts/1", REMOVING}


@pytest.mark.parametrize("name", ["", ".", "..", "../elsewhere", "parts/1", "/tmp/elsewhere", 1])
def test_a_list_with_names_of_something_elsewhere_removes_nothing(folder, tmp_path, name):
    work(folder(size=1))
    (tmp_path / REMOVING).write_bytes(sealed_json({"names": ["parts", name]}))
    for call in (folder(size=1).finished, folder(size=1).begin, lambda: end_removal(tmp_path)):
        with pytest.raises(InputError, match=rf"{REMOVING} is damaged: .* is not the name of something in the folder"):
            call()
    assert names(tmp_path) == {"run.json", "parts/1", REMOVING}


def test_a_linked_folder_is_unlinked_and_not_emptied(folder, tmp_path):
    run = folder(size=1)
    work(run)
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    (tmp_path / "parts").rename(elsewhere)
    (tmp_path / "parts").symlink_to(elsewhere)
    finish(run)
    linked = tmp_path.with_name(f"{tmp_path.name}-link")
    linked.symlink_to(tmp_path)
    again = replace(run, folder=linked)
    assert again.finished() == {}
    assert again.begin(again=True)
    assert names(elsewhere) == {"1"}
    assert {path.name for path in tmp_path.iterdir()} == {"run.json"}


def test_what_cannot_be_removed_is_named_and_the_removal_goes_on(folder, tmp_path, monkeypatch):
    finish_among_files_of_a_user(folder(size=1))

    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(InputError, match=r"cannot remove .*parts: Permission denied; make it writable, and repeat"):
            folder(size=2).begin(again=True)
    assert {"parts/1", "run.json", REMOVING} <= names(tmp_path)
    folder(size=2).begin()
    assert names(tmp_path) == MINE | {"run.json"}


def test_what_no_run_wrote_is_not_removed(folder, tmp_path):
    finish_among_files_of_a_user(folder(size=1))
    before = names(tmp_path)
    strayed = replace(folder(size=1), stray=lambda: tmp_path / "parts" / "1")
    for call in (strayed.finished, strayed.begin):
        with pytest.raises(InputError, match=r"parts contains 1, which subquad draw did not write, so --again does"):
            call(again=True)
    (tmp_path / "run.json").write_text('{"mine": 1}')
    with pytest.raises(InputError, match=r"run\.json is not of subquad draw: it has no 'size'; move it, or give"):
        folder(size=1).begin(again=True)
    (tmp_path / "run.json").write_text('{"size": 1}')
    finish(folder(), images=5)
    with pytest.raises(InputError, match=r"results\.json is damaged: it has no results of subquad draw; remove this"):
        folder(size=1).begin(again=True)
    assert names(tmp_path) == before


def test_a_file_of_a_user_with_the_name_of_the_record_is_not_replaced(folder, tmp_path):
    (tmp_path / "run.json").write_text('{"mine": 1}')
    with pytest.raises(InputError, match=r"run\.json is not of subquad draw"):
        folder(size=1).begin()
    assert (tmp_path / "run.json").read_text() == '{"mine": 1}'


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("file", ["results.json", "colours.json"])
def test_a_folder_with_a_report_of_another_command_is_refused(folder, tmp_path, file, again):
    work(folder(size=1))
    (tmp_path / file).write_text('{"colours": []}')
    before = names(tmp_path)
    for call in (folder(size=1).finished, folder(size=1).begin):
        with pytest.raises(InputError, match="contains a run of subquad paint; give another folder"):
            call(again=again)
    assert names(tmp_path) == before


def test_begin_tells_whether_the_run_is_new(folder):
    run = folder(size=1)
    assert run.begin()
    assert run.begin()  # it has not done anything
    work(run)
    assert not run.begin()
    finish(run)
    assert not run.begin()
    finish(run)
    assert run.begin(again=True)


def test_nested_settings_have_their_names_and_five_are_shown(folder):
    tables = [{"model": {"width": 1}}, {"model": {"width": 2}}]
    work(folder(settings=tables, gone=1))
    with pytest.raises(InputError, match=r"settings\.1\.model\.width 2 \(now 3\), gone 1 \(now not given\);"):
        folder(settings=[tables[0], {"model": {"width": 3}}]).finished()
    with pytest.raises(InputError, match=r"e not given \(now 5\) and 4 more; give"):
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
    with pytest.raises(InputError, match=r"another run, unfinished, with size 1 \(now 2\)"):
        folder(size=2).finished()
    folder(size=1).begin()
    assert (tmp_path / "notes.txt").read_text() == "mine"
