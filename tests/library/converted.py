"""Convert methods that are named on standard input to ONNX, and print what their programs do at other lengths.

A process of its own, because the run-time type checks of pytest know no symbolic sizes. For each line of settings: the
error of `torch.onnx.export`, or {length: the largest difference to eager PyTorch}.
"""

import json
import sys
import warnings

import numpy
import torch
from torch import Tensor, nn

import subquad as sq
from tests.library.exported import inputs

TRACED = 48
LENGTHS = 3, 33, 64, 100


class Layer(nn.Module):
    """Attention with padding."""

    def __init__(self, method: sq.Method, causal: bool):
        super().__init__()
        self.bound, self.causal = method.bind(heads=4, kv_heads=2, head_dim=8, max_length=128), causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor) -> Tensor:
        return self.bound(query, key, value, mask=sq.Mask.padding(valid), is_causal=self.causal)


def outcomes(text: str, causal: bool) -> str | dict[int, float]:
    import onnxruntime

    layer, length = Layer(sq.methods.parse_method(text), causal).eval(), torch.export.Dim.DYNAMIC
    shapes = ({2: length}, {2: length}, {2: length}, {1: length})
    try:
        program = torch.onnx.export(layer, inputs(TRACED), dynamo=True, dynamic_shapes=shapes, verbose=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [each.name for each in session.get_inputs()]
    differences = {}
    for N in LENGTHS:
        given = inputs(N)
        (out,) = session.run(None, dict(zip(names, (x.numpy() for x in given), strict=True)))
        differences[N] = float(numpy.abs(out - layer(*given).numpy()).max())
    return differences


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for text, causal in json.load(sys.stdin):
        print(json.dumps(outcomes(text, causal)), flush=True)
