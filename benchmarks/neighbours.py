"""Do the compiled kernels slow the torch calls beside them, or those the kernels?

    python benchmarks/neighbours.py [--threads 2] [--repeats 200]

Both use one OpenMP runtime. Printed are the median times of a torch call and of i-clustered attention (1,024 tokens,
6 heads of 64), each alone in a loop, and in turn. Two pools of threads that fought for the cores would show as a
multiple. What remains is the caches: each finds there what the other left.
"""

import statistics

import sheet
import torch

import subquad as sq
from subquad.tools.measure.timing import timed_rounds


def median(seconds):
    return f"{1e3 * statistics.median(seconds):>8.3f}"


def main(repeats: int = 200) -> None:
    q, k, v = torch.randn(3, 1, 6, 1024, 64)
    a, b = torch.randn(2, 700, 700)
    x = torch.randn(400_000)
    ours = {"ours": lambda: sq.attention(q, k, v, method="i-clustered")}
    neighbours = {
        "matrix product": lambda: a @ b,
        "softmax": lambda: x.softmax(0),
        "SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    print(f"{'ms':<16}   alone  in turn |  i-clustered alone  in turn")
    for name, call in neighbours.items():
        both = {name: call} | ours
        timed_rounds(both, 10)
        alone, own, alternating_rounds = (timed_rounds(calls, repeats) for calls in ({name: call}, ours, both))
        theirs = f"{name:<16}{median(alone[name])} {median(alternating_rounds[name])}"
        print(f"{theirs} | {median(own['ours']):>18} {median(alternating_rounds['ours'])}")


if __name__ == "__main__":
    sheet.run(main)
