"""FASTA files."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from subquad.errors import InputError
from subquad.papers.data.genomes import BASES, read_fasta, read_genomes

REAL = os.environ.get("SUBQUAD_DATA")


def letters(genome) -> str:
    return "".join(BASES[base] for base in genome.bases)


def test_sequences_are_joined_over_lines(tmp_path):
    path = tmp_path / "two.fa"
    path.write_text(">one first of two\nACGT\r\nacgu\n\n>two\nNNRYT\n")
    one, two = read_fasta(path)
    assert (one.name, letters(one)) == ("one", "ACGTACGT")
    assert (two.name, letters(two)) == ("two", "NNNNT")
    assert one.bases.dtype == np.uint8


def test_gzipped_files_and_folders(tmp_path):
    (tmp_path / "a.fasta.gz").write_bytes(gzip.compress(b">a\nAC\n"))
    (tmp_path / "b.fna").write_text(">b\nGT\n")
    (tmp_path / "readme.txt").write_text("no genome")
    assert [letters(genome) for genome in read_genomes([tmp_path])] == ["AC", "GT"]
    assert [genome.name for genome in read_genomes([tmp_path / "b.fna"])] == ["b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ACGT\n", "is not FASTA: line 1 stands before the first line with '>'"),
        (">a\nACGT\nAC-T\n", "line 3: '-' is not the code of a base"),
        (">a\n>b\nA\n", "the sequence 'a' has no bases"),
        ("\n", "holds no sequence"),
    ],
)
def test_what_is_no_fasta_is_refused(tmp_path, content, message):
    path = tmp_path / "a.fa"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_fasta(path)


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"no file or folder at .*none\.fa"):
        read_fasta(tmp_path / "none.fa")
    (tmp_path / "a.fa.gz").write_bytes(b"not gzip")
    with pytest.raises(InputError, match=r"a\.fa\.gz cannot be read"):
        read_fasta(tmp_path / "a.fa.gz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no genome in the folder"):
        read_genomes([tmp_path / "empty"])


@pytest.mark.data
@pytest.mark.skipif(not REAL, reason="SUBQUAD_DATA is not set")
def test_the_real_genomes():
    found = read_genomes([Path(REAL) / "genomes"])
    assert sorted(len(genome.bases) for genome in found) == [29_903, 48_502]
    assert all(genome.bases.max() < 4 for genome in found)
