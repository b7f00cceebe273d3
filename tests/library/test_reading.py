"""Tests of what users give us to read: odd files are refused in one line, odd texts are read whole."""

import csv
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from subquad.core import reading as files
from subquad.core.errors import InputError
from subquad.core.reading import exists, files_in, read_bytes, read_json
from subquad.tools.compare.labelled_tasks import load_task
from subquad.tools.data.labelled import read_labelled
from subquad.tools.data.texts import read_documents, read_rows, read_text

ODD = "one\u2028two\u2029three\x85four\x0cfive\x0bsix\x1cseven\x1deight\x1enine"  # str.splitlines cuts all of these


@pytest.mark.parametrize(("name", "content"), [
    ("a.csv", f"text,label\n{ODD},x\nb,y\n"),
    ("a.tsv", f"text\tlabel\n{ODD}\tx\nb\ty\n"),
    ("a.csv", f'text,label\r\n"{ODD}",x\rb,y\n'),
    ("a.jsonl", f'{{"text": "{ODD[:14]}", "label": "x"}}\n{{"text": "b", "label": "y"}}\r\n'),
])  # fmt: skip
def test_a_row_ends_at_the_end_of_its_line_alone(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content.encode())
    text = ODD[:14] if name == "a.jsonl" else ODD
    assert read_documents([path]) == [text, "b"]
    assert read_labelled([path]) == [(text, "x"), ("b", "y")]


def test_every_task_reads_such_rows(tmp_path):
    (tmp_path / "sts.tsv").write_text(f"{ODD}\tb\t1\na\tc\t2\n")
    assert load_task("sts", tmp_path).texts == [ODD, "b", "a", "c"]
    (tmp_path / "retrieval.jsonl").write_text('{"question": "a\u2028b", "passage": "c\x85d"}\n')
    assert load_task("retrieval", tmp_path).texts == ["c\x85d", "a\u2028b"]
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text(f"text,category\n{ODD},x\nb,y\n")
    assert load_task("banking77", tmp_path).texts[0] == ODD


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_cell_is_as_long_as_it_is(tmp_path, name):
    long, mark = "long " * 40_000, csv.field_size_limit()
    (tmp_path / name).write_text(f"text\n{long}\nb\n")
    assert read_documents([tmp_path / name]) == [long, "b"]
    assert csv.field_size_limit() == mark  # other readers' limit is as it was


def test_a_long_cell_in_tables_without_a_header(tmp_path):
    (tmp_path / "sts.tsv").write_text(f"{'long ' * 40_000}\tb\t1\na\tc\t2\n")
    assert len(load_task("sts", tmp_path).texts[0]) == 200_000


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "nested too deeply"),
    ("a.jsonl", b'{"text": 1' + b"0" * 5_000 + b"}\n", "line 1: not JSON"),
    ("a.jsonl", b'{"text": "\\ud800"}\n', "lone surrogate"),
    ("a.jsonl", b'{"text": {"a": 1}}\n', "'text' contains a dict, not text"),
    ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "not a text file in UTF-8"),
    ("a.csv", b"text,text\na,b\n", "two columns 'text'"),
    ("a.csv", b"\xef\xbb\xbf", "is empty"),
    ("a.csv", b"\n\n", "is empty"),
    ("a.txt", b"a" * 2**21 + b"\xff", "not a text file in UTF-8"),
    ("a.txt", b"a" * 2**21 + b"\xc3", "not a text file in UTF-8"),
])  # fmt: skip
def test_damaged_tables_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        list(read_documents([tmp_path / name]))
    assert str(tmp_path / name) in str(error.value)


def test_marks_of_the_byte_order_and_characters_across_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 3)
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf\n" + "text\näß🙂ü\n".encode())
    assert read_documents([tmp_path / "a.csv"]) == ["äß🙂ü"]
    assert list(read_rows(tmp_path / "a.csv")) == [(3, {"text": "äß🙂ü"})]


# ---------------------------------------------------------------------- what is not a regular file


def odd(folder: Path) -> dict[str, Path]:
    """Things with a path that are not regular files, by what is said of them."""
    os.mkfifo(folder / "pipe.txt")
    (folder / "nowhere.txt").symlink_to(folder / "missing")
    with socket.socket(socket.AF_UNIX) as end:
        os.chdir(folder)  # a socket's path may be no longer than 107 characters
        end.bind("socket.txt")
    return {
        "is a pipe": folder / "pipe.txt",
        "is a socket": folder / "socket.txt",
        "is a link to": folder / "nowhere.txt",
        "is a device": Path("/dev/zero"),
        "no file or folder at": folder / "missing" / "a.txt",
        "File name too long": folder / ("x" * 300),
        "embedded null (byte|character)": Path("a\0b"),
    }


def test_only_regular_files_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for said, path in odd(tmp_path).items():
        for read in (read_text, read_bytes, read_json, lambda path: read_documents([path])):
            with pytest.raises(InputError, match=said):
                read(path)


def test_nothing_in_a_folder_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    for name in odd(tmp_path).values():
        if name.parent == tmp_path and name.suffix == ".txt":
            folder = tmp_path / name.stem
            folder.mkdir()
            (folder / "a.txt").write_text("text")
            name.rename(folder / name.name)
            with pytest.raises(InputError, match=name.name):
                read_documents([folder])


def test_standard_input_that_is_a_pipe_is_refused(tmp_path):
    script = "from pathlib import Path; from subquad.tools.data.texts import read_text; read_text(Path('/dev/stdin'))"
    done = subprocess.run([sys.executable, "-c", script], input="text", capture_output=True, text=True, check=False)
    assert "InputError: /dev/stdin is a pipe" in done.stderr


def test_a_sparse_file_is_refused_with_its_size_or_at_once(tmp_path):
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.truncate(2**42)
    with pytest.raises(InputError, match=r"has 4,096\.0 GiB, but files of at most [\d.,]+ GiB are read"):
        read_text(path)
    with path.open("wb") as file:
        file.truncate(int(files.memory() // files.SHARE))
    with pytest.raises(InputError, match="not a text file"):  # the first part says so
        read_text(path)


def test_without_a_known_size_of_memory_every_size_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("[1]")
    monkeypatch.delattr(os, "sysconf")  # which Windows lacks
    assert read_json(tmp_path / "a.json") == [1]
    assert read_text(tmp_path / "a.json") == "[1]"


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)  # root may read all folders
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        files_in(tmp_path, (".txt",))


def test_paths_that_cannot_be_looked_at_are_no_missing_ones(tmp_path):
    assert exists(tmp_path)
    assert not exists(tmp_path / "none")
    with pytest.raises(InputError, match="File name too long"):
        exists(tmp_path / ("x" * 300))
