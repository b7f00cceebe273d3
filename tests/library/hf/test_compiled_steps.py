"""Steps on a static cache are compiled once, whatever the method, and give the tokens that eager steps give."""

import json
import subprocess
import sys

import pytest

from subquad.kernels import native

CASES = ["llama=full:kernel=subquad", "llama=clustered-tail", "gpt2=full"]
OP = "subquad.steps_forward.default"


def printed(*words: str):
    """What the script prints."""
    command = [sys.executable, "-m", "tests.library.hf.compiled_steps", *words]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


@pytest.mark.slow
def test_steps_with_frozen_weights_give_the_tokens_of_eager_steps():
    assert printed("--frozen", "llama=full:kernel=subquad") == [True]


@pytest.mark.slow
def test_steps_on_a_static_cache_are_compiled_once():
    for case, seen in zip(CASES, printed(*CASES), strict=True):
        assert (case, seen["loop"], seen["generate"]) == (case, True, True)
        assert (case, seen["graphs"], seen["graphs of generate"]) == (case, 1, 1)
        if native.is_vectorised():
            assert (OP in seen["operators"]) == (case != "gpt2=full"), case
