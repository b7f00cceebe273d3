"""Export each method that is named on standard input, and print what its program does at other lengths.

A process of its own, because the run-time type checks of pytest know no symbolic sizes. For each method: the error of
`torch.export`, or {length: "equal", "refused" (a guard says that the length does not fit) or what is wrong}.
"""

import json
import sys

import torch
from torch import Tensor, nn

import subquad as sq
from subquad.testing.oracle import qkv

TRACED = 48
LENGTHS = 3, 17, 33, 49, 64, 100


class Layer(nn.Module):
    """Attention with padding."""

    def __init__(self, method: sq.Method):
        super().__init__()
        self.bound = method.bind(heads=4, kv_heads=2, head_dim=8, max_length=128)
        self.causal = method.traits.causal == "strict"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor) -> Tensor:
        return self.bound(query, key, value, mask=sq.Mask.padding(valid), is_causal=self.causal)


def inputs(N: int) -> tuple[Tensor, ...]:
    return *qkv(N, H=4, G=2), torch.arange(N) < torch.tensor([[N], [N // 2]])


def outcomes(text: str) -> str | dict[int, str]:
    layer, length = Layer(sq.methods.parse_method(text)).eval(), torch.export.Dim.DYNAMIC
    try:
        shapes = ({2: length}, {2: length}, {2: length}, {1: length})
        program = torch.export.export(layer, inputs(TRACED), dynamic_shapes=shapes).module()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return {N: outcome(program, layer, N) for N in LENGTHS}


def outcome(program: nn.Module, layer: Layer, N: int) -> str:
    try:
        torch.testing.assert_close(program(*inputs(N)), layer(*inputs(N)), atol=1e-5, rtol=1e-4)
    except AssertionError as error:
        return "refused" if "Guard failed" in str(error) else f"differs: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "equal"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for text in json.load(sys.stdin):
        print(json.dumps([text, outcomes(text)]), flush=True)
