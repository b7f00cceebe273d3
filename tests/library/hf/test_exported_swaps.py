"""A swapped model that is exported with a dynamic length is right at every length."""

import json
import subprocess
import sys

import pytest

from tests.library.hf.exported_swaps import LENGTHS

CASES = ["bert=full", "llama=full", "llama=full:kernel=subquad", "bert=clustered-tail"]


@pytest.mark.slow
def test_exported_models_are_right_at_every_length():
    command = [sys.executable, "-m", "tests.library.hf.exported_swaps", *CASES]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    results = json.loads(done.stdout.splitlines()[-1])
    assert dict(zip(CASES, results, strict=True)) == {case: {str(n): "equal" for n in LENGTHS} for case in CASES}
