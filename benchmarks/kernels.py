"""The time of each compiled kernel, relative to the least that arithmetic and memory traffic allow.

    python benchmarks/kernels.py --gflops 235 [--lengths "4096 16384"] [--threads 2] [--repeats 30] [--out FILE.md]

The setting is the papers': one item, 6 heads, 64 wide, 100 clusters, 63 bits, 10 iterations, 32 top keys, fp32; for
learned hashing linear functions as they start, and a bucket of 128·√2 tokens for every 128; 256 random features of
the softmax kernel, and causal products of 64 wide vectors.

The floor of a kernel is the larger of two times. Arithmetic: its multiplications and additions at the rate of one
core that `benchmarks/products.cpp` prints, times the threads. Memory: the bytes that it must read and write once, at
the rate of a large tensor's copy. Kernels that run only inside of others are differences of two times.
"""

import statistics
from pathlib import Path
from typing import Annotated

import sheet
import torch
import typer

import subquad as sq
from subquad.core.files import write
from subquad.kernels import native
from subquad.kernels.attention.features.op import feature_attention
from subquad.kernels.attention.products.op import causal_product
from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.selection.kmeans.op import hamming_kmeans
from subquad.tools.measure.timing import timed_rounds
from subquad.tools.runs import machine

H, D, C, K, BITS, ITERATIONS, BUCKET, FEATURES, TILE = 6, 64, 100, 32, 63, 10, 128, 256, 64
# With AVX-512's popcount four vector instructions, two a cycle, compare eight words: a quarter of a cycle for one.
# In that time products do 16 multiplications and additions.
FLOPS_A_WORD = 16


def medians(calls, repeats):
    """Milliseconds of each call, in turn."""
    for call in calls.values():
        call()
    return {name: 1e3 * statistics.median(times) for name, times in timed_rounds(calls, repeats).items()}


def copy_rate(repeats):
    """GB/s of a copy."""
    source, target = torch.randn(2, 32_000_000)
    return 2 * 4 * source.numel() / medians({"copy": lambda: target.copy_(source)}, repeats)["copy"] / 1e6


def bucketed(N):
    """Learned hashing with a bucket for every 128 tokens."""
    method = sq.parse_method(f"lha:buckets=0,bucket_size={BUCKET},hash=linear")
    return method.bind(heads=H, head_dim=D, max_length=N).eval()


def meetings(bound, q, k, v):
    """Hash, and choose the tokens of each bucket."""
    query, key, _, call = bound.prepare(q, k, v)
    return bound.method.meetings(query, key, call)


def by_features(causal):
    """Attention by random features, of vectors that are scaled already."""
    w = torch.randn(1, FEATURES, D) * D**-0.25
    return lambda q, k, v: feature_attention(q, k, v, of_query=w, of_key=w, causal=causal)[0]


