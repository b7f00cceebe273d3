"""Compile each method that is named on standard input for several lengths, and print what went wrong, or null.

A process of its own, as `subquad.testing.compiled`. From the second length on, Dynamo traces with symbolic lengths.
"""

import json
import sys
import traceback

import torch

import subquad as sq
from subquad.testing.oracle import gradients, qkv, tracked

LENGTHS = 24, 40, 77  # the last one with so many pairs that `full:kernel=subquad` runs its kernel


def check(method: sq.Method) -> None:
    """Grouped heads and padding; bound methods with their parameters, others as text; causal where that is strict."""
    causal = method.traits.causal == "strict"
    if method.traits.learned:
        bound = method.bind(heads=4, kv_heads=2, head_dim=8, max_length=80).eval()  # sinkhorn draws noise in training
        call, more = bound, list(bound.parameters())
    else:
        text, more = str(method), []

        def call(q, k, v, **options):
            return sq.attention(q, k, v, method=text, enable_gqa=True, **options)

    torch._dynamo.reset()
    run = torch.compile(
        lambda q, k, v, valid: call(q, k, v, mask=sq.Mask.padding(valid), is_causal=causal),
        fullgraph=True,
        backend="aot_eager",
    )
    for N in LENGTHS:
        valid = torch.arange(N) < torch.tensor([[N], [N // 2]])
        results = []
        for function in (call, run):
            inputs = [*tracked(*qkv(N, H=4, G=2)), *more]
            options = {"mask": sq.Mask.padding(valid), "is_causal": causal} if function is call else {"valid": valid}
            out = function(*inputs[:3], **options)
            results.append([out, *gradients(out, *inputs)])
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


def failure(text: str) -> str | None:
    try:
        check(sq.methods.parse_method(text))
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([failure(text) for text in json.load(sys.stdin)]))
