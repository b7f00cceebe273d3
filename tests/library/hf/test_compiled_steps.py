"""Steps on a static cache are compiled once, whatever the method, and give the tokens that eager steps give."""

import json
import subprocess
import sys

import pytest

from subquad.kernels import native

CASES = ["llama=full:kernel=subquad", "llama=clustered-tail", "gpt2=full"]
OP = "subquad.steps_forward.default"


@pytest.mark.slow
def test_steps_on_a_static_cache_are_compiled_once():
    command = [sys.executable, "-m", "tests.library.hf.compiled_steps", *CASES]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    for case, seen in zip(CASES, json.loads(result.stdout.splitlines()[-1]), strict=True):
        assert (case, seen["loop"], seen["generate"]) == (case, True, True)
        assert (case, seen["graphs"], seen["graphs of generate"]) == (case, 1, 1)
        if native.is_vectorised():
            assert (OP in seen["operators"]) == (case != "gpt2=full"), case
