"""The approximations of the nearest published systems against "clustered-tail", on the real inputs of an encoder.

    python benchmarks/published_ideas.py [--data FOLDER] [--lengths "512 2048 4096"] [--out FILE.md]

FOLDER holds state_union/state_union.zip; the default is the environment variable SUBQUAD_DATA. Every idea is written in
plain PyTorch from the paper's formulas, for one head. Only the approximation is compared, not the speed of a kernel:
error of the attention output against the keys that a query meets exactly, and against multiply-adds.

Each idea returns the output of one head and what a query costs. Multiply-adds count products of matrices, k-means and
hashes on vectors included; not comparisons, exponentials, sums, and k-means on hashes, which counts bits.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import sheet
import speeches
import torch
import typer
from clustered_tail_settings import exact_products, products
from matplotlib.figure import Figure
from torch import Tensor

import subquad as sq
from subquad.core.files import write
from subquad.tools.measure.capture import LayerInputs
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.report import drawing

LENGTHS = {512: 2, 2048: 1, 4096: 1}  # and how many speeches are read
EVERY = {2048: 2, 4096: 3}  # of the heads, at lengths that take long
LAYERS = [0, 2, 4]
KEYS = (16, 32, 64, 96, 128, 256)  # that a query meets exactly
ROUNDS = 4  # of k-means on vectors, for the ideas that cluster keys
CLAIM = 0.6  # of the best other idea's error


ABOUT = """\
The error ‖out − exact‖ / ‖exact‖ of the attention output of layers 0, 2 and 4 of the demo encoder (12 heads of 32), \
mean of layers, on speeches of the State of the Union.
In brackets are the multiply-adds in percent of exact attention's.
At 2,048 tokens every second head is measured, at 4,096 every third.
Beyond 512 tokens the encoder's positions are interpolated.

The ideas are plain versions of what the papers propose, not the systems themselves: each docstring of \
`benchmarks/published_ideas.py` has the formula.
Where whole groups of keys are exact, the groups taken are those that come nearest to the number of keys asked for.
Beside its exact keys a query meets the means of all other blocks (PISA-like) or clusters of keys (SVG-EAR-like, 128 \
in all), or X cells (clustered-tail).
SVG2-like and SVG-EAR-like have 100 clusters of queries.
`lha-tail` is left out: it must be fitted first.
Exact attention to each query's nearest keys, which IceFormer approximates, has [a table of its own](nearest-keys.md).

