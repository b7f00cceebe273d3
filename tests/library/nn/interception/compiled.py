"""Doors into other models under `torch.compile`; prints what was seen as JSON.

A process of its own, because Dynamo cannot trace the run-time type checks that pytest switches on here.
"""

import json
from collections.abc import Callable

import torch
import torch.nn.functional as F

import subquad as sq
from tests.library.nn.interception.test_intercept import ROUGH, VALID, Own, encoder

FUTURE = torch.ones(9, 9).triu(1).bool()


def compiled(run: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(run, fullgraph=True, backend="aot_eager")


def raised(run: Callable) -> str:
    try:
        run()
    except Exception as error:
        return str(error)
    return ""


def masks() -> dict[str, object]:
    """Masks that shapes tell, and those that only their numbers do."""
    q = torch.randn(2, 2, 9, 8)

    def run(attn_mask):
        return sq.attention(q, q, q, method="full", mask=sq.Mask.from_sdpa(attn_mask))

    valid = VALID[:, None, None]
    wanted = F.scaled_dot_product_attention(q, q, q, attn_mask=valid)
    return {
        "mask over keys": torch.allclose(compiled(run)(valid), wanted, atol=1e-5),
        "mask that must be read": raised(lambda: compiled(run)(~FUTURE)),
    }


def layers() -> dict[str, object]:
    """Our layer with torch's masks, and torch's with a method swapped in."""
    ours, x = sq.nn.MultiheadAttention(16, 2).eval(), torch.randn(2, 9, 16)
    hint, padding = {"attn_mask": FUTURE, "is_causal": True}, {"key_padding_mask": ~VALID}
    model = encoder()
    sq.nn.swap(model, ROUGH)
    return {
        "layer, hint": torch.allclose(compiled(ours)(x, **hint), ours(x, is_causal=True), atol=1e-5),
        "layer, padding": torch.allclose(compiled(ours)(x, **padding), ours(x, **padding), atol=1e-5),
        "swapped": torch.allclose(compiled(model)(x), model(x), atol=1e-5),
    }


def intercepted() -> dict[str, object]:
    """Calls of SDPA in compiled code."""
    seen = {}
    for name, model in {"own": Own().eval(), "encoder": encoder()}.items():
        x = torch.randn(2, 9, 16)
        with torch.no_grad():
            exact = model(x)
            with sq.intercept(ROUGH):
                wanted = model(x)
            run = compiled(model)
            with sq.intercept(ROUGH) as table:
                seen[name] = torch.allclose(run(x), wanted, atol=1e-5)
            seen[f"{name} after"] = torch.allclose(run(x), exact, atol=1e-5)
            seen[f"{name} rows"] = len(table.calls)
    own = compiled(Own().eval())
    with sq.intercept("smyrf"):
        seen["own, causal"] = raised(lambda: own(torch.randn(2, 9, 16), is_causal=True))
    model, x = encoder(), torch.randn(2, 9, 16)
    torch._dynamo.reset()
    with sq.intercept("smyrf") as table:
        got = torch.compile(model, backend="aot_eager")(x, mask=FUTURE)
    seen["encoder, causal"] = torch.allclose(got, model(x, mask=FUTURE), atol=1e-5)
    seen["encoder, causal, rows"] = [(row.where, row.reason.partition(":")[0]) for row in table.calls]
    q = torch.randn(2, 2, 9, 8)
    with sq.intercept(ROUGH):
        got = compiled(lambda q: sq.attention(q, q, q, method="full"))(q)
    seen["our own"] = torch.allclose(got, F.scaled_dot_product_attention(q, q, q), atol=1e-5)
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(masks() | layers() | intercepted()))
