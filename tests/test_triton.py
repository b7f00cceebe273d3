"""The Triton kernels, in processes of their own: run in the interpreter, and compiled for GPUs that are not here."""

import subprocess

import pytest

from subquad.ops import triton
from tests.triton.processes import KINDS, run


@pytest.mark.slow
@pytest.mark.skipif(not triton.usable(), reason="Triton is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_kernels(kind, tmp_path):
    log = tmp_path / "log"
    with log.open("w") as file:
        status = run(kind, stdout=file, stderr=subprocess.STDOUT)
    assert status == 0, log.read_text()[-8000:]
