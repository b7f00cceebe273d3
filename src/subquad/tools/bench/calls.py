"""The calls that `subquad bench` measures, on inputs drawn from a seed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from subquad.attention import attention
from subquad.distributed import Sequence
from subquad.methods import parse_method
from subquad.methods.full import EXACT
from subquad.tools.bench.settings import BACKWARD, BenchSettings
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.measure.timing import stopwatch

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
NO_MEMORY = "out of memory"  # a reason
NAIVE = "naive"  # the name of `naive`, which is not a method of the library


@dataclass(frozen=True)
class Load:
    """The inputs of a call: all that a process must know to make them again."""

    length: int
    dtype: str
    passes: str
    batch: int
    heads: int
    head_dim: int
    device: str
    seed: int
    causal: bool = False

    @property
    def key(self) -> str:
        """The key of a load in the names of units."""
        return f"{self.dtype}/{self.passes}/{self.length}"


def in_words(load: str) -> str:
    """A load's key in words."""
    dtype, passes, length = load.split("/")
    return f"{int(length):,} tokens ({passes}, {dtype})"


def loads_of(s: BenchSettings) -> list[Load]:
    """The calls to measure, panel by panel, the shortest first: the longer ones are predicted from them."""
    assert s.heads is not None  # `resolved`
    assert s.head_dim is not None
    return [
        Load(length, dtype, passes, s.batch, s.heads, s.head_dim, s.device, s.seed, s.causal)
        for dtype in dict.fromkeys(s.dtypes)
        for passes in dict.fromkeys(s.passes)
        for length in sorted(set(s.lengths))
    ]


class Calls:
    """Standard normal q, k and v (B,H,N,D), for "forward+backward" also the gradient of the output, and calls on them.

    Each process of a group draws its own tokens.

    Draws the same numbers for every dtype. Methods with learned parameters run with those that they start with, which
    cost what fitted ones do.
    """

    def __init__(self, load: Load, group: MeasuringGroup = ALONE):
        self.load = load
        self.backward = load.passes == BACKWARD
        rank, tokens = (0, load.length) if group.ranks is None else (group.ranks.rank, group.local_tokens(load.length))
        # On the device itself: at 131,072 tokens the CPU takes ten seconds to draw what a GPU attends to in one.
        generator = torch.Generator(load.device).manual_seed(load.seed * group.count + rank)
        shape = (load.batch, load.heads, tokens, load.head_dim)

        def normal() -> Tensor:
            return torch.randn(shape, generator=generator, device=load.device).to(DTYPES[load.dtype])

        self.inputs = [normal().requires_grad_(self.backward) for _ in range(3)]
        self.gradient = normal() if self.backward else None
        self.learned: list[Parameter] = []  # of the methods that are called

    def call_of(self, method: str, split: Sequence | None = None) -> Callable[[], Tensor]:
        """A call of this method; "full" is SDPA itself, without anything of ours around it; "naive" is known too.

        On split tokens "full" is a method like the others.
        """
        if split is None and method in (EXACT, NAIVE):
            return self._call(F.scaled_dot_product_attention if method == EXACT else naive)
        return self._call(partial(self._attention(method), parallel=split))

    def _attention(self, method: str) -> Callable[..., Tensor]:
        parsed = parse_method(method)
        if not parsed.traits.learned:
            return partial(attention, method=parsed)
        load = self.load
        bound = parsed.bind(heads=load.heads, head_dim=load.head_dim, max_length=load.length).eval().to(load.device)
        self.learned += bound.parameters()
        return bound

    def clear(self) -> None:
        """Clear the gradients of the previous call."""
        for tensor in (*self.inputs, *self.learned):
            tensor.grad = None

    def _call(self, attend: Callable[..., Tensor]) -> Callable[[], Tensor]:
        query, key, value = self.inputs
        attend = partial(attend, is_causal=True) if self.load.causal else attend

        def forward() -> Tensor:
            with torch.inference_mode():
                return attend(query, key, value)

        def forward_and_backward() -> Tensor:
            out = attend(query, key, value)
            out.backward(self.gradient)
            return out

        return forward_and_backward if self.backward else forward


def naive(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention as first published: the N×N matrix of weights is formed."""
    return torch.softmax(query @ key.mT * query.shape[3] ** -0.5, -1) @ value


def hindrance(call: Callable[[], Any]) -> str | None:
    """The reason why this call cannot run, found by running it once."""
    try:
        call()
    except (ValueError, TypeError) as refusal:
        return " ".join(str(refusal).split())
    except (RuntimeError, MemoryError) as error:
        return out_of_memory(error)
    return None


def second_call(call: Callable[[], Any], device: str, between: Callable[[], Any]) -> float:
    """Seconds of a call after one that warms up; 0 if it cannot run, for which it reports the reason itself."""
    if hindrance(call) is not None:
        return 0.0
    between()
    return stopwatch(call, torch.device(device))[0]


def out_of_memory(error: RuntimeError | MemoryError) -> str:
    """The reason that such an error is; any other error goes on."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error):
        return NO_MEMORY
    raise error


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Run torch on `number` threads inside the block; None leaves the number as it is."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
