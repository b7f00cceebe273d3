"""Files are whole or absent, and notice damage."""

import ast
import json
import os
import re
import stat
from pathlib import Path

import pytest
import torch

import subquad
from subquad.core import checksums as seals
from subquad.core import files
from subquad.core.errors import InputError

SOURCE = Path(subquad.__file__).parent


class PowerLoss(BaseException):
    """Nothing after this is done, not even what tidies up."""


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_replaced_at_once(tmp_path):
    files.write(tmp_path / "deep" / "a.txt", "old")
    assert files.write(tmp_path / "deep" / "a.txt", b"new") == tmp_path / "deep" / "a.txt"
    assert contents(tmp_path / "deep") == {"a.txt": b"new"}


def test_its_mode_is_that_of_any_new_file(tmp_path):
    (tmp_path / "other").write_text("")
    mode = files.write(tmp_path / "a", "").stat().st_mode
    assert stat.S_IMODE(mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_it_is_on_the_disk_before_it_has_its_name_and_the_name_is_too(tmp_path, monkeypatch):
    calls = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: calls.append(f"fsync {mode_of(number)}") or sync(number))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("replace") or replace(*paths))
    files.write_all({"a": "1", "b": "2"}, tmp_path)
    assert calls == ["fsync file", "fsync file", "replace", "replace", "fsync folder"]


def mode_of(number):
    return "folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file"


