"""Compile every method that is named on standard input, and print what went wrong with each, or null.

A process of its own, because Dynamo cannot trace the run-time type checks that pytest switches on here.
"""

import json
import sys
import traceback

import torch

import subquad as sq
from tests.oracle import gradients, hidden_for, qkv, tracked


def check(method: sq.Method) -> None:
    mask = sq.Mask.padding(torch.tensor([24, 7]))
    eager, compiled = tracked(*qkv()), tracked(*qkv())
    runs = method.bind(heads=2, head_dim=8, max_length=64).eval() if method.traits.learned else method
    wanted = runs(*eager, mask=mask, **hidden_for(method, eager[0]))
    torch._dynamo.reset()  # else the methods before count as recompilations
    run = torch.compile(
        lambda q, k, v: runs(q, k, v, mask=mask, **hidden_for(method, q)), fullgraph=True, backend="aot_eager"
    )
    out = run(*compiled)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(gradients(out, *compiled), gradients(wanted, *eager))


def failure(settings: dict) -> str | None:
    try:
        check(sq.from_dict(settings))
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([failure(settings) for settings in json.load(sys.stdin)]))
