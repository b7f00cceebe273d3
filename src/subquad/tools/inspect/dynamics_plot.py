"""The plot of what fitting does to hash functions (figure 4 of Sun, Yang, Yoo 2022)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from subquad.tools.report import drawing

ROWS = {"kl": "KL divergence, nats", "negative_entropy": "negative entropy, nats"}
SIDES = {"query": "queries", "key": "keys"}
Record = Sequence[Mapping[str, Any]]  # {"step": 10, "layers": {"0": {"kl_query": 0.2, …}}}


def dynamics_figure(
    record: Record, name: str, buckets: int | None = None, subject: str = "hash functions"
) -> Figure | None:
    """Divergences and negative entropies of queries and of keys against the steps, a line for each layer.

    Args:
        record: one entry a logged step; `measure.dynamics.Dynamics` of each layer, by its number.
        name: the name of the model.
        buckets: B, for a line at the least negative entropy, −ln B.
        subject: the fitted part, in words.

    None where the record has no such figures.
    """
    known = (number for entry in record for number, metrics in entry["layers"].items() if "kl_query" in metrics)
    layers = sorted(set(map(int, known)))
    if not layers:
        return None
    figure = Figure(figsize=(9.6, 6.2), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    colors = colormaps["viridis"].resampled(len(layers))
    for row, (what, label) in zip(axes, ROWS.items(), strict=True):
        for ax, (side, tokens) in zip(row, SIDES.items(), strict=True):
            for i, layer in enumerate(layers):
                ax.plot(*_line(record, layer, f"{what}_{side}"), color=colors(i), linewidth=1.2, alpha=0.85)
            mean = _mean([_line(record, layer, f"{what}_{side}") for layer in layers])
            ax.plot(list(mean), list(mean.values()), color="#222222", linewidth=2.6, label="mean of the layers")
            if what == "negative_entropy" and buckets:
                even = f"−ln {buckets}: spread evenly over the buckets"
                ax.axhline(-math.log(buckets), label=even, **drawing.EXPECTED)
            ax.set_title(tokens, fontsize=10)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        row[0].set_ylabel(label)
    for ax in axes[-1]:
        ax.set_xlabel("step")
    bar = drawing.layer_bar(figure, axes, colors, list(map(str, layers)), aspect=30)
    bar.tick_params(length=0, labelsize=8.5)
    handles, labels = axes[-1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return drawing.titled(figure, name, f"{subject} while fitted")


def _line(record: Record, layer: int, figure: str) -> tuple[list[int], list[float]]:
    """Steps and figures."""
    line = {entry["step"]: entry["layers"].get(str(layer), {}).get(figure) for entry in record}
    known = {step: value for step, value in line.items() if value is not None}
    return list(known), list(known.values())


def _mean(lines: Sequence[tuple[list[int], list[float]]]) -> dict[int, float]:
    """The mean by step over the layers that have the step."""
    values: dict[int, list[float]] = {}
    for steps, by_step in lines:
        for step, figure in zip(steps, by_step, strict=True):
            values.setdefault(step, []).append(figure)
    return {step: sum(numbers) / len(numbers) for step, numbers in sorted(values.items())}
