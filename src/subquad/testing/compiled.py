"""Compile every method that is named on standard input, and print what went wrong with each, or null.

Standard input is `{"modules": […], "methods": […]}`: the modules that register the methods of other packages, which are
imported first, and the methods as `to_dict` writes them.

A process of its own, because Dynamo cannot trace the run-time type checks that pytest switches on here.
"""

import json
import sys
import traceback
from importlib import import_module
from typing import Any

import torch

import subquad as sq
from subquad.testing.oracle import gradients, hidden_for, qkv, tracked


def check(method: sq.Method) -> None:
    """Raise where the compiled call and the eager one differ, in their outputs or gradients, or it does not compile."""
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


def failure(settings: dict[str, Any]) -> str | None:
    """The traceback of what went wrong with a method; None if nothing did."""
    try:
        check(sq.from_dict(settings))
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    task = json.load(sys.stdin)
    for module in task["modules"]:
        import_module(module)
    print(json.dumps([failure(settings) for settings in task["methods"]]))
