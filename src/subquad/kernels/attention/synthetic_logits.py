"""Logits that are not products of queries and keys (Tay et al. 2020), for "synthesizer": learned modules of one layer.

Each gives the logits of the queries with these ranks for the first M keys of an item, (B or 1, H, N, M). A row or
column of a learned matrix belongs to the token of that rank among its item's real tokens.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn


def drawn(generator: torch.Generator, std: float, *shape: int) -> nn.Parameter:
    """Normal numbers from a generator of the module's own."""
    numbers = torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
    return nn.Parameter((std * numbers).to(torch.get_default_device(), torch.get_default_dtype()))


class Random(nn.Module):
    """R of each head: every input has the same logits."""

    def __init__(self, heads: int, length: int, generator: torch.Generator):
        super().__init__()
        self.logits = drawn(generator, 1.0, heads, length, length)

    def forward(self, ranks: Int64[Tensor, "#B N"], keys: int, hidden: Tensor | None, like: Tensor) -> Tensor:
        """R_ij, i the rank of the query."""
        return self.logits[:, ranks, :keys].transpose(0, 1).to(like.dtype)


class FactorisedRandom(nn.Module):
    """R₁ R₂ᵀ of each head, of rank k, with entries of variance 1 at the start."""

    def __init__(self, heads: int, length: int, k: int, generator: torch.Generator):
        super().__init__()
        self.rows, self.columns = (drawn(generator, k**-0.25, heads, length, k) for _ in range(2))

    def forward(self, ranks: Int64[Tensor, "#B N"], keys: int, hidden: Tensor | None, like: Tensor) -> Tensor:
        """(R₁ R₂ᵀ)_ij."""
        rows = self.rows[:, ranks].transpose(0, 1).to(like.dtype)
        return rows @ self.columns[:, :keys].mT.to(like.dtype)


class Perceptron(nn.Module):
    """F(x) = W₂ relu(W₁ x + b₁) + b₂ of each head, with a hidden layer as wide as the head."""

    def __init__(self, heads: int, head_dim: int, out: int, generator: torch.Generator):
        super().__init__()
        width = heads * head_dim
        self.inner = drawn(generator, (2 / width) ** 0.5, heads, width, head_dim)
        self.inner_bias = nn.Parameter(torch.zeros(heads, 1, head_dim))
        self.outer = drawn(generator, head_dim**-0.5, heads, head_dim, out)
        self.outer_bias = nn.Parameter(torch.zeros(heads, 1, out))

    def forward(self, hidden: Float[Tensor, "B N _w"], out: int, like: Tensor) -> Float[Tensor, "B H N _o"]:
        """The first `out` outputs."""
        if hidden.shape[2] != self.inner.shape[1]:
            raise ValueError(
                f"`hidden` is {hidden.shape[2]} wide, but this layer was bound for heads that are "
                f"{self.inner.shape[1]} wide together, and reads an input of that width"
            )
        inner, inner_bias, outer, outer_bias = (
            x.to(like.dtype) for x in (self.inner, self.inner_bias, self.outer[..., :out], self.outer_bias[..., :out])
        )
        x = F.relu(hidden.to(like.dtype)[:, None] @ inner + inner_bias)
        return x @ outer + outer_bias


class Dense(nn.Module):
    """F(x_i): the content of a token decides which positions it attends to."""

    def __init__(self, heads: int, head_dim: int, length: int, generator: torch.Generator):
        super().__init__()
        self.of_token = Perceptron(heads, head_dim, length, generator)

    def forward(self, ranks: Int64[Tensor, "#B N"], keys: int, hidden: Tensor, like: Tensor) -> Tensor:
        """F(x_i)_j."""
        return self.of_token(hidden, keys, like)


class FactorisedDense(nn.Module):
    """A(x_i) of width a times B(x_i) of width b = ⌈L/a⌉: the logit of key j is A_{⌊j/b⌋} · B_{j mod b}."""

    def __init__(self, heads: int, head_dim: int, length: int, a: int, generator: torch.Generator):
        super().__init__()
        self.widths = a, -(-length // a)
        self.first, self.second = (Perceptron(heads, head_dim, width, generator) for width in self.widths)

    def forward(self, ranks: Int64[Tensor, "#B N"], keys: int, hidden: Tensor, like: Tensor) -> Tensor:
        """The products."""
        first, second = (
            made_of(hidden, width, like) for made_of, width in zip((self.first, self.second), self.widths, strict=True)
        )
        return (first[..., :, None] * second[..., None, :]).flatten(3)[..., :keys]
