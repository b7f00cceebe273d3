"""Texts in three parts."""

import pytest

from subquad.core.errors import InputError
from subquad.research.training.corpora import cut, hold_out, read_corpus


def test_the_end_of_one_file_is_held_out():
    text = bytes(range(200))
    train, validation, test = cut([text], 0.1, seed=0)
    assert (train, validation, test) == ([text[:180]], [text[180:190]], [text[190:]])


def test_the_end_of_each_of_a_few_is_held_out():
    assert hold_out([b"abcdefghij", b"0123456789"], 0.2, seed=0) == ([b"abcdefgh", b"01234567"], [b"ij", b"89"])


def test_of_many_documents_whole_ones_are_held_out():
    documents = [bytes([i]) * 7 for i in range(40)]
    parts = cut(documents, 0.1, seed=0)
    assert [len(part) for part in parts] == [36, 2, 2]
    assert sorted(parts.train + parts.validation + parts.test) == documents
    assert cut(documents, 0.1, seed=1).train != parts.train
    assert [len(part) for part in cut(documents[:10], 0.1, seed=0)] == [8, 1, 1]


def test_too_little_text_is_refused():
    with pytest.raises(InputError, match=r"4 bytes of text are too few to hold out 0\.1"):
        hold_out([b"abcd"], 0.1, seed=0)


def test_the_parts_of_a_folder(tmp_path):
    (tmp_path / "valid.txt").write_text("v" * 100)
    (tmp_path / "test.txt").write_text("t" * 50)
    assert read_corpus(tmp_path, 0.1, 0) == ([b"v" * 90], [b"v" * 10], [b"t" * 50])
    (tmp_path / "train.txt").write_text("l" * 70)
    assert read_corpus(tmp_path, 0.1, 0) == ([b"l" * 70], [b"v" * 100], [b"t" * 50])


def test_any_other_folder_is_cut(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 40)
    assert read_corpus(tmp_path, 0.2, 0) == ([b"a" * 32], [b"a" * 4], [b"a" * 4])
    with pytest.raises(InputError, match="no folder"):
        read_corpus(tmp_path / "none", 0.1, 0)
