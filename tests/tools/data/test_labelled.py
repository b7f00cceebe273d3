"""Tables of labelled texts."""

from collections import Counter

import pytest

from subquad.core.errors import InputError
from subquad.tools.data.labelled import hold_out, read_labelled


def test_every_kind_of_table(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"one, with comma",good\ntwo, bad \n')
    (tmp_path / "b.tsv").write_text("label\ttext\n3\tthree\n")
    (tmp_path / "c.jsonl").write_text('{"text": "four", "label": 0}\n\n{"text": "five", "label": true}\n')
    rows = read_labelled([tmp_path / name for name in ("a.csv", "b.tsv", "c.jsonl")])
    assert rows == [("one, with comma", "good"), ("two", "bad"), ("three", "3"), ("four", "0"), ("five", "True")]


def test_columns_by_other_names(tmp_path):
    (tmp_path / "a.csv").write_text("q,intent\nwhere,place\n")
    assert read_labelled([tmp_path / "a.csv"], text="q", label="intent") == [("where", "place")]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.txt", "text", "not a table of labelled texts: give .jsonl, .csv, .tsv"),
    ("a.csv", "text,label\n", "has a header, but no rows"),
    ("a.csv", "text,label\nx,\n", "line 2: no label in it"),
    ("a.csv", "text,label\nx,1\n ,1\n", "line 3: no text in it"),
    ("a.csv", "text,kind\nx,1\n", "a.csv has no column 'label'; it has text, kind"),
    ("a.jsonl", '{"text": "x"}\n', "line 1, has no column 'label'; it has text"),
    ("a.jsonl", "{", "line 1: not JSON"),
])  # fmt: skip
def test_malformed_tables_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message) as raised:
        read_labelled([tmp_path / name])
    assert name in str(raised.value)


def test_each_label_is_held_out_in_the_same_share():
    rows = [(f"{label}{i}", label) for i in range(20) for label in ("a", "b")] + [("c0", "c")]
    kept, held = hold_out(rows, 0.25, seed=3)
    assert Counter(label for _, label in held) == {"a": 5, "b": 5}
    assert sorted(kept + held) == sorted(rows)
    assert ("c0", "c") in kept
    assert kept == [row for row in rows if row in kept]


def test_what_is_held_out_depends_on_the_seed_alone():
    rows = [(str(i), "a") for i in range(40)]
    assert hold_out(rows, 0.2, seed=1) == hold_out(rows, 0.2, seed=1)
    assert hold_out(rows, 0.2, seed=1) != hold_out(rows, 0.2, seed=2)
