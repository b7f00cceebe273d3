"""Compiled layers, in a process without checks of shapes, which Dynamo does not trace: prints whether each is equal."""

import json

import torch
from torch import nn

import subquad as sq
from subquad.testing.oracle import normal

PADDED = torch.tensor([[False] * 9, [False] * 5 + [True] * 4])


def main() -> None:
    """Compare a swapped layer, layers of our own and those for sets, compiled in one graph, with themselves."""
    layer = nn.TransformerEncoderLayer(12, 4, 24, batch_first=True).eval()
    sq.nn.swap(layer, "clustered:clusters=2")
    ours = sq.nn.MultiheadAttention(12, 4, method="clustered:clusters=2").eval()
    cases = {
        "swapped": (layer, {}),
        "ours": (ours, {}),
        "ours, padded": (ours, {"key_padding_mask": PADDED}),
    }
    sets = {
        "set attention": sq.nn.SetAttention(12, 4, method="lsh:buckets=2"),
        "induced set attention": sq.nn.InducedSetAttention(12, 4, points=3),
        "pooling by attention": sq.nn.PoolingByAttention(12, 4, seeds=3),
        "set transformer": sq.nn.SetTransformer(12, 4, width=12, points=3),
    }
    for name, module in sets.items():
        cases[name] = (module.eval(), {})
        cases[f"{name}, padded"] = (module, {"mask": sq.Mask.padding(~PADDED)})
    remembering = sq.nn.MultiheadAttention(12, 4, method="full:positions=relative").eval()
    cases["memory"] = (remembering, {"memory": normal(2, 5, 12, seed=1), "is_causal": True})
    x, equal = normal(2, 9, 12), {}
    for name, (module, masks) in cases.items():
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        equal[name] = torch.allclose(compiled(x, **masks), module(x, **masks), atol=1e-5)
    print(json.dumps(equal))


if __name__ == "__main__":
    main()
