"""Movie reviews out of their archive."""

import os
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from subquad.core.errors import InputError
from subquad.research.training.folders import find_data
from subquad.tools.data.reviews import Review, read_reviews

REAL = os.environ.get("SUBQUAD_DATA")


def archive(folder, names):
    path = folder / "movie_reviews.zip"
    with zipfile.ZipFile(path, "w") as files:
        for name in names:
            files.writestr(name, f"text of {name}")
    return path


def test_reviews_by_name_and_nothing_else(tmp_path):
    path = archive(tmp_path, ["m/README", "m/pos/cv012_3.txt", "m/neg/cv999_1.txt", "m/pos/notes.txt", "m/neg/"])
    assert read_reviews(path) == [
        Review(999, "neg", "text of m/neg/cv999_1.txt"),
        Review(12, "pos", "text of m/pos/cv012_3.txt"),
    ]


def test_what_is_not_utf8_is_latin1(tmp_path):
    path = archive(tmp_path, ["neg/cv000_1.txt"])
    with zipfile.ZipFile(path, "a") as files:
        files.writestr("pos/cv000_1.txt", b"caf\xe9")
    assert read_reviews(path)[1].text == "café"


def test_archives_that_are_not_it(tmp_path):
    with pytest.raises(InputError, match=r"no archive at .*none\.zip"):
        read_reviews(tmp_path / "none.zip")
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(InputError, match="not a zip archive"):
        read_reviews(tmp_path / "text.zip")
    with pytest.raises(InputError, match="does not contain the movie reviews"):
        read_reviews(archive(tmp_path, ["m/pos/cv000_1.txt"]))


def test_data_is_found_in_its_folder_or_in_the_one_given(tmp_path):
    own = tmp_path / "movie_reviews"
    own.mkdir()
    path = archive(own, [])
    assert (
        find_data(tmp_path, "movie_reviews", path.name, "x") == find_data(own, "movie_reviews", path.name, "x") == path
    )
    with pytest.raises(InputError, match="the task 'text' needs its data: --data-dir"):
        find_data(None, "movie_reviews", path.name, "the task 'text'")
    with pytest.raises(InputError, match=r"needs other\.zip, but it is not at .* or "):
        find_data(tmp_path, "movie_reviews", "other.zip", "x")


@pytest.mark.data
def test_the_real_archive():
    reviews = read_reviews(find_data(Path(REAL), "movie_reviews", "movie_reviews.zip", "x"))
    assert Counter(review.label for review in reviews) == {"pos": 1000, "neg": 1000}
    assert {review.number for review in reviews} == set(range(1000))
