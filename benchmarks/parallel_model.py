"""The time of one attention layer on 8 to 512 GPUs, from its operations and what it sends: a model, no measurement.

    python benchmarks/parallel_model.py [--out FILE.md]

Forward and backward of one layer in bf16: q, k and v are there, projections are not counted. Each GPU has N/R tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sheet

from subquad.core.files import write

BF16, FP32 = 2, 4
ABOUT = """\
Milliseconds of one layer, forward and backward, from a model of its operations and of what it sends: nothing was \
measured. A dash means that there are more GPUs than heads. The fastest way of each method is bold.

`python benchmarks/parallel_model.py --out benchmarks/results/parallel-model.md`"""


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes. Rates are what is reached, not what is printed on the box.

    Attributes:
        exact: operations per second of fused exact attention.
        other: operations per second of the products of a sub-quadratic method.
        inside: bytes per second that a GPU sends to others of its node (NVLink).
        between: bytes per second that a GPU sends to other nodes (400 Gb/s).
        start: seconds from the start of an exchange to its first byte.
    """

    exact: float = 0.5 * 989e12
    other: float = 0.2 * 989e12
    inside: float = 0.8 * 450e9
    between: float = 0.8 * 50e9
    start: float = 20e-6
    node: int = 8


@dataclass(frozen=True)
class Layer:
    """One layer of attention: N tokens, all heads together, with C clusters, their top K keys and R features."""

    tokens: int
    heads: int = 32
    width: int = 128
    clusters: int = 256
    topk: int = 32
    bits: int = 63
    iterations: int = 10
    features: int = 256


Times = tuple[float, float]  # of computing and of sending, in seconds


def slowest(machine: Machine, ranks: int) -> float:
    """Bytes per second between neighbours of a ring, of which some are in different nodes."""
    return machine.inside if ranks <= machine.node else machine.between


def to_all(machine: Machine, ranks: int, sent: float) -> float:
    """Seconds to send `sent` bytes to each other rank: those inside the node and those between run side by side."""
    near = min(ranks, machine.node) - 1
    far = ranks - 1 - near
    return machine.start + max(near * sent / machine.inside, far * sent / machine.between)


def ring(machine: Machine, layer: Layer, ranks: int) -> float:
    """Exact attention: keys and values are passed on twice, and their gradients once in fp32, while GPUs compute."""
    block = 2 * layer.tokens / ranks * layer.heads * layer.width
    rounds = (ranks - 1) * (2 * block * BF16 + block * FP32) / slowest(machine, ranks)
    return max(exact_products(machine, layer, ranks), rounds + 3 * (ranks - 1) * machine.start)


def exact_products(machine: Machine, layer: Layer, ranks: int) -> float:
    """4·N²·D operations per head forward and 2.5 times as many backward, by all ranks together."""
    return 3.5 * 4 * layer.tokens**2 * layer.width * layer.heads / ranks / machine.exact


def exchange_of_heads(machine: Machine, layer: Layer, ranks: int) -> float | None:
    """q, k, v and out, and their gradients, each once from tokens to heads or back; None with more ranks than heads."""
    if ranks > layer.heads:
        return None
    one = layer.tokens / ranks * layer.heads * layer.width * BF16
    return 4 * to_all(machine, ranks, 2 * one / ranks)


def clustered_products(machine: Machine, layer: Layer, ranks: int) -> float:
    """The products of i-clustered: hashes, k-means, centroids on all keys, members on their top keys."""
    D, C = layer.width, layer.clusters
    once = 2 * layer.bits * D + 2 * C * layer.bits * layer.iterations
    again = 4 * C * D + 4 * layer.topk * D
    return (once + 3.5 * again) * layer.tokens * layer.heads / ranks / machine.other


def clustered_numbers(layer: Layer) -> float:
    """Numbers per head that ranks combine, forward and backward: votes, sums, scores, partials, top keys and values."""
    C, D, k = layer.clusters, layer.width, layer.topk
    votes = C * layer.bits * (layer.iterations + 1)
    return votes + 2 * C * (D + 1) + C * k + 2 * C * (D + 1) + 2 * C * k * 2 * D


def linear_products(machine: Machine, layer: Layer, ranks: int) -> float:
    """Sums over features, and queries that read them."""
    per_token = 3.5 * (2 * layer.features * layer.width + 4 * layer.features * layer.width)
    return per_token * layer.tokens * layer.heads / ranks / machine.other


def by_heads(machine: Machine, layer: Layer, ranks: int, products: Callable[..., float]) -> float | None:
    """A method by heads: it waits for the exchange."""
    sent = exchange_of_heads(machine, layer, ranks)
    return None if sent is None else products(machine, layer, ranks) + sent


def by_shares(machine: Machine, ranks: int, sent: float, exchanges: int) -> float:
    """Seconds in which ranks combine `sent` bytes: each a share of them for all, and then sends its results to all."""
    twice = 2 * (to_all(machine, ranks, sent / ranks) - machine.start)
    return twice + 2 * exchanges * machine.start


def clustered(machine: Machine, layer: Layer, ranks: int) -> float:
    """i-clustered by summaries, in fp32: k-means, means, scores, rows forward, and means and rows backward."""
    sent = clustered_numbers(layer) * layer.heads * FP32
    return clustered_products(machine, layer, ranks) + by_shares(machine, ranks, sent, 7 + layer.iterations)


def linear(machine: Machine, layer: Layer, ranks: int) -> float:
    """A feature map by summaries: R·(D + 1) numbers per head in fp32, combined once forward and once backward."""
    sent = linear_numbers(layer) * layer.heads * FP32
    return linear_products(machine, layer, ranks) + by_shares(machine, ranks, sent, 2)


def linear_numbers(layer: Layer) -> float:
    """Numbers per head of the sums over features, forward and backward."""
    return 2 * layer.features * (layer.width + 1)


WAYS: dict[str, Callable[[Machine, Layer, int], float | None]] = {
    "full, ring": ring,
    "full, heads": lambda *of: by_heads(*of, exact_products),
    "i-clustered, heads": lambda *of: by_heads(*of, clustered_products),
    "i-clustered, summary": clustered,
    "performer, heads": lambda *of: by_heads(*of, linear_products),
    "performer, summary": linear,
}


def rows(machine: Machine, tokens: list[int], gpus: list[int]) -> list[list[str]]:
    """Milliseconds of each way; of the ways of one method the fastest is bold."""
    found = []
    for n in tokens:
        for ranks in gpus:
            times = {name: way(machine, Layer(n), ranks) for name, way in WAYS.items()}
            found.append([f"{n:,}", str(ranks), *(_cell(name, times) for name in WAYS)])
    return found


def _cell(name: str, times: dict[str, float | None]) -> str:
    time, method = times[name], name.split(",")[0]
    if time is None:
        return sheet.MISSING
    known = [x for other, x in times.items() if other.split(",")[0] == method and x is not None]
    said = f"{1e3 * time:,.1f}" if time < 1 else f"{1e3 * time:,.0f}"
    return f"**{said}**" if time == min(known) else said


def main(
    tokens: tuple[int, ...] = (10**6, 10**7, 10**8), gpus: tuple[int, ...] = (8, 32, 128, 512), out: Path | None = None
) -> None:
    table = sheet.table(["tokens", "GPUs", *WAYS], rows(Machine(), tokens, gpus))
    text = f"# One attention layer on many GPUs, predicted\n\n{ABOUT}\n\n{table}\n"
    print(text)
    if out is not None:
        write(out, text)


if __name__ == "__main__":
    sheet.run(main)
