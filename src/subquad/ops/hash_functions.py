"""Learned hash functions H_Q and H_K: for every head, vectors to one score a bucket."""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subquad.randomness import normal

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
            drawn = normal(seed + layer, heads * before, after, like=torch.zeros(1))
            gain = 2.0 if kind == "mlp" and layer == 0 else 1.0
            self.weights.append(nn.Parameter(drawn.view(heads, before, after) * (gain / before) ** 0.5))
            self.biases.append(nn.Parameter(torch.zeros(heads, 1, after)))

    def forward(self, x: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N C"]:
        """Scores, in x's dtype."""
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weight.to(x.dtype) + bias.to(x.dtype)
            x = x.relu() if layer < last else x
        return x


class HashFunctions(nn.Module):
    """H_Q for each query head and H_K for each key head."""

    def __init__(self, heads: int, kv_heads: int, width: int, buckets: int, *, kind: str, hidden: int, seed: int):
        super().__init__()
        self.query = HashFunction(heads, width, buckets, kind, hidden, seed)
        self.key = HashFunction(kv_heads, width, buckets, kind, hidden, seed + 1000)
        self.buckets = buckets
