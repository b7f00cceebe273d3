"""Generate with frozen weights: for the model on the command line, print whether its tokens are those of eager steps.

A process of its own, as `compiled_steps`.
"""

import json
import sys
from typing import Any

import torch
from torch._inductor import config

import subquad as sq
from tests.library.hf.models import Case, build

NEW = 8


def shallow(name: str) -> Case:
    """A model of two layers: of gemma3, one with a window and one without."""
    case = build(name)
    case.model.model.layers = case.model.model.layers[:2]
    case.model.config.num_hidden_layers = 2
    if hasattr(case.model.config, "layer_types"):
        case.model.config.layer_types = case.model.config.layer_types[:2]
    return case


def seen(name: str) -> dict[str, Any]:
    """Return the findings on steps with frozen weights at three lengths, by a backend that looks and the default.

    The one that looks compiles nothing; Inductor compiles the same step after it.
    """
    torch.set_num_threads(2)  # so that loops of several threads are compiled
    case, weights = shallow(name), []

    def backend(graph: Any, inputs: Any) -> Any:
        weights.append(sum(isinstance(x, torch.nn.Parameter) for x in inputs))
        return graph.forward

    case.model.set_attn_implementation("sdpa")
    sq.hf.swap(case.model, "full:kernel=subquad")
    options, same = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}, []
    for compiler in ({"backend": backend}, {}):
        torch._dynamo.reset()
        for length in (17, 11, 14):
            inputs = {name: x[:, -length:] for name, x in case.inputs.items()}
            want = case.model.generate(**inputs, **options)
            with config.patch(freezing=True):
                steps = sq.hf.compiled_steps(17 + NEW, case.model, **compiler)
                same.append(torch.equal(case.model.generate(**inputs, **options, **steps), want))
    return {"tokens": same, "weights in the graph": max(weights)}


if __name__ == "__main__":
    print(json.dumps(seen(sys.argv[1])))
