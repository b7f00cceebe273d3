"""The looseness of a deterministic bound of clustered-tail's error from the radii of its clusters and cells.

    python benchmarks/certificate.py [--data FOLDER] [--lengths "512 …"] [--out FILE.md]

For query i of cluster j, with cells x of the keys l outside the cluster's top keys, scale s and p_l ∝ e^{s q̄_j·k_l}
over a cell, whose means are k̄ and v̄:

    out_i − exact_i = −(1/Z) Σ_x Ŝ_x Σ_l p_l (e^{a_l} − 1)(v_l − out_i),     a_l = s (q_i − q̄_j)·(k_l − k̄),  |a_l| ≤ ρ
    ‖out_i − exact_i‖ ≤ Σ_x w_ix [(e^ρ − 1) Σ_l p_l ‖v_l − v̄‖ + (cosh ρ − 1) ‖v̄ − out_i‖],
    ρ = s ‖q_i − q̄_j‖ max_l ‖k_l − k̄‖

because Σ p_l a_l = 0, so that 1 ≤ Σ p_l e^{a_l} ≤ cosh ρ, and the true normaliser Z is at least the approximate one.
w_ix is the weight of the cell in the approximate softmax. It never fails; the question is how often it says anything:
how often it is below ‖exact_i‖.
"""

from pathlib import Path

import sheet
import speeches
import torch
from clustered_tail_settings import clustered
from torch import Tensor

from subquad.kernels.selection.cells.op import key_cells
from subquad.methods.clustered_tail import OF_ITEM, by_length

CELLS = 32


def certified(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The bound, the error and the length of the exact output, for each query of one head. All (N, …) in fp64."""
    N, M = len(query), len(key)
    C, K = by_length(0, OF_ITEM.clusters, N, None)[0], by_length(0, OF_ITEM.topk, M, None)[0]
    labels = clustered(query[None, None].float(), key[None, None].float(), C)[0, 0]
    cell = key_cells(key[None, None].float(), value[None, None].float(), None, cells=CELLS, seed=0)[0, 0].long()
    exact = (scale * query @ key.T).softmax(-1) @ value
    bound, error = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for j in labels.unique():
        own = (labels == j).nonzero()[:, 0]
        mean = query[own].mean(0)
        top = (scale * key @ mean).topk(K).indices
        rest = torch.ones(M, dtype=torch.bool).scatter(0, top, False).nonzero()[:, 0]
        x, logits = cell[rest], scale * key[rest] @ mean
        weights = (logits - logits.max()).exp()
        mass = torch.zeros(CELLS, dtype=torch.float64).index_add(0, x, weights)
        p = weights / mass[x]
        mean_key = torch.zeros(CELLS, key.shape[1]).double().index_add(0, x, p[:, None] * key[rest])
        mean_value = torch.zeros(CELLS, value.shape[1]).double().index_add(0, x, p[:, None] * value[rest])
        far = torch.zeros(CELLS).double().scatter_reduce(0, x, (key[rest] - mean_key[x]).norm(dim=1), "amax")
        spread = torch.zeros(CELLS).double().index_add(0, x, p * (value[rest] - mean_value[x]).norm(dim=1))
        off = query[own] - mean
        of_cells = mass.log() + logits.max() + scale * off @ mean_key.T
        chances = torch.cat([scale * query[own] @ key[top].T, of_cells], 1).softmax(-1)
        out = chances[:, :K] @ value[top] + chances[:, K:] @ mean_value
        radius = scale * off.norm(dim=1, keepdim=True) * far
        moved = (mean_value - out[:, None]).norm(dim=-1)
        bound[own] = (chances[:, K:] * (radius.expm1() * spread + (radius.cosh() - 1) * moved)).sum(-1)
        error[own] = (out - exact[own]).norm(dim=-1)
    return bound, error, exact.norm(dim=-1)


def adversarial(N: int) -> tuple[Tensor, Tensor, Tensor]:
    """Few directions and far outliers, so that clusters and cells hold what does not belong together."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, N, 32, generator=generator, dtype=torch.float64)
    k[::7], q[::5] = 6 * k[::7], 6 * q[::5]
    v[::3] = -v[::3].abs() * 10
    return q, k, v


def row(name: str, heads: list[tuple[Tensor, Tensor, Tensor]]) -> list[str]:
    bound, error, size = (torch.cat(each) for each in zip(*heads, strict=True))
    useful, ratio = bound < size, bound / error
    assert bool((bound >= error - 1e-9 * size).all()), f"{name}: the bound does not hold"
    return [
        name,
        f"{len(bound):,}",
        f"{float((error / size).median()):.3f}",
        f"{float((bound / size).median()):.3g}",
        f"{100 * float(useful.double().mean()):.2f} %",
        f"{float(ratio[useful].median()):.0f}" if useful.any() else sheet.MISSING,
    ]


def main(lengths: tuple[int, ...] = (512, 2048), data: Path = sheet.DATA, out: Path | None = None) -> None:
    rows = []
    with torch.inference_mode():
        for length in lengths:
            q, k, v = torch.randn(3, length, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            rows.append(row(f"standard normal, {length:,} tokens", [certified(q, k, v, 32**-0.5)]))
            rows.append(row(f"outliers, {length:,} tokens", [certified(*adversarial(length), 32**-0.5)]))
            for layer in speeches.passages(data, length, 1).inputs([0, 2, 5]):
                heads = [
                    certified(*(x[0, head].double() for x in (layer.query, layer.key, layer.value)), 32**-0.5)
                    for head in range(0, 12, 3)
                ]
                rows.append(row(f"encoder, layer {layer.number}, {length:,} tokens", heads))
    head = ["input", "rows", "median error", "median bound", "bound below 1", "bound / error there"]
    about = (
        "Errors and bounds are divided by the length of the exact row. Of the encoder every third head reads a speech. "
        "The bound held in every row."
    )
    sheet.publish("A deterministic bound of clustered-tail's error", [about, sheet.table(head, rows)], out)


if __name__ == "__main__":
    sheet.run(main)