@pytest.mark.parametrize("at", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_was_there_stays_when_writing_fails(tmp_path, monkeypatch, at, error):
    files.write_all({"a": "old", "b": "old"}, tmp_path)

    def fail(*given):
        raise error

    monkeypatch.setattr(os, at, fail)
    with pytest.raises(files.CannotWrite if isinstance(error, OSError) else KeyboardInterrupt):
        files.write_all({"a": "new", "b": "new"}, tmp_path)
    assert contents(tmp_path) == {"a": b"old", "b": b"old"}


def limited(monkeypatch, size):
    """Simulate a disk with this much room in all: a write takes what fits, the next one fails."""
    monkeypatch.setattr(files, "_to_disk", lambda path, data: _fill(path, data, size))


def _fill(path, data, size):
    path.write_bytes(data[:size])
    if len(data) > size:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_one_line_that_names_the_file_and_the_remedy(tmp_path, monkeypatch):
    files.write(tmp_path / "a.bin", b"old")
    limited(monkeypatch, 10)
    with pytest.raises(files.CannotWrite) as caught:
        files.write_all({"first": b"1", "a.bin": bytes(100)}, tmp_path)
    assert str(caught.value) == (
        f"cannot write {tmp_path / 'a.bin'}: No space left on device; free some space there, or choose another folder "
        "(earlier files are as they were)"
    )
    assert isinstance(caught.value, InputError)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == 28
    assert contents(tmp_path) == {"a.bin": b"old"}


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    for below in ("file", "file/deep"):
        with pytest.raises(InputError, match=r"cannot write to the folder .*: a file is in its place"):
            files.make_folder(tmp_path / below)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    files.write(tmp_path / "model" / "gone", "old")
    with files.whole_folder(tmp_path / "model") as folder:
        (folder / "a").write_text("new")
        assert contents(tmp_path / "model") == {"gone": b"old"}
    assert contents(tmp_path / "model") == {"a": b"new"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_folder_that_cannot_be_written_to_the_end_leaves_the_earlier_one(tmp_path, error):
    files.write(tmp_path / "model" / "a", "old")

    def fill(folder):
        (folder / "a").write_text("half of")
        raise error

    with pytest.raises(files.CannotWrite, match="cannot write"), files.whole_folder(tmp_path / "model") as folder:
        fill(folder)
    assert contents(tmp_path / "model") == {"a": b"old"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def failing_at(call, error, monkeypatch):
    """Let one of the calls of os.replace fail."""
    calls, replace = [], os.replace

    def fail(*paths):
        calls.append(paths)
        if len(calls) == call:
            raise error
        replace(*paths)

    monkeypatch.setattr(os, "replace", fail)


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_folder_stays_when_the_other_cannot_take_its_place(tmp_path, monkeypatch, call, error):
    files.write(tmp_path / "model" / "a", "old")
    failing_at(call, error, monkeypatch)
    with (
        pytest.raises(files.CannotWrite if isinstance(error, OSError) else KeyboardInterrupt),
        files.whole_folder(tmp_path / "model") as folder,
    ):
        (folder / "a").write_text("new")
    assert contents(tmp_path / "model") == {"a": b"old"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_a_killed_process_was_replacing_gets_its_name_back(tmp_path, monkeypatch):
    files.write(tmp_path / "model.v1" / "a", "old")
    failing_at(2, PowerLoss(), monkeypatch)
    monkeypatch.setattr(files, "_put_back", lambda *paths: None)
    monkeypatch.setattr(files.shutil, "rmtree", lambda *paths, **options: None)
    with pytest.raises(PowerLoss), files.whole_folder(tmp_path / "model.v1") as folder:
        (folder / "a").write_text("new")
    monkeypatch.undo()
    assert not (tmp_path / "model.v1").exists()
    assert files.empty_but_for(tmp_path)
    files.remove_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.v1"]
    assert contents(tmp_path / "model.v1") == {"a": b"old"}


def test_a_name_is_as_long_as_the_file_system_takes_it(tmp_path):
    name = "漢" * 80 + ".txt"  # 244 bytes
    files.write(tmp_path / name, "new")
    assert contents(tmp_path) == {name: b"new"}


def test_errors_that_are_not_of_writing_stay_what_they_are(tmp_path):
    for error in (FileNotFoundError(2, "No such file"), RuntimeError("shapes differ"), KeyError("x")):
        with pytest.raises(type(error)), files.cannot_write(tmp_path):
            raise error


def test_what_a_killed_process_was_writing_is_removed(tmp_path, monkeypatch):
    files.write(tmp_path / "a", "old")
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(PowerLoss))
    monkeypatch.setattr(Path, "unlink", lambda *given, **more: None)
    with pytest.raises(PowerLoss):
        files.write(tmp_path / "a", "new")
    monkeypatch.undo()
    (tmp_path / ".mine.part").write_text("")
    assert len(contents(tmp_path)) == 3
    assert files.empty_but_for(tmp_path, ["a", ".mine.part"])
    files.remove_parts(tmp_path)
    assert contents(tmp_path) == {"a": b"old", ".mine.part": b""}


# ---------------------------------------------------------------------- seals


def test_tensors_come_back_bit_for_bit(tmp_path):
    state = {"a": torch.randn(5), "b": [1, "x", {2: 0.1}]}
    seals.save(tmp_path / "a.pt", state)
    back = seals.load(tmp_path / "a.pt", "remove it")
    assert torch.equal(back["a"], state["a"])
    assert back["b"] == state["b"]


def test_every_changed_byte_of_a_sealed_file_is_damage(tmp_path):
    path = tmp_path / "a.pt"
    seals.save(path, {"a": torch.ones(2)})
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(seals.Damaged, match=r"a\.pt is damaged: .*; remove it$"):
            seals.load(path, "remove it")


def test_every_changed_byte_of_sealed_json_is_damage_or_changes_nothing(tmp_path):
    path, content = tmp_path / "a.json", {"a": [1, 2.5, None, float("nan")], "b": {"x": "é"}}
    whole = files.write(path, seals.sealed_json(content)).read_bytes()
    same = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert repr(seals.read_json(path, "remove it")) == repr(content)
            same += 1
        except seals.Damaged:
            continue
    assert same < 5  # white space


def test_json_is_the_same_however_it_is_laid_out(tmp_path):
    content = json.loads(seals.sealed_json({"b": {"2": 1, "1": 2}, "a": 0.1}))
    files.write(tmp_path / "a", json.dumps(dict(reversed(content.items())), indent=9))
    assert seals.read_json(tmp_path / "a", "") == {"b": {"2": 1, "1": 2}, "a": 0.1}


@pytest.mark.parametrize("data", [b"", b"[1]", b"{}", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000, b'{"digest": 5}'])
def test_other_files_are_damaged_sealed_ones(tmp_path, data):
    files.write(tmp_path / "a", data)
    for read in (seals.read_json, seals.load):
        with pytest.raises(seals.Damaged, match=r"is damaged: .*; remove it"):
            read(tmp_path / "a", "remove it")
    with pytest.raises(seals.Damaged, match="cannot be read"):
        seals.load(tmp_path, "remove it")


# ---------------------------------------------------------------------- everything goes through this room

PAST_IT = {"write_text", "write_bytes", "savefig", "save_file", "save_pretrained", "dump", "touch"}
ALLOWED = {
    "tools/cli/output.py": {"open"},  # the log, line by line
    "tools/report/drawing.py": {"savefig"},  # into memory
    "tools/report/vector.py": {"savefig"},  # into memory
    "kernels/triton/resources.py": {"write_text"},  # for the assembler, in a folder that goes away
    "tools/measure/resident.py": {"write_text"},  # /proc/self/clear_refs
    "research/training/models/blocks.py": {"save_pretrained"},  # the model's own
    "research/training/workflow.py": {"save_pretrained"},  # into `whole_folder`, as the next six
    "tools/models/demo.py": {"save_pretrained"},
    "tools/models/saving.py": {"save_pretrained"},
    "research/training/tasks/task.py": {"save_pretrained"},
    "research/training/tasks/fine_tuned_text.py": {"save_pretrained"},
    "research/papers/speech.py": {"save_pretrained"},
    "research/papers/random_encoder.py": {"save_pretrained"},
}


def writes(path):
    """Names of calls that write files."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            words = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
            if name in PAST_IT or ast.unparse(node.func) in ("torch.save", "np.save", "shutil.copy", "os.replace"):
                found.add(name)
            if name == "open" and any(isinstance(w, str) and re.fullmatch(r"[wax]b?\+?", w) for w in words):
                found.add(name)
    return found


def test_nothing_is_written_past_it():
    past = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name not in ("core/files.py", "core/checksums.py") and (found := writes(path) - ALLOWED.get(name, set())):
            past[name] = found
    assert past == {"research/papers/data/tones.py": {"open"}}  # a .wav file in memory


def test_what_looks_for_writes_sees_them():
    assert {"open", "replace"} <= writes(SOURCE / "core/files.py")
    assert "save" in writes(SOURCE / "core/checksums.py")


def test_every_load_of_torch_takes_weights_only():
    loads = [
        (path, node)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert [path.name for path, _ in loads] == ["checksums.py"]
    assert all(any(k.arg == "weights_only" and k.value.value is True for k in node.keywords) for _, node in loads)


# ---------------------------------------------------------------------- before anything is written


@pytest.mark.parametrize("place", ["new", "new/deep", "empty", "file.json"])
def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path, place):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.json").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    files.check_writable(tmp_path / place)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place, message in {
        tmp_path / "file" / "below": "a file is in its place",
        tmp_path / "link": "it is a link to .*nowhere, where there is nothing",
        Path("/proc/subquad"): "cannot write /proc/subquad",
        Path("/"): "it is a mount point",
    }.items():
        with pytest.raises(InputError, match=message):
            files.check_writable(place)

    def read_only(path, *given, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(files.CannotWrite, match="Permission denied; make it writable, or choose another folder"):
        files.check_writable(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
