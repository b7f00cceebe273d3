"""The op `merge_windows`."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.windows import reference
from subquad.kernels.dispatch import Op
from subquad.kernels.tensors import token_major
from subquad.kernels.tokens.token_windows import TokenWindows

merge_windows = Op(reference.merge_windows)


@merge_windows.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor]:
    """Run on a compiled backend, to which windows travel as four numbers each."""
    numbers = [number for windows in x.windows for number in windows.numbers()]
    out, lse = merged_windows.run(backend, list(x.outs), list(x.lses), numbers, x.tokens, x.rounded)
    return out, lse


@merge_windows.operator(
    "outs", "lses", "numbers", "tokens", "rounded", outs=list[Tensor], lses=list[Tensor], numbers=list[int]
)
def merged_windows(x: Any) -> tuple[Tensor, Tensor]:
    """Allocate out and lse."""
    count, H, E = x.outs[0].shape[0] // x.numbers[3], x.outs[0].shape[1], x.outs[0].shape[3]
    lse = x.lses[0].new_empty(count, H, x.tokens)
    return token_major(lse[..., None], E, x.outs[0].dtype if x.rounded else torch.float32), lse


def windows_of(numbers: list[int]) -> list[TokenWindows]:
    """The windows that travelled as numbers."""
    return [TokenWindows(*numbers[at : at + 4]) for at in range(0, len(numbers), 4)]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, outs, lses, numbers, *_ = inputs
    ctx.windows = windows_of(numbers)
    ctx.save_for_backward(*outs, *lses, *output)


def _differentiate(ctx: Any, of_out: Tensor, of_lse: Tensor) -> tuple[Any, ...]:
    """The gradients: of out_p it is share_p·g, of lse_p share_p·(g·(out_p − out) + γ), with g and γ those of both.

    Here out is the output as it was returned, rounded or not.
    """
    *parts, out, lse = ctx.saved_tensors
    outs, lses = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    of_out = of_out.to(of_lse.dtype)
    apart = of_lse - (of_out * out).sum(-1)
    of_outs, of_lses = [], []
    for part, of_part, windows in zip(outs, lses, ctx.windows, strict=True):
        g, total, offset = (_by_window(windows.view(x)) for x in (of_out, lse, apart))
        share = torch.where(torch.isneginf(of_part), 0.0, (of_part - total).exp())
        of_outs.append((share[..., None] * g).to(part.dtype))
        of_lses.append(share * ((g * part).sum(-1) + offset))
    return None, of_outs, of_lses, None, None, None


def _by_window(x: Tensor) -> Tensor:
    """(B,H,count,length,…) as (B·count,H,length,…)."""
    return x.transpose(1, 2).flatten(0, 1)


merged_windows.gradient(_differentiate, _save)
