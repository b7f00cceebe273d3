"""Compile steps of families on static caches, and print what went wrong with each, or null.

python -m tests.library.hf.compiled_families llama gpt2 …

A process of its own, because Dynamo cannot trace the run-time type checks that pytest switches on here.
"""

import json
import sys
import traceback

import torch

from tests.library.hf.families import Subject, subject
from tests.library.hf.prompts import prompt

PROMPT, STEPS, SLOTS = 40, 4, 64


def logits_of_steps(model: Subject, compiled: bool) -> torch.Tensor:
    """The logits of single tokens after a prompt; after the second, nothing is compiled again."""
    ids, cache, logits = prompt(PROMPT + STEPS, batch=2), model.cache("static", SLOTS), []
    model(ids[:, :PROMPT], cache)
    torch._dynamo.reset()
    forward = type(model.model).forward
    if compiled:
        model.model.forward = torch.compile(model.model.forward, fullgraph=True, backend="aot_eager")
    try:
        for number in range(STEPS):
            with torch.compiler.set_stance("fail_on_recompile" if compiled and number > 1 else "default"):
                logits.append(model(ids[:, PROMPT + number : PROMPT + number + 1], cache))
    finally:
        model.model.forward = forward.__get__(model.model)
    return torch.cat(logits, 1)


def check(name: str) -> None:
    own = subject(name)
    with torch.no_grad():
        want = logits_of_steps(own, compiled=False)
        have = logits_of_steps(own.swapped("full:kernel=subquad"), compiled=True)
    torch.testing.assert_close(have, want, atol=1e-5 * float(want.abs().max()), rtol=0)


def failure(name: str) -> str | None:
    try:
        check(name)
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    print(json.dumps({name: failure(name) for name in sys.argv[1:]}))
