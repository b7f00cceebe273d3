"""The contenders of peers.py: exact attention, subquad's methods, the attention of other packages.

What a package calls attention is wrapped so that the attention alone is timed, without projections.
"""

import importlib
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import subquad as sq

BATCH, HEADS, WIDTH = 1, 6, 64
CLUSTERS, BITS, ITERATIONS, TOPK = 100, 63, 10, 32
TOPICS = 128  # of the inputs
SEEDS = (0, 1, 2)  # the error is their mean; the first is timed
CLUSTERED = sq.Clustered(clusters=CLUSTERS, bits=BITS, iterations=ITERATIONS)
I_CLUSTERED = sq.ImprovedClustered(clusters=CLUSTERS, bits=BITS, iterations=ITERATIONS, topk=TOPK)


class Inputs(NamedTuple):
    """(batch, heads, tokens, width) each."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Core:
    """Attention on given inputs, ready to run."""

    run: Callable[[], Tensor]
    leaves: Sequence[Tensor]  # what backward differentiates by
    unpack: Callable[[Tensor], Tensor] = field(default=lambda out: out)  # to (batch, heads, tokens, width)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.run()

    def forward_backward(self, gradient: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(self.run(), self.leaves, gradient)


class Contender(NamedTuple):
    """One row of the table."""

    name: str
    package: str
    make: Callable[[Inputs, int], Core]  # from inputs and a seed
    measured: str  # what exactly is timed
    like: str = ""  # the row of subquad's method of the same name
    approximates: bool = True  # exact attention of these q, k, v; otherwise its error says nothing


# ---------------------------------------------------------------------- inputs


def inputs_of(length: int) -> Inputs:
    """Queries and keys scattered around the same topics, so that attention has something to find; random values."""
    generator = torch.Generator().manual_seed(SEEDS[0])
    topics = torch.randn(BATCH, HEADS, TOPICS, WIDTH, generator=generator)

    def scattered() -> Tensor:
        topic = torch.randint(TOPICS, (BATCH, HEADS, length, 1), generator=generator).expand(-1, -1, -1, WIDTH)
        return topics.gather(2, topic) + 0.5 * torch.randn(BATCH, HEADS, length, WIDTH, generator=generator)

    return Inputs(scattered(), scattered(), torch.randn(BATCH, HEADS, length, WIDTH, generator=generator))


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().requires_grad_()


def seed_global_generators(seed: int) -> None:
    """Peers draw planes, features and starts from torch's and NumPy's global generators, some at every call."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


# ---------------------------------------------------------------------- SDPA and subquad


def exact(inputs: Inputs, seed: int) -> Core:
    q, k, v = map(leaf, inputs)
    return Core(lambda: sdpa(q, k, v), (q, k, v))


def ours(method: sq.Method) -> Callable[[Inputs, int], Core]:
    def make(inputs: Inputs, seed: int) -> Core:
        q, k, v = map(leaf, inputs)
        return Core(lambda: sq.attention(q, k, v, method=method, seed=seed), (q, k, v))

    return make


# ---------------------------------------------------------------------- pytorch-fast-transformers


@lru_cache(maxsize=1)
def fast_masks(length: int) -> tuple[object, object, object]:
    """The modules' arguments after q, k and v: all is visible. Made once; its masks cache what they derive."""
    from fast_transformers.masking import FullMask, LengthMask

    lengths = torch.full((BATCH,), length)
    return FullMask(length), LengthMask(lengths), LengthMask(lengths)


def fast(module: str, use_key: bool = True, **settings: object) -> Callable[[Inputs, int], Core]:
    def make(inputs: Inputs, seed: int) -> Core:
        attention = getattr(importlib.import_module("fast_transformers.attention"), module)(**settings).eval()
        q, k, v = (leaf(x.transpose(1, 2)) for x in inputs)
        masks = fast_masks(q.shape[1])
        leaves = (q, k, v) if use_key else (q, v)
        return Core(lambda: attention(q, k, v, *masks), leaves, lambda out: out.transpose(1, 2))

    return make


# ---------------------------------------------------------------------- performer, linformer, reformer


def performer(inputs: Inputs, seed: int) -> Core:
    from performer_pytorch import FastAttention

    attention = FastAttention(dim_heads=WIDTH).eval()
    q, k, v = map(leaf, inputs)
    return Core(lambda: attention(q, k, v), (q, k, v))


class Given(nn.Module):
    """In place of a linear layer: returns the tensor that it was made with."""

    def __init__(self, tensor: Tensor):
        super().__init__()
        self.tensor = tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.tensor


