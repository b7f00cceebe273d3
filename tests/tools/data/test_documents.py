"""Documents out of archives."""

import zipfile

import pytest

from subquad.core.errors import InputError
from subquad.tools.data.documents import read_archive


def test_files_by_name_in_utf8_or_latin1(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as files:
        files.writestr("z.txt", "é")
        files.writestr("b.txt", "é".encode("latin-1"))
        files.writestr("README", "no document")
    assert list(read_archive(tmp_path / "a.zip").items()) == [("b.txt", "é"), ("z.txt", "é")]


def test_archives_that_are_none(tmp_path):
    with pytest.raises(InputError, match="no archive at"):
        read_archive(tmp_path / "a.zip")
    (tmp_path / "b.zip").write_text("text")
    with pytest.raises(InputError, match="not a zip archive"):
        read_archive(tmp_path / "b.zip")
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as files:
        files.writestr("README", "")
    with pytest.raises(InputError, match=r"contains no \.txt file"):
        read_archive(tmp_path / "c.zip")
