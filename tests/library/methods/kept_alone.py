"""Print what became of calls with `keep` that run-time type checks, which pytest switches on here, would stop.

Dynamo cannot trace them, and they refuse wrong types before the library does.
"""

import json
import traceback

import torch

import subquad as sq
from subquad import Mask
from subquad.testing.oracle import gradients, qkv, tracked

COMPILED = ("local:window=3", "i-clustered:clusters=5,topk=4")
WRONG = {"int": 0, "str": "first", "Mask": Mask.causal(), "set": {0}}


def compiled(text: str) -> str | None:
    """Return what goes wrong, if anything, when `keep` is compiled: indices without a break, a bool with one."""
    mask = Mask.padding(torch.tensor([24, 20]))
    keep = [0, -1] if text == COMPILED[0] else torch.tensor([[0, 7], [3, 3]])

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return sq.attention(*inputs, method=text, mask=mask, keep=keep)

    try:
        torch._dynamo.reset()
        eager, traced = tracked(*qkv()), tracked(*qkv())
        want, got = attend(*eager), torch.compile(attend, fullgraph=True, backend="aot_eager")(*traced)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(gradients(got, *traced), gradients(want, *eager))
        if text != COMPILED[0]:
            return None
        kept = torch.arange(24).expand(2, -1) % 5 == 1

        def attend_mask(kept: torch.Tensor) -> torch.Tensor:
            return sq.attention(*qkv(), method=text, keep=kept)

        broken = torch.compile(attend_mask, backend="aot_eager")
        torch.testing.assert_close(broken(kept), attend_mask(kept))
    except Exception:
        return traceback.format_exc()
    return None


def message(keep: object) -> str:
    """Return what the library says about this `keep`."""
    try:
        sq.attention(*qkv(), method="local", keep=keep)
    except TypeError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    torch.set_num_threads(1)
    outcomes = {"compiled": {text: compiled(text) for text in COMPILED}}
    print(json.dumps(outcomes | {"wrong": {name: message(keep) for name, keep in WRONG.items()}}))
