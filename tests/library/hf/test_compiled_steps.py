"""Steps on a static cache are compiled once, whatever the method, and give the tokens that eager steps give."""

import json
import subprocess
import sys

import pytest
from torch._inductor import config as inductor

from subquad.hf import compiled_steps
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


@pytest.mark.parametrize("length", [0, -3])
def test_a_request_has_a_token(length):
    with pytest.raises(ValueError, match=f"length={length}, but a request has at least 1 token"):
        compiled_steps(length)


def test_frozen_weights_are_refused_because_the_cache_would_be_frozen_too():
    with inductor.patch(freezing=True), pytest.raises(ValueError, match="constant of the compiled step"):
        compiled_steps(64)
    assert compiled_steps(64)["max_cache_len"] == 64