def linformer(inputs: Inputs, seed: int) -> Core:
    from linformer import LinformerSelfAttention

    q, k, v = (leaf(x.transpose(1, 2).flatten(2)) for x in inputs)
    layer = LinformerSelfAttention(dim=HEADS * WIDTH, seq_len=q.shape[1], heads=HEADS).eval()
    layer.to_q, layer.to_k, layer.to_v, layer.to_out = Given(q), Given(k), Given(v), nn.Identity()
    leaves = (q, k, v, layer.proj_k, layer.proj_v)
    return Core(lambda: layer(q), leaves, lambda out: out.unflatten(2, (HEADS, WIDTH)).transpose(1, 2))


def reformer(inputs: Inputs, seed: int) -> Core:
    from reformer_pytorch import LSHAttention

    attention = LSHAttention().eval()
    qk, v = leaf(inputs.query.flatten(0, 1)), leaf(inputs.value.flatten(0, 1))
    return Core(lambda: attention(qk, v)[0], (qk, v), lambda out: out.unflatten(0, (BATCH, HEADS)))


# ---------------------------------------------------------------------- who is compared

MODULES = {
    "pytorch-fast-transformers": "fast_transformers.attention",
    "performer-pytorch": "performer_pytorch",
    "linformer": "linformer",
    "reformer-pytorch": "reformer_pytorch",
}
INSTALL = {name: f"pip install {name}" for name in MODULES} | {
    "pytorch-fast-transformers": "pip install --no-build-isolation pytorch-fast-transformers"
}
OURS = (
    Contender("SDPA", "torch", exact, "scaled_dot_product_attention, exact"),
    Contender("subquad clustered", "subquad", ours(CLUSTERED), f"sq.attention with {CLUSTERED!r}"),
    Contender("subquad i-clustered", "subquad", ours(I_CLUSTERED), f"sq.attention with {I_CLUSTERED!r}"),
)
FAST = {"clusters": CLUSTERS, "bits": BITS, "iterations": ITERATIONS, "attention_dropout": 0.0}
PEERS = (
    Contender(
        "fast-transformers clustered",
        "pytorch-fast-transformers",
        fast("ClusteredAttention", **FAST),
        "the module ClusteredAttention (it has no projections), masks made beforehand; "
        "it draws new planes and starts in every call",
        like="subquad clustered",
    ),
    Contender(
        "fast-transformers improved-clustered",
        "pytorch-fast-transformers",
        fast("ImprovedClusteredAttention", topk=TOPK, **FAST),
        "the module ImprovedClusteredAttention, as above; its gradient leaves out the path through the top-k mass",
        like="subquad i-clustered",
    ),
    Contender(
        "fast-transformers linear",
        "pytorch-fast-transformers",
        fast("LinearAttention", query_dimensions=WIDTH),
        "the module LinearAttention with its default feature map elu + 1: another function than softmax attention",
        approximates=False,
    ),
    Contender(
        "fast-transformers reformer",
        "pytorch-fast-transformers",
        fast("ReformerAttention", use_key=False, attention_dropout=0.0),
        "the module ReformerAttention with its defaults (chunks of 32, 8 bits, 4 rounds); "
        "keys are its normalised queries, so the keys given are not read",
        approximates=False,
    ),
    Contender(
        "performer",
        "performer-pytorch",
        performer,
        "the module FastAttention (it has no projections) with its default 266 random features, drawn beforehand",
    ),
    Contender(
        "linformer",
        "linformer",
        linformer,
        "LinformerSelfAttention, k = 256, with its four linear layers taken out: the projection of keys and values "
        "along the length (untrained, its gradient included), and attention",
        approximates=False,
    ),
    Contender(
        "reformer",
        "reformer-pytorch",
        reformer,
        "the module LSHAttention (it has no projections) with its defaults (buckets of 64, 8 rounds); keys are its "
        "normalised queries, so the keys given are not read; lengths must be multiples of 128",
        approximates=False,
    ),
)


def installed(package: str) -> str | None:
    """The version of a package, or None."""
    if package == "subquad":
        return sq.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def present(peers: Sequence[str]) -> tuple[list[Contender], dict[str, str]]:
    """Those of these peers that can be imported, and for each of the others why not."""
    absent = {}
    for name in peers:
        if installed(name) is None:
            absent[name] = f"not installed: {INSTALL[name]}"
            continue
        try:
            importlib.import_module(MODULES[name])
        except Exception as error:  # whatever a package does when it is imported, the others go on
            absent[name] = f"{installed(name)} cannot be imported: {reason(error)}"
    return [peer for peer in PEERS if peer.package in peers and peer.package not in absent], absent


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
