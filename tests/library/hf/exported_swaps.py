"""Export swapped models with a dynamic length: for each `model=method` on the command line, print what was seen.

A process of its own, because the run-time type checks of pytest know no symbolic sizes. For each case: the error of
`torch.export`, or {length: "equal" or what is wrong}.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

import subquad as sq
from tests.library.hf.models import VOCAB, build

TRACED = 20
LENGTHS = 3, 20, 33, 60  # around where the op of few queries ends


class Outputs(nn.Module):
    """The main output of a model, as a function of its tokens."""

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.options = model, {"use_cache": False} if hasattr(model, "generate") else {}

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, **self.options)[0]


def outcomes(name: str, method: str) -> str | dict[int, str]:
    """Return the outcome of a swapped model's exported program at each length, or the error of the export."""
    model = build(name).model.eval()
    sq.hf.swap(model, method)
    wrapped = Outputs(model).eval()
    draw = torch.Generator().manual_seed(0)
    ids = {n: torch.randint(5, VOCAB, (1, n), generator=draw) for n in LENGTHS}
    with torch.no_grad():
        try:
            shapes = ({1: torch.export.Dim.DYNAMIC},)
            program = torch.export.export(wrapped, (ids[TRACED],), dynamic_shapes=shapes).module()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return {n: outcome(program, wrapped, ids[n]) for n in LENGTHS}


def outcome(program: Any, wrapped: nn.Module, ids: Tensor) -> str:
    """Return "equal" if a program gives what the model gives, otherwise the error."""
    try:
        torch.testing.assert_close(program(ids), wrapped(ids), atol=1e-5, rtol=1e-4)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "equal"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([outcomes(*case.split("=", 1)) for case in sys.argv[1:]]))
