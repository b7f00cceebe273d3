"""A model with a method by name that is compiled before its first call: `python -m tests.library.hf.compiled_names`.

It prints whether the outputs of two calls are those of a swap, and after another name those of this one; whether an
error of `fullgraph=True` states what to do; and whether the outputs are the same after that was done.
"""

import copy

import torch

import subquad as sq
from tests.library.hf.models import build

SPEC = "i-clustered:clusters=3,topk=2"


def _outputs(model, inputs) -> torch.Tensor:
    return model(**inputs).last_hidden_state


def main() -> None:
    case = build("bert")
    compiled, whole = copy.deepcopy(case.model), copy.deepcopy(case.model)
    with torch.inference_mode():
        own = _outputs(case.model, case.inputs)
    sq.hf.swap(case.model, SPEC)
    for model, options in ((compiled, {}), (whole, {"fullgraph": True})):
        model.set_attn_implementation(f"subquad:{SPEC}")
        model.compile(backend="eager", **options)
    with torch.inference_mode():
        expected = _outputs(case.model, case.inputs)
        for _ in range(2):
            print(torch.allclose(_outputs(compiled, case.inputs), expected, atol=1e-5))
        compiled.set_attn_implementation("sdpa")
        for _ in range(2):
            print(torch.allclose(_outputs(compiled, case.inputs), own, atol=1e-5))
        torch._dynamo.reset()  # else the graph of the first model serves the second
        try:
            _outputs(whole, case.inputs)
            print("no error")
        except Exception as error:
            print("call the model once before" in str(error) or str(error))
        whole.forward(**case.inputs)
        print(torch.allclose(_outputs(whole, case.inputs), expected, atol=1e-5))


if __name__ == "__main__":
    main()
