"""The Triton kernels, in processes of their own: run in the interpreter, and compiled for GPUs that are not here."""

import subprocess

import pytest
import torch

from subquad.ops import triton
from tests.triton.processes import run


@pytest.mark.slow
@pytest.mark.skipif(not triton.usable(), reason="Triton is not installed")
@pytest.mark.parametrize(
    "arguments",
    [
        ["interpreted"],
        ["compiled"],
        pytest.param(["cuda", "--collect-only"], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="runs")),
        pytest.param(["cuda"], marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
    ],
    ids=" ".join,
)
def test_kernels(arguments, tmp_path):
    log = tmp_path / "log"
    with log.open("w") as file:
        status = run(*arguments, stdout=file, stderr=subprocess.STDOUT)
    assert status == 0, log.read_text()[-8000:]
