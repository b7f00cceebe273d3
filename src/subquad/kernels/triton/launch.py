"""Launches of kernels, and small functions that several kernels call."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import Parameter, signature
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import target_info

from subquad.core.requirements import release
from subquad.core.versions import let_scalars_be_indices
from subquad.kernels.triton import INTERPRETED
from subquad.kernels.triton.recording import Launch, LaunchCost, recorded

if INTERPRETED and release(triton.__version__) < (3, 7):
    from triton.runtime import interpreter

    let_scalars_be_indices(interpreter)

DEFAULTS = {"num_warps": 4, "num_stages": 2}  # of a launch
Around = Callable[[str], AbstractContextManager[object]]
_around: list[Around] = []  # of all threads: on a GPU, autograd runs backward passes in a thread of its own
# Numbers of tokens, heads, groups and list entries. Triton would compile a kernel again where one of these is 1 or is
# divisible by 16. With `kernel` one version serves all of them, so that what is known of it holds at every length.
COUNTS = (
    *("H", "G", "GROUP", "share", "heads", "of_state"),
    *("N", "M", "tokens", "length", "runs", "first", "begin", "unit", "tiles", "chunks"),
    *("C", "K", "X", "R", "S", "T", "groups", "known", "count", "words", "size"),
    *("blocks", "slots", "key_slots", "first_query", "first_key", "offset", "span"),
)
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # of fp32: a logit of −∞ that is seen
PROGRAMS = 512  # into which work over runs of tokens is divided: several for each multiprocessor


def kernel(function: Callable[..., Any]) -> Any:
    """Make a kernel of a function: `triton.jit` that compiles it once whatever its COUNTS are, less its constants."""
    inputs = signature(function).parameters
    counts = [name for name in COUNTS if name in inputs and inputs[name].annotation is Parameter.empty]
    return triton.jit(function, do_not_specialize=counts)


@contextmanager
def around_launches(around: Around) -> Iterator[None]:
    """Run every launch inside the block, in any thread, between the two halves of `around(name of the kernel)`."""
    _around.append(around)
    try:
        yield
    finally:
        _around.pop()


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Run a kernel with a grid of programs, or write the launch down inside `recording`.

    A grid without programs is skipped. Arguments go by name; tensors as they are, of any strides. Three names are not
    the kernel's own: `num_warps` (4), `num_stages` (2), and `cost`, what the launch does (`recording.LaunchCost`).
    """
    if 0 in grid:
        return
    cost = arguments.pop("cost", None) or LaunchCost()
    options = {name: arguments.pop(name, default) for name, default in DEFAULTS.items()}
    launches = recorded()
    if launches is not None:
        launches.append(Launch.record(kernel, grid, arguments, options, cost))
        return
    device = next(x.device for x in arguments.values() if isinstance(x, Tensor))
    around = _around[-1] if _around else _nothing_around
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), around(kernel.__name__):
        kernel[grid](**arguments, **options)


def _nothing_around(name: str) -> AbstractContextManager[object]:
    return nullcontext()


def padded(width: int) -> int:
    """The power of two, at least 16, into which a width fits: what a product of tiles takes."""
    return max(16, triton.next_power_of_2(width))


def tile(size: int, most: int) -> int:
    """The edge of a tile for `size` rows: a power of two from 16 to `most`."""
    return min(most, padded(size))


def slice_of(x: Tensor, most: int = 256) -> int:
    """Components of a row at a time in products over them: of fp32 few, else as many as there are, up to `most`."""
    return min(padded(x.shape[-1]), most, 32 if x.dtype == torch.float32 else most)


