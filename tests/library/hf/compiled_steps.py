"""Generate on a static cache with compiled steps: for each `model=method` on the command line, print what was seen.

A process of its own, because Dynamo cannot trace the run-time type checks that pytest switches on here.
"""

import json
import sys
from typing import Any

import torch
import transformers as hf

import subquad as sq
from tests.library.hf.models import build

NEW = 8
CALLS = ("call_function", "call_method")


def tokens_of(model: Any, inputs: dict[str, Any], step: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The new tokens and the last logits of a loop as a user writes it, without padding."""
    cache = hf.StaticCache(config=model.config, max_cache_len=inputs["input_ids"].shape[1] + NEW)
    with torch.inference_mode():
        logits, tokens = model(inputs["input_ids"], past_key_values=cache).logits, []
        for _ in range(NEW):
            tokens.append(logits[:, -1:].argmax(-1))
            logits = step(input_ids=tokens[-1], past_key_values=cache).logits
    return torch.cat(tokens, 1), logits


def seen(name: str, method: str) -> dict[str, Any]:
    """Return the findings on compiled steps: whether tokens are right, the number of graphs, and their operators."""
    case, operators = build(name), set()

    def backend(graph: Any, _: Any) -> Any:
        operators.update(str(node.target) for node in graph.graph.nodes if node.op in CALLS)
        return graph.forward

    def graphs() -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    case.model.set_attn_implementation("sdpa")
    sq.hf.swap(case.model, method)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    want, logits = tokens_of(case.model, case.inputs, case.model)
    compiled = torch.compile(case.model.forward, fullgraph=True, backend=backend)
    have, compiled_logits = tokens_of(case.model, case.inputs, compiled)
    torch.testing.assert_close(compiled_logits, logits, atol=1e-5, rtol=1e-5)
    result: dict[str, Any] = {"loop": torch.equal(have, want), "graphs": graphs()}

    # Padding on the left, in `generate`, which makes the mask of each step outside of the graph.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    result["generate"] = True
    for length in (17, 11, 14):  # requests of several lengths, with the padding of the batch
        inputs = {name: x[:, -length:] for name, x in case.inputs.items()}
        want = case.model.generate(**inputs, **options)
        have = case.model.generate(**inputs, **options, **sq.hf.compiled_steps(17 + NEW, backend=backend))
        result["generate"] &= torch.equal(have, want)
    result["graphs of generate"] = graphs()
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):  # as `caches.md` describes it
        options |= sq.hf.compiled_steps(17 + NEW, backend=backend)
        result["unguarded"] = torch.equal(case.model.generate(**inputs, **options), want)
        twice = {name: torch.cat([x, x]) for name, x in inputs.items()}
        try:
            case.model.generate(**twice, **options)
        except RuntimeError as error:
            result["another batch"] = str(error)
    return result | {"operators": sorted(operators)}


if __name__ == "__main__":
    print(json.dumps([seen(*argument.split("=", 1)) for argument in sys.argv[1:]]))
