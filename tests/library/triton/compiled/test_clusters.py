import pytest
import torch

from subquad.kernels.selection.cells.op import key_cells
from subquad.kernels.selection.clusters.op import query_clusters
from tests.library.triton.compiled.fits import assert_fits, meta

WIDTHS = pytest.mark.parametrize(("D", "dtype"), [(64, torch.bfloat16), (128, torch.float32)], ids=str)
VALID = meta(1, 4096, dtype=torch.bool)


@WIDTHS
def test_clusters(D, dtype):
    q, k = meta(1, 32, 4096, D, dtype=dtype), meta(1, 8, 4096, D, dtype=dtype)
    how = {"clusters": 100, "bits": 63, "iterations": 1, "refine": 1, "seed": 1}
    launches = assert_fits(lambda: query_clusters(q, k, VALID, VALID, space="logits", **how))
    assert "nearest_means" in {launch.name for launch in launches}


@WIDTHS
def test_cells(D, dtype):
    x = meta(1, 8, 4096, D, dtype=dtype)
    launches = assert_fits(lambda: key_cells(x, x, VALID, cells=32, seed=1))
    assert [launch.name for launch in launches].count("sign_words") == 1
