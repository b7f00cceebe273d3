"""Tests of the sources of text."""

import sys

import pytest

from subquad.core.errors import InputError
from subquad.tools.data.texts import folder_lines, read_documents, standard_library
from subquad.tools.runs.alone import alone_in


@pytest.mark.slow
def test_the_standard_library_is_long_english(monkeypatch):
    documents = standard_library()
    assert len(documents) > 20
    assert sum(map(len, documents)) > 300_000
    assert " the " in documents[0]
    monkeypatch.setattr(sys, "stdlib_module_names", frozenset(("typing", "argparse", "unittest", "logging", "json")))
    some = standard_library()
    assert 1 < len(some) <= 5
    assert some == standard_library() == [document for document in documents if document in some]


def test_files_folders_and_tables(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("second")
    (tmp_path / "deep" / "ignored.png").write_bytes(b"\0")
    (tmp_path / "c.jsonl").write_text('{"text": "third"}\n\n{"text": ""}\n{"text": "fourth"}\n')
    (tmp_path / "d.csv").write_text('id,text\n1,"fifth, with comma"\n')
    (tmp_path / "e.tsv").write_text("id\ttext\n1\tsixth\n")
    found = read_documents([tmp_path])
    assert found == ["first", "third", "fourth", "fifth, with comma", "second", "sixth"]
    assert read_documents([tmp_path / "d.csv"], column="id") == ["1"]


def test_a_file_that_several_paths_lead_to_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("second")
    (tmp_path / "c.csv").write_text("text\nsame\nsame\n")
    others = [tmp_path / "a.txt", tmp_path / "deep", tmp_path / "deep" / ".." / "a.txt"]
    assert read_documents([tmp_path, *others]) == ["first", "same", "same", "second"]
    assert read_documents([*others, tmp_path]) == ["first", "second", "same", "same"]
    assert len(read_documents([tmp_path, tmp_path])) == 4
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match="is empty"):
        read_documents([tmp_path, tmp_path / "empty.txt"])


def test_folders_say_what_is_read_and_what_is_not(tmp_path):
    for name in ("d.txt", "b.md", "deep/a.rst", "C.CSV", "x.pdf", ".git/config", ".git/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "e.txt").write_text("text")
    assert folder_lines([tmp_path / "d.txt", tmp_path, tmp_path / "one"]) == [
        f"{tmp_path}: 6 files (.git/notes.txt, C.CSV, b.md, …) read; 1 file (x.pdf) skipped, because the name does not "
        "end in .txt, .md, .rst, .jsonl, .csv, .tsv",
        f"{tmp_path / 'one'}: 1 file (e.txt) read",
    ]


def test_what_a_run_writes_into_a_folder_of_the_text_is_not_read(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "subquad-plan").mkdir()
    (tmp_path / "subquad-plan" / "report.md").write_text("a report")
    assert read_documents([tmp_path]) == ["text", "a report"]  # of an earlier run
    with alone_in(tmp_path / "subquad-plan"):
        assert read_documents([tmp_path]) == ["text"]
        assert folder_lines([tmp_path]) == [f"{tmp_path}: 1 file (a.txt) read"]
    with alone_in(tmp_path):  # the text itself
        assert read_documents([tmp_path]) == ["text", "a report"]


def test_files_of_a_folder_that_are_not_text_are_skipped_and_named_once(tmp_path, caplog):
    for name, content in {
        "a.txt": b"caf\xe9",
        "b.txt": "café".encode(),
        "c.csv": b"text\n\xff\n",
        "d.md": b" \n",
    }.items():
        (tmp_path / name).write_bytes(content)
    for _ in range(2):  # a command reads its text before it loads the model, and again
        assert read_documents([tmp_path]) == ["café"]
    assert caplog.messages == [
        f"{tmp_path}: 3 files (a.txt, c.csv, d.md) skipped, because empty or not text in UTF-8; convert to UTF-8, for "
        "example with iconv -f latin1 -t utf-8"
    ]
    assert folder_lines([tmp_path]) == [f"{tmp_path}: 1 file (b.txt) read"]


def test_a_folder_without_any_text_and_a_file_that_is_asked_for_are_errors(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"no text in the folder .*a\.txt is not a text file in UTF-8; .*iconv"):
        read_documents([tmp_path])
    assert folder_lines([tmp_path]) == [f"{tmp_path}: 0 files read"]
    with pytest.raises(InputError, match=r"a\.txt is not a text file in UTF-8; .* or a folder"):
        read_documents([tmp_path / "a.txt"])


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.txt", b"", "is empty"),
    ("a.txt", b"\xff\xfe\x00", "not a text file"),
    ("a.csv", b"body\nx\n", "a.csv has no column 'text'; it has body"),
    ("a.csv", b"text,label\nx,1\ny,z,2\n", "line 3: 3 fields, but the header has 2"),
    ("a.tsv", b"text\tlabel\nx\t1\t\n", "line 2: 3 fields, but the header has 2"),
    ("a.jsonl", b"[1]\n", "expected an object"),
    ("a.jsonl", b'{"text": ""}\n', "no text in"),
])  # fmt: skip
def test_what_is_no_text_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        read_documents([tmp_path / name])
    assert str(tmp_path / name) in str(error.value)
