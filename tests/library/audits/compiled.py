"""An audit of a compiled model, before, while and after; prints what was seen as JSON.

A process of its own, because Dynamo cannot trace the run-time type checks that pytest switches on here.
"""

import json
import random

import torch

import subquad as sq


def main() -> dict[str, object]:
    torch.manual_seed(0)
    layer = sq.nn.MultiheadAttention(32, 4, method="i-clustered:clusters=4,topk=8").eval()
    x, seen = torch.randn(2, 40, 32), {}
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.inference_mode():
        plain, generator = layer(x), random.getstate()
        with sq.audit(layer, tolerance=2.0, every=1):
            layer(x)
        seen["random"] = random.getstate() == generator
        seen["compiled first"] = torch.allclose(compiled(x), plain, atol=1e-5)
        frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with sq.audit(compiled, tolerance=2.0, every=2) as audit:
            seen["while"] = all(torch.allclose(compiled(x), plain, atol=1e-5) for _ in range(4))
        report = audit.report().overall
        seen["calls"], seen["audited"], seen["rows"] = report.calls, report.audited, report.rows
        seen["broken"] = torch._dynamo.utils.counters["stats"]["unique_graphs"] > frames
        seen["after"] = torch.allclose(compiled(x), plain, atol=1e-5)
        seen["no more calls"] = audit.report().overall.calls == report.calls
        torch._dynamo.reset()
        whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with sq.audit(layer, tolerance=2.0):
            try:
                whole(x)
            except torch._dynamo.exc.Unsupported as error:
                seen["fullgraph"] = str(error)
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main()))