Multiply-adds count products of matrices: hashes and k-means on vectors, choices, the query's own keys and centroids.
They do not count comparisons, exponentials, sums, and k-means on hashes, which counts bits."""


class Answer(NamedTuple):
    """The result of an idea for one head."""

    out: Tensor  # (N, E)
    keys: float  # met exactly, mean of queries
    products: float  # multiply-adds a query


Idea = Callable[[Tensor, Tensor, Tensor, float, int], Answer]  # query, key, value, scale, keys to meet exactly


# ---------------------------------------------------------------------- shared parts


class Grouped:
    """Keys and values in groups: column[j] is the group of key j."""

    def __init__(self, key: Tensor, value: Tensor, column: Tensor, groups: int):
        self.key, self.value, self.column = key, value, column
        self.counts = sizes(column, groups)
        self.k_mean, self.v_mean = mean(key, column, groups), mean(value, column, groups)


def joined(
    query: Tensor, keys: Grouped, scale: float, row: Tensor, exact: Tensor, *, rest: bool = True
) -> tuple[Tensor, float, float]:
    """One softmax over the keys of the groups that are `exact` (C, X), and over the means of the others.

    Query i is in group row[i] of queries. Returns the output, and how many keys and how many means a query meets, mean
    of queries.
    """
    out, met, means = keys.value.new_empty(len(query), keys.value.shape[1]), 0.0, 0.0
    for group in row.unique():
        own, whole, thin = row == group, exact[group][keys.column], ~exact[group] & (keys.counts > 0) & rest
        key = torch.cat([keys.key[whole], keys.k_mean[thin]])
        value = torch.cat([keys.value[whole], keys.v_mean[thin]])
        bias = torch.cat([key.new_zeros(int(whole.sum())), keys.counts[thin].to(key.dtype).log()])
        out[own] = (scale * query[own] @ key.T + bias).softmax(1) @ value
        met += float(own.sum() * whole.sum()) / len(query)
        means += float(own.sum() * thin.sum()) / len(query)
    return out, met, means


def lloyd(x: Tensor, clusters: int, rounds: int = ROUNDS) -> Tensor:
    """Labels of `rounds` of k-means from evenly spaced members."""
    means = x[torch.linspace(0, len(x) - 1, clusters).round().long()]
    for _ in range(rounds):
        labels = (means.square().sum(1) / 2 - x @ means.T).argmin(1)
        means = torch.where(sizes(labels, clusters)[:, None] > 0, mean(x, labels, clusters), means)
    return labels


def sizes(labels: Tensor, groups: int) -> Tensor:
    return torch.bincount(labels, minlength=groups)


def mean(x: Tensor, labels: Tensor, groups: int) -> Tensor:
    """Mean of each group; 0 for an empty one."""
    return x.new_zeros(groups, x.shape[1]).index_add(0, labels, x) / sizes(labels, groups).clamp(min=1)[:, None]


def best_until(scores: Tensor, counts: Tensor, keys: int) -> Tensor:
    """For each row of `scores` (C, X) the best groups, as many as come nearest to `keys` keys, but one at least."""
    order = scores.argsort(1, descending=True)
    count = counts[order]
    middle = count.cumsum(1) - count / 2
    taken = (middle <= keys) & (count > 0)
    taken[:, 0] = True
    return torch.zeros_like(taken).scatter(1, order, taken)


# ---------------------------------------------------------------------- the ideas


def position_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float, keys: int, *, block: int) -> Answer:
    """PISA (Li et al. 2026, arXiv 2602.01077), at order zero: blocks of queries and of keys by position.

    For query block c and key block x with means q̄, k̄, v̄: the blocks with the largest scale·q̄_c·k̄_x are exact; any
    other one is a single key with logit scale·q_i·k̄_x + ln n_x and value v̄_x.
    """
    (N, D), M = query.shape, len(key)
    row, column = torch.arange(N) // block, torch.arange(M) // block
    C, X = int(row[-1]) + 1, int(column[-1]) + 1
    keyed = Grouped(key, value, column, X)
    exact = best_until(mean(query, row, C) @ keyed.k_mean.T, keyed.counts, keys)
    out, met, means = joined(query, keyed, scale, row, exact)
    return Answer(out, met, C * X * D / N + (met + means) * (D + value.shape[1]))


def key_clusters(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    keys: int,
    *,
    rest: str,
    route: str = "mass",
    query_clusters: int = 100,
    clusters: int = 128,
) -> Answer:
    """SVG2 and SVG-EAR: k-means of queries and of keys, the best key clusters of each query cluster exact.

    SVG2 (Yang et al. 2025, arXiv 2505.18875): best by the mass n_x·e^{scale·q̄_c·k̄_x}; `rest` "nothing".
    SVG-EAR (Zhou et al. 2026, arXiv 2603.08982): `rest` "centroids", logits scale·q_i·k̄_x + ln n_x and values v̄_x;
    `route` "error" takes the clusters whose centroid errs most for each key that it saves,
    ‖Σ_{j in x} e^{scale·q̄_c·k_j} (v_j, 1) − n_x e^{scale·q̄_c·k̄_x} (v̄_x, 1)‖ / n_x.
    """
    (N, D), (M, E) = query.shape, value.shape
    C, X = min(query_clusters, N), min(clusters, M)
    row, keyed = lloyd(query, C), Grouped(key, value, lloyd(key, X), X)
    q_mean = mean(query, row, C)
    scores = scale * q_mean @ keyed.k_mean.T + keyed.counts.log()  # −inf for an empty cluster
    cost = ROUNDS * (C + X * M / N) * D + C * X * D / N
    if route == "error":
        logits = scale * q_mean @ key.T
        largest = logits.amax(1, keepdim=True)
        v_one, mean_one = (torch.cat([x, torch.ones_like(x[:, :1])], 1) for x in (value, keyed.v_mean))
        weights = (logits - largest).exp()
        members = [keyed.column == x for x in range(X)]
        sums = torch.stack([weights[:, own] @ v_one[own] for own in members], 1)
        errors = (sums - (scores - largest).exp()[..., None] * mean_one).norm(dim=2) / keyed.counts
        scores = errors.masked_fill(keyed.counts == 0, -torch.inf)
        cost += C * M * (D + E) / N
    exact = best_until(scores, keyed.counts, keys)
    out, met, means = joined(query, keyed, scale, row, exact, rest=rest == "centroids")
    return Answer(out, met, cost + (met + means) * (D + E))


def coreset(query: Tensor, key: Tensor, value: Tensor, scale: float, keys: int, *, temperature: float) -> Answer:
    """WildCat (Schröder, Mackey 2026, arXiv 2602.10056): a weighted coreset of keys, the same for all queries.

    With keys less their mean, h(k, k') = e^{scale·k·k'/τ²}: r pivots S by randomly pivoted Cholesky (each drawn with a
    probability proportional to what is left of the diagonal of h), Nyström weights W = h(S, S)⁻¹ h(S, K), and

        out_i = e^{scale·q_i·K_Sᵀ} W V / e^{scale·q_i·K_Sᵀ} W 1

    with each row clipped to the range of the values, inside which every weighted mean of them is. τ is `temperature`;
    the paper derives one from the norms, here it is fixed. Of 0.5, 0.7, 1, 1.4, 2 and 3, 2 is the best at 512 tokens.
    In fp64.
    """
    (N, D), (M, E), r = query.shape, value.shape, min(keys, len(key))
    dtype, query, value = query.dtype, query.double(), value.double()
    centred = key.double() - key.double().mean(0)
    points = centred * math.sqrt(scale) / temperature
    generator = torch.Generator().manual_seed(0)
    left, factor, pivots = points.square().sum(1).exp(), points.new_zeros(M, r), []
    for i in range(r):
        if float(left.sum()) <= 0:
            break
        pivot = int(torch.multinomial(left, 1, generator=generator))
        column = (points @ points[pivot]).exp() - factor[:, :i] @ factor[pivot, :i]
        factor[:, i] = column / column[pivot].sqrt()
        left = (left - factor[:, i].square()).clamp(min=0)
        left[pivot] = 0
        pivots.append(pivot)
    chosen = torch.tensor(pivots)
    root = factor[chosen, : len(pivots)].tril()  # h(S, S) = root rootᵀ
    weights = torch.linalg.solve_triangular(root.T, factor[:, : len(pivots)].T, upper=True)
    logits = scale * query @ centred[chosen].T
    seen = (logits - logits.amax(1, keepdim=True)).exp()
    mass = seen @ weights.sum(1, keepdim=True)
    out = seen @ (weights @ value) / torch.where(mass.abs() > 1e-30, mass, 1.0)
    out = out.clamp(value.amin(0), value.amax(0))
    # Columns of the kernel, what the earlier pivots explain of them, the triangular solve, W·V; then the queries.
    cost = (M * r * D + 2 * M * r * r / 2 + M * r * E) / N + r * (D + E)
    return Answer(out.to(dtype), len(pivots), cost)


def of_method(method: Callable[[int], sq.Method], cost: Callable[[sq.Method, int, int, int], float]) -> Idea:
    """A method of the library, given the keys that a query meets exactly. `cost`: of the method, N, M and D."""

    def idea(query: Tensor, key: Tensor, value: Tensor, scale: float, keys: int) -> Answer:
        made = method(keys)
        out = made(*(x[None, None] for x in (query, key, value)), scale=scale)[0, 0]
        return Answer(out, min(keys, len(key)), cost(made, len(query), len(key), query.shape[1]))

    return idea


def improved_products(method: sq.ImprovedClustered, N: int, M: int, D: int) -> float:
    """Hashes of the queries, attention of the mean queries to all keys, top keys."""
    return method.bits * D + min(method.clusters, N) * 2 * D * M / N + method.topk * 2 * D


def tail_products(method: sq.ClusteredTail, N: int, M: int, D: int) -> float:
    """For as many keys as queries."""
    return products(D, min(method.clusters, N), min(method.topk, M), method.cells)


def setting(idea: Callable[..., Answer], **settings: object) -> Idea:
    return lambda query, key, value, scale, keys: idea(query, key, value, scale, keys, **settings)


def improved(clusters: int) -> Idea:
    return of_method(lambda keys: sq.ImprovedClustered(clusters=clusters, topk=keys), improved_products)


def tail(clusters: int, cells: int) -> Idea:
    return of_method(lambda keys: sq.ClusteredTail(clusters=clusters, topk=keys, cells=cells), tail_products)


IDEAS: dict[str, Idea] = {
    "PISA-like (blocks of 64)": setting(position_blocks, block=64),
    "PISA-like (blocks of 16)": setting(position_blocks, block=16),
    "SVG2-like": setting(key_clusters, rest="nothing"),
    "SVG-EAR-like (best by mass)": setting(key_clusters, rest="centroids"),
    "SVG-EAR-like (best by error)": setting(key_clusters, rest="centroids", route="error"),
    "WildCat-like (τ = 1)": setting(coreset, temperature=1.0),
    "WildCat-like (τ = 2)": setting(coreset, temperature=2.0),
    "i-clustered (C = 100)": improved(100),
    "i-clustered (C = 256)": improved(256),
    "clustered-tail (C = 32, X = 16)": tail(32, 16),
    "clustered-tail (C = 64, X = 16)": tail(64, 16),
    "clustered-tail (C = 100, X = 16)": tail(100, 16),
    "clustered-tail (C = 100, X = 64)": tail(100, 64),
    "clustered-tail (C = 256, X = 16)": tail(256, 16),
}
OURS = [name for name in IDEAS if name.startswith("clustered-tail")]
CLAIMED = "clustered-tail (C = 100, X = 16)"


# ---------------------------------------------------------------------- measurement


class Figures(NamedTuple):
    """The figures of one idea at one number of keys: means of inputs and heads."""

    error: float
    keys: float
    products: float


def measured(idea: Idea, inputs: Sequence[LayerInputs], keys: int, every: int = 1) -> Figures:
    """Error over all heads of a layer, or every few, mean of layers and passages."""
    found = []
    for call in inputs:
        query, key, value = (x[0, ::every] for x in (call.query, call.key, call.value))
        scale = call.options["scale"]
        heads = [idea(*head, scale, keys) for head in zip(query, key, value, strict=True)]
        exact = sq.attention(query[None], key[None], value[None], scale=scale, method="full")[0]
        met, cost = (statistics.fmean(getattr(head, name) for head in heads) for name in ("keys", "products"))
        found.append((relative_error(torch.stack([head.out for head in heads]), exact), met, cost))
    return Figures(*map(statistics.fmean, zip(*found, strict=True)))


Found = Mapping[str, Mapping[int, Figures]]  # of one length: by idea and number of keys


def at_equal_keys(ideas: Found) -> list[list[str]]:
    """Rows: the error of the claim's setting, the best other idea's, their ratio."""
    rows = []
    for keys, ours in ideas[CLAIMED].items():
        others = {name: figures[keys].error for name, figures in ideas.items() if name not in OURS}
        best = min(others, key=others.__getitem__)
        rows.append([str(keys), f"{ours.error:.3f}", f"{others[best]:.3f}", ratio(ours.error, others[best]), best])
    return rows


def at_equal_products(ideas: Found, exact: float) -> list[list[str]]:
    """Rows: at every idea's cost that is on the others' Pareto front, the least error of ours that costs no more."""
    ours = [each for name in OURS for each in ideas[name].values()]
    others = [(each, name, keys) for name in ideas if name not in OURS for keys, each in ideas[name].items()]
    rows, least = [], math.inf
    for each, name, keys in sorted(others, key=lambda other: other[0].products):
        if each.error >= least or each.products > exact:
            continue
        least = each.error
        best = min((our.error for our in ours if our.products <= each.products), default=None)
        cells = [sheet.MISSING] * 2 if best is None else [f"{best:.3f}", ratio(best, each.error)]
        rows.append([share(each.products, exact), cells[0], f"{each.error:.3f}", cells[1], f"{name}, {keys} keys"])
    return rows


def ratio(ours: float, other: float) -> str:
    return f"{ours / other:.2f}" + ("" if ours <= CLAIM * other else " (not met)")


def share(cost: float, exact: float) -> str:
    return f"{100 * cost / exact:.1f} %"


def plot(results: Mapping[int, Found], exact: Mapping[int, float]) -> bytes:
    """Error against multiply-adds, a panel for each length."""
    with drawing.look():
        figure = Figure(figsize=(3.6 * len(results), 5.4), layout="constrained")
        panels = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
        looks = drawing.styles(list(IDEAS))
        for ax, (length, ideas) in zip(panels, results.items(), strict=True):
            for name, figures in ideas.items():
                points = [(100 * each.products / exact[length], each.error) for each in figures.values()]
                ax.plot(*zip(*points, strict=True), label=name, **looks[name].line)
            ax.axvline(100, color="#9aa2aa", linewidth=1)
            ax.set(xscale="log", yscale="log", title=f"{length:,} tokens", xlabel="multiply-adds, % of exact attention")
            drawing.ticks(ax.xaxis, ax.get_xlim(), lambda x: f"{x:g}")
            drawing.ticks(ax.yaxis, ax.get_ylim(), lambda y: f"{y:g}")
        panels[0].set_ylabel("‖out − exact‖ / ‖exact‖")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        what = f"error with {', '.join(map(str, KEYS))} exact keys a query"
        return drawing.png(drawing.titled(figure, "all-MiniLM-L6-v2", what))


@torch.inference_mode()
def main(
    lengths: tuple[int, ...] = tuple(LENGTHS),
    keys: tuple[int, ...] = KEYS,
    ideas: Annotated[list[str] | None, typer.Option(help="repeatable; default: all")] = None,
    data: Path = sheet.DATA_OR_LOCAL,
    out: Path | None = None,
) -> None:
    found: dict[int, dict[str, dict[int, Figures]]] = {}
    exact = {}
    for length in lengths:
        inputs = speeches.passages(data, length, LENGTHS.get(length, 1)).inputs(LAYERS)
        exact[length] = exact_products(length, inputs[0].query.shape[3])
        found[length] = {}
        for name in ideas or IDEAS:
            every = EVERY.get(length, 1)
            found[length][name] = {count: measured(IDEAS[name], inputs, count, every) for count in keys}
            print(length, name, *(f"{each.error:.3f}" for each in found[length][name].values()), flush=True)
    publish(found, exact, out)


def publish(results: Mapping[int, Found], exact: Mapping[int, float], out: Path | None) -> None:
    """The sheet, and with a file to write to also the plot and the figures beside it."""
    parts = [ABOUT]
    if out is not None:
        parts.append(f"![Error against multiply-adds]({out.stem}.png)")
    for length, ideas in results.items():
        keys = list(next(iter(ideas.values())))
        rows = [
            [name, *(f"{each.error:.3f} ({share(each.products, exact[length])})" for each in figures.values())]
            for name, figures in ideas.items()
        ]
        parts += [f"## {length:,} tokens", sheet.table(["exact keys a query", *map(str, keys)], rows)]
        if CLAIMED in ideas and len(ideas) > len(OURS):
            head = ["clustered-tail", "best other", "ratio", "which"]
            equal = at_equal_products(ideas, exact[length])
            parts += [
                f"At equal numbers of exact keys, {CLAIMED} against the best of the others:",
                sheet.table(["exact keys", *head], at_equal_keys(ideas)),
                "At equal multiply-adds, the best clustered-tail of the table against the Pareto front of the others:",
                sheet.table(["multiply-adds", *head], equal),
            ]
    records = {
        str(length): {
            name: [each._asdict() | {"asked": keys} for keys, each in by.items()] for name, by in ideas.items()
        }
        for length, ideas in results.items()
    }
    sheet.publish("Ideas of published systems on real inputs", parts, out, records=records)
    if out is not None:
        write(out.with_suffix(".png"), plot(results, exact))


if __name__ == "__main__":
    sheet.run(main)
