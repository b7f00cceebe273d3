"""Learned hash functions H_Q and H_K: for every head, vectors to one score a bucket."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from subquad.core.randomness import normal
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.heads import repeat_heads

KINDS = ("mlp", "linear")


class HashFunction(nn.Module):
    """One function a head, D → B: linear, or a perceptron with one hidden layer of ReLUs.

        linear: H(x) = x W + b             mlp: H(x) = relu(x W₁ + b₁) W + b

    The start is drawn from the seed: random directions, no biases. A linear start is that of LSH.
    """

    def __init__(self, heads: int, width: int, buckets: int, kind: str, hidden: int, seed: int):
        super().__init__()
        sizes = [width, buckets] if kind == "linear" else [width, hidden, buckets]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for layer, (before, after) in enumerate(pairwise(sizes)):
            drawn = normal((seed + layer) % 2**63, heads * before, after, like=torch.zeros(1))
            gain = 2.0 if kind == "mlp" and layer == 0 else 1.0
            self.weights.append(nn.Parameter(drawn.view(heads, before, after) * (gain / before) ** 0.5))
            self.biases.append(nn.Parameter(torch.zeros(heads, 1, after)))

    def forward(self, x: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N C"]:
        """Scores, in x's dtype."""
        return perceptron(x, list(zip(self.weights, self.biases, strict=True)))


def perceptron(x: Float[Tensor, "B H N D"], layers: Sequence[tuple[Tensor, ...]]) -> Float[Tensor, "B H N C"]:
    """Layers of (weight, bias) for each head, with ReLUs between them, in x's dtype."""
    for number, (weight, bias) in enumerate(layers):
        x = (x if number == 0 else x.relu()) @ weight.to(x.dtype) + bias.to(x.dtype)
    return x


class HashFunctions(nn.Module):
    """H_Q for each query head and H_K for each key head."""

    by_query_head: ClassVar[tuple[str, ...]] = ("query",)
    by_key_head: ClassVar[tuple[str, ...]] = ("key",)

    def __init__(self, heads: int, kv_heads: int, width: int, buckets: int, *, kind: str, hidden: int, seed: int):
        super().__init__()
        self.query = HashFunction(heads, width, buckets, kind, hidden, seed)
        self.key = HashFunction(kv_heads, width, buckets, kind, hidden, seed + 1000)
        self.buckets = buckets


@dataclass(frozen=True)
class Hashed:
    """Scores of vectors over buckets that are still to be computed: Σ_t H_t(√scale · x_t).

    If x_t has fewer heads than the layer, several heads share one of x_t's.
    """

    terms: tuple[tuple[HashFunction, Float[Tensor, "B _ N D"]], ...]
    heads: int
    root: float

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B,H,N,C)."""
        function, x = self.terms[0]
        return x.shape[0], self.heads, x.shape[2], function.weights[-1].shape[2]

    @property
    def device(self) -> torch.device:
        """The device of the vectors."""
        return self.terms[0][1].device

    def scores(self) -> Float[Tensor, "B H N C"]:
        """The sum, in fp32 or better."""
        first, *others = (repeat_heads(function(upcast(x)[0] * self.root), self.heads) for function, x in self.terms)
        return sum(others, first)

    def at(self, tokens: Int64[Tensor, "B H S"]) -> Float[Tensor, "B H S C"]:
        """The scores of these tokens alone, which each head chose for itself."""

        def of_term(function: HashFunction, x: Tensor) -> Tensor:
            by_term = tokens.reshape(len(x), x.shape[1], -1)  # those of all heads that share one of x's
            vectors = x.gather(2, by_term[..., None].expand(-1, -1, -1, x.shape[3]))
            return function(upcast(vectors)[0] * self.root).view(*tokens.shape, -1)

        first, *others = (of_term(function, x) for function, x in self.terms)
        return sum(others, first)

    def __add__(self, other: "Hashed") -> "Hashed":
        return replace(self, terms=self.terms + other.terms)


def hashed(
    query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"], functions: HashFunctions, scale: float
) -> tuple[Hashed, Hashed]:
    """H_Q(q·√scale) and H_K(k·√scale), for every query head."""
    root, heads = abs(scale) ** 0.5, query.shape[1]
    return Hashed(((functions.query, query),), heads, root), Hashed(((functions.key, key),), heads, root)


def divergence(target: Float[Tensor, "B H N C"], logits: Float[Tensor, "B H N C"]) -> Float[Tensor, ""]:
    """KL(target ‖ softmax(logits)) over the last axis, the mean over all rows; targets need not be normalised.

    Rows whose target is 0 throughout are left out: those of padding.
    """
    total = target.sum(-1, keepdim=True)
    counted = total[..., 0] > 0
    target = target / torch.where(total > 0, total, 1.0)
    each = (torch.special.xlogy(target, target) - target * logits.log_softmax(-1)).sum(-1)
    return (each * counted).sum() / counted.sum().clamp(min=1)