def runs_of(tokens: int, step: int, others: int, most: int = PROGRAMS) -> tuple[int, int]:
    """The length of the runs into which tokens are cut, a multiple of `step`, and their number: (length, runs).

    With `others` programs for each run there are some PROGRAMS in all, and at most `most` runs.
    """
    steps = max(1, triton.cdiv(tokens, step))
    runs = max(1, min(steps, most, PROGRAMS // max(1, others)))
    length = triton.cdiv(steps, runs) * step
    return length, triton.cdiv(max(1, tokens), length)


def rows(x: Tensor) -> Tensor:
    """The tensor, copied where its vectors do not lie together in memory."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides(name: str, x: Tensor) -> dict[str, int]:
    """The steps of a (B,H,N,·) tensor as arguments of a kernel, such as `x_b`, `x_h` and `x_n` for the name x."""
    return {f"{name}_{axis}": step for axis, step in zip("bhn", x.stride(), strict=False)}


@triton.jit
def of_head(x, head, H, x_b, x_h):
    """The start of a head's vectors; heads of all items are numbered consecutively."""
    return x + head // H * x_b + head % H * x_h


@triton.jit
def key_head(head, H, G):
    """The key head that a query head meets."""
    return head // H * G + head % H // (H // G)


@triton.jit
def load_ends(offsets, head, group, groups):
    """The beginning and the end of a group in the order of its head's tokens."""
    at = offsets + head * (groups + 1) + group
    return tl.load(at), tl.load(at + 1)


@triton.jit
def load_positions(order, position, end):
    """The tokens at these places of an order, and which of the places come before the end."""
    present = position < end
    return tl.load(order + position, mask=present, other=0), present


@triton.jit
def load_rows(x, stride, row, present, width, WIDTH: tl.constexpr):
    """The vectors of these rows, (rows, WIDTH); 0 for rows that are not there and behind the vectors' width."""
    column = tl.arange(0, WIDTH)
    pointers = x + row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(pointers, mask=present[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def store_rows(x, stride, row, present, values, width, WIDTH: tl.constexpr):
    """Store (rows, WIDTH) values as the vectors of these rows, in x's dtype."""
    column = tl.arange(0, WIDTH)
    pointers = x + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(pointers, values.to(x.dtype.element_ty), mask=present[:, None] & (column < width)[None, :])


@triton.jit
def dot(a, b):
    """a·b in fp32, on tensor cores: numbers of 16 bits as they are, fp32 as three products in TF32 (not as one)."""
    precision: tl.constexpr = "ieee" if target_info.is_hip() else "tf32x3"  # matrix cores of AMD take fp32 as it is
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def inner(a, a_n, i, i_present, b, b_n, j, j_present, width, SLICE: tl.constexpr, KIND: tl.constexpr):
    """The inner products of rows i of a with rows j of b, a slice of their width at a time.

    The warps of a small tile hold the same rows, in fp32 as parts in TF32: whole ones would not fit their registers.
    """
    products = tl.zeros((i.shape[0], j.shape[0]), tl.float32)
    for start in range(0, width, SLICE):
        of_a = load_rows(a + start, a_n, i, i_present, width - start, SLICE)
        of_b = load_rows(b + start, b_n, j, j_present, width - start, SLICE)
        products += dot(of_a.to(KIND), tl.trans(of_b.to(KIND)))
    return products


@triton.jit
def inner_of(x, a, a_n, i, i_present, y, b, b_n, j, j_present, width, SLICE: tl.constexpr):
    """`inner`, by one product of the whole rows x of a and y of b where a slice is as wide as they are."""
    if x.shape[1] > SLICE:
        products = inner(a, a_n, i, i_present, b, b_n, j, j_present, width, SLICE, y.dtype)
    else:
        products = dot(x, tl.trans(y))
    return products


@triton.jit
def dot_upcast(weights, x):
    """weights·x for fp32 weights: numbers of 16 bits meet weights rounded to their own kind."""
    return dot(weights.to(x.dtype), x)


@triton.jit
def dot_shrunk(weights, x):
    """2⁻²⁴ times `dot_upcast`, so that no sum of numbers overflows whose mean does not; fp16 cannot, and has no factor.

    `unshrunk` takes the factor away, after the division that makes means of sums.
    """
    SHRINK: tl.constexpr = 1.0 if x.dtype == tl.float16 else 2.0**-24
    return dot_upcast(weights * SHRINK, x)


@triton.jit
def unshrunk(means, x):
    """The means of what the pointer x has, from sums by `dot_shrunk`."""
    GROW: tl.constexpr = 1.0 if x.dtype.element_ty == tl.float16 else 2.0**24
    return means * GROW


@triton.jit
def allowed_exponentials(logits, allowed, largest):
    """One step of an online softmax: (the largest logits so far, what scales earlier sums, the new weights).

    A row that has seen nothing keeps −∞ and weights of 0.
    """
    logits = tl.where(allowed, logits, float("-inf"))
    new = tl.maximum(largest, tl.max(logits, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    return new, tl.exp(largest - safe), tl.exp(logits - safe[:, None])
