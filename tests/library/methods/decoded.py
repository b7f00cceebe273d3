"""Decode 10,000 tokens one by one with the method on the command line, and print how far that is from one causal call.

A process of its own: the run-time type checks that pytest switches on here take ten times as long as the steps.
"""

import json
import sys

import torch

import subquad as sq
from subquad.testing.oracle import qkv

STEPS = 10_000


@torch.inference_mode()
def decoded(method: str) -> dict[str, object]:
    """The largest difference, and the dtypes of the state at the end."""
    q, k, v = qkv(STEPS, B=1, H=4, G=2)
    bound, outs = sq.parse_method(method).bind(heads=4, kv_heads=2, head_dim=8, max_length=STEPS).eval(), []
    state = bound.init_state(1, like=q, value_dim=6)
    for t in range(STEPS):
        out, state = bound.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
        outs.append(out)
    error = (torch.cat(outs, 2) - bound(q, k, v, is_causal=True)).abs().max()
    dtypes = sorted({str(tensor.dtype) for tensor in state.values() if tensor.is_floating_point()})
    return {"error": float(error), "dtypes": dtypes}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(decoded(sys.argv[1])))
