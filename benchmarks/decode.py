"""The cost of a token while decoding: exact attention on kept keys, a state, and linear methods on kept keys.

    python benchmarks/decode.py [--lengths "128 … 65536"] [--methods "linear performer"] [--out FILE.md]

One token follows so many others. "keys": the method reads all of them again, as with an ordinary cache. "state": a step
from a state that stands for them. Memory is that of the keys and values, or of the state, in fp32.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import sheet
import torch
from torch import Tensor

import subquad as sq

PROMPT = 2048  # tokens put into a state at once: what is timed does not depend on them


def on_keys(bound: sq.BoundMethod, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """A token that reads all keys."""
    mask = sq.Mask.causal(offset=key.shape[2] - 1)

    def call() -> Tensor:
        with torch.inference_mode():
            return bound(query, key, value, mask=mask)

    return call


def on_state(bound: sq.BoundMethod, query: Tensor, key: Tensor, value: Tensor) -> tuple[Callable[[], Tensor], int]:
    """A token that reads a state, and the state's bytes."""
    prompt = (query.expand_as(key), key, value)
    with torch.inference_mode():
        _, state = bound.step(*(x[:, :, :PROMPT] for x in prompt), bound.init_state(1, like=query))

    def call() -> Tensor:
        with torch.inference_mode():
            return bound.step(query, key[:, :, -1:], value[:, :, -1:], state)[0]

    return call, sum(tensor.nbytes for tensor in state.values())


def main(
    lengths: tuple[int, ...] = (128, 1024, 4096, 16384, 65536),
    methods: tuple[str, ...] = ("linear", "performer"),
    seconds: float = 2.0,
    out: Path | None = None,
) -> None:
    rows, head = [], []
    for length in sorted(lengths):
        query, key, value = (torch.randn(1, sheet.HEADS, n, sheet.WIDTH) for n in (1, length, length))
        sizes = {"heads": sheet.HEADS, "head_dim": sheet.WIDTH, "max_length": length}
        calls, slow = {"SDPA on keys": on_keys(sq.Full().bind(**sizes), query, key, value)}, {}
        memory = {"keys and values": key.nbytes + value.nbytes}
        for method in methods:
            bound = sq.parse_method(method).bind(**sizes).eval()
            calls[f"{method}, state"], memory[f"{method}, state"] = on_state(bound, query, key, value)
            slow[f"{method} on keys"] = on_keys(bound, query, key, value)
        # The slow ones in rounds of their own: the others would have few rounds beside them.
        times = sheet.milliseconds(calls, seconds) | sheet.milliseconds(slow, seconds)
        ms = {name: statistics.median(own) for name, own in times.items()}
        head = ["tokens before", *(f"{name}, ms" for name in ms), *(f"{name}, MB" for name in memory)]
        rows.append(
            [f"{length:,}", *(f"{value:,.2f}" for value in ms.values()), *(f"{n / 1e6:,.2f}" for n in memory.values())]
        )
    about = "One token of one item, 6 heads of 64, all in turn at each length; medians. Memory of one layer."
    sheet.publish("What a token costs while decoding", [about, sheet.table(head, rows)], out)


if __name__ == "__main__":
    sheet.run(main)