def measured(N, repeats):
    """Milliseconds of each kernel, and of SDPA."""
    q, k, v, grad = torch.randn(4, 1, H, N, D)
    codes = hash_codes(q, BITS, 0, centre=True)
    calls = {
        "hash": lambda: hash_codes(q, BITS, 0, centre=True),
        "k-means": lambda: hamming_kmeans(codes, None, C, BITS, ITERATIONS),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    bound = bucketed(N)
    methods = {name: sq.parse_method(name) for name in ("clustered", "i-clustered")} | {"lha": bound}
    methods |= {"features": by_features(False), "causal features": by_features(True), "causal product": causal_product}
    for name, method in methods.items():
        out = method(*inputs)
        calls[name] = lambda method=method: method(q, k, v)
        calls[f"{name}, backward"] = lambda out=out: torch.autograd.grad(out, inputs, grad, retain_graph=True)
    calls["choice"] = lambda: meetings(bound, q, k, v)
    ms = medians(calls, repeats)
    return ms | {
        "in buckets": ms["lha"] - ms["choice"],
        "centroids": ms["clustered"] - ms["hash"] - ms["k-means"],
        "top keys": ms["i-clustered"] - ms["clustered"],
    }


def floors(N):
    """Each kernel's purpose, its multiplications and additions, and the bytes that it reads and writes once.

    Queries that no bucket takes, about a quarter, meet the keys of one.
    """
    buckets, taken = N // BUCKET, int(BUCKET * 2**0.5)
    choice, inside = 4 * H * N * D * buckets, 4 * H * D * (buckets * taken + 0.26 * N) * taken
    rows = 4 * H * N * D  # of one of query, key, value, output
    hashing, words = 2 * H * N * D * BITS, H * N * C * (ITERATIONS + 1) * FLOPS_A_WORD
    centroids, members = 4 * H * N * C * D, 4 * H * N * K * D
    features, pairs = 8 * H * N * FEATURES * D, H * N * TILE * (FEATURES + D)
    product, own = 4 * H * N * D * D, 2 * H * N * TILE * D
    return {
        "hash": ("mean and sign bits of the queries", hashing, rows),
        "k-means": ("of the codes", words, 8 * H * N),
        "centroids": ("sort, means, centroids' attention, output", centroids, 4 * rows),
        "top keys": ("selection and the members' own softmax", members, 2 * rows),
        "clustered": ("the whole forward pass", hashing + words + centroids, 4 * rows),
        "i-clustered": ("the whole forward pass", hashing + words + centroids + members, 4 * rows),
        "clustered, backward": ("", 2.5 * centroids, 6 * rows),
        "i-clustered, backward": ("", 2.5 * (centroids + members), 7 * rows),
        "choice": ("hash functions, each bucket's tokens", choice, 2 * rows),
        "in buckets": ("attention inside buckets, merged", inside, 4 * rows),
        "lha": ("the whole forward pass", choice + inside, 6 * rows),
        "lha, backward": ("", 2.5 * inside, 7 * rows),
        "features": ("exponents, state, output", features, 4 * rows),
        "features, backward": ("both states again, slopes", 2.5 * features, 8 * rows),
        "causal features": ("and pairs inside tiles", features + pairs, 4 * rows),
        "causal features, backward": ("", 2.75 * features + 3 * pairs, 8 * rows),
        "causal product": ("state, pairs inside tiles", product + own, 4 * rows),
        "causal product, backward": ("three products", 3 * (product + own), 12 * rows),
    }


def report(lengths, repeats, gflops):
    """The tables, as Markdown."""
    gbytes = copy_rate(repeats)
    about = machine.hardware() | {"variant": native.variant()}
    lines = [
        f"{about['processor']}, {about['threads']} threads, variant {about['variant']}, torch {torch.__version__}.",
        f"Products: {gflops:.0f} GFLOP/s on all threads. Copy: {gbytes:.0f} GB/s.",
        f"Medians of {repeats} rounds, all calls in turn.",
    ]
    for N in lengths:
        ms = measured(N, repeats)
        lines += [
            "",
            f"{N} tokens; SDPA's forward pass takes {ms['sdpa']:.1f} ms:",
            "",
            "| kernel | | ms | floor, arithmetic | floor, memory | times its floor |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, (what, flop, size) in floors(N).items():
            arithmetic, memory = flop / gflops / 1e6, size / gbytes / 1e6
            least = max(arithmetic, memory)
            lines.append(
                f"| {name} | {what} | {ms[name]:.2f} | {arithmetic:.2f} | {memory:.2f} | {ms[name] / least:.1f} |"
            )
    return "\n".join(lines) + "\n"


def main(
    gflops: Annotated[float, typer.Option(help="of products on one core: benchmarks/products.cpp")],
    lengths: tuple[int, ...] = (4096, 16384),
    repeats: int = 30,
    out: Path | None = None,
) -> None:
    text = report(lengths, repeats, gflops * torch.get_num_threads())
    print(text)
    if out:
        write(out, text)


if __name__ == "__main__":
    sheet.run(main)
