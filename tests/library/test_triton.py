"""The tests of Triton kernels that need a GPU, in a process of their own.

Those in the interpreter, and compiled for GPUs that are not here, are jobs: python -m tests.library.triton.
"""

import subprocess

import pytest
import torch

from subquad.kernels import triton
from tests.library.triton.processes import run


@pytest.mark.slow
@pytest.mark.skipif(not triton.usable(), reason="Triton is not installed")
@pytest.mark.parametrize(
    "arguments",
    [
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
