"""Compile the models and methods on the command line (`bert=full …`) and print what went wrong with each, or null.

A process of its own, because Dynamo cannot trace the run-time type checks that pytest switches on here.
"""

import json
import sys
import traceback

import torch

import subquad as sq
from tests.library.hf.models import build


def check(name: str, method: str) -> None:
    case = build(name)
    sq.hf.swap(case.model, method)
    with torch.no_grad():
        want = case.output()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        case.model = torch.compile(case.model, backend="aot_eager")
        torch.testing.assert_close(case.output(), want, atol=1e-5, rtol=1e-5)
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    assert not breaks, breaks


def failure(name: str, method: str) -> str | None:
    try:
        check(name, method)
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    print(json.dumps([failure(*argument.split("=", 1)) for argument in sys.argv[1:]]))
