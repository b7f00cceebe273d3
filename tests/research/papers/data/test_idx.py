"""The IDX format."""

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from subquad.core.errors import InputError
from subquad.research.papers.data.idx import read_idx

REAL = os.environ.get("SUBQUAD_DATA")


def idx(array, kind=8):
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.mark.parametrize("shape", [(3,), (2, 4, 5), (0, 28, 28)])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_arrays_come_back(tmp_path, shape, ending):
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    path = tmp_path / f"a{ending}"
    path.write_bytes(gzip.compress(idx(array)) if ending else idx(array))
    found = read_idx(path)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, array)


GOOD = idx(np.zeros((2, 3), dtype=np.uint8))


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a", b"", "begins with nothing"),
    ("a", b"PNG!", "begins with 504e4721, not 000008"),
    ("a", idx(np.zeros(3, dtype=np.uint8), kind=13), "not an IDX file of bytes"),
    ("a", GOOD[:-1], r"5 bytes after its header, which says \(2, 3\)"),
    ("a", GOOD + b"x", "7 bytes after its header"),
    ("a", GOOD[:6], "0 bytes after its header"),
    ("a.gz", GOOD, "cannot be read"),
    ("a.gz", gzip.compress(GOOD, mtime=0)[:-9], "cannot be read"),
])  # fmt: skip
def test_files_that_are_not_it(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_idx(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"no file or folder at .*none\.gz"):
        read_idx(tmp_path / "none.gz")


@pytest.mark.data
def test_the_real_images():
    folder = Path(REAL) / "fashion_mnist"
    images, labels = (read_idx(folder / f"{name}-ubyte.gz") for name in ("images-idx3", "labels-idx1"))
    assert images.shape == (3003, 28, 28)
    assert labels.shape == (3003,)
    assert set(labels.tolist()) == set(range(10))
