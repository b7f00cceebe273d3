"""Figure 5 of learning-to-hash attention: a layer's latency in training and inference, against softmax attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from subquad.methods.full import EXACT
from subquad.nn import MultiheadAttention
from subquad.nn.auxiliary import has_auxiliary_loss, with_auxiliary_loss
from subquad.research.papers.base import Cell, Context, Experiment, JobResults
from subquad.research.papers.results import Lines, Results, Table
from subquad.research.papers.side_by_side import (
    Timed,
    all_rounds,
    alternating_rounds,
    naive_gib,
    powers,
    shown,
    speedup,
)
from subquad.tools.bench.calls import NAIVE, Load
from subquad.tools.bench.settings import BACKWARD
from subquad.tools.measure.fidelity import crossover
from subquad.tools.measure.timing import Effort, spread

STAGES = ("training", "inference")


@dataclass(frozen=True, kw_only=True)
class LhaLatencyScale:
    """The settings of the measurements of LHA's latency."""

    lengths: tuple[int, ...]
    attention_sizes: tuple[int, ...]  # S, tokens of a bucket: N/S buckets
    heads: int = 10
    width: int = 410
    features: int = 256  # random ones, that the loss estimates its targets with
    visits: int = 3
    seconds: float = 1.0  # a layer's share of a visit
    limit: float = 10.0  # seconds: a call that is predicted to take longer is not run
    gib: float = 4.0  # nor a naive softmax that needs more

    @property
    def methods(self) -> list[str]:
        """All of them: SDPA, a naive softmax, and LHA with each attention size."""
        return [EXACT, NAIVE, *(lha(self, size) for size in self.attention_sizes)]


SCALES = {
    "smoke": LhaLatencyScale(
        lengths=(64, 128), attention_sizes=(32,), heads=2, width=16, features=16, visits=1, seconds=0.0, gib=0.001
    ),
    "small": LhaLatencyScale(lengths=powers(9, 14), attention_sizes=(128, 256, 512)),
    "paper": LhaLatencyScale(lengths=powers(9, 14), attention_sizes=(128, 256, 512), visits=5, limit=60.0, gib=30.0),
}


def lha(scale: LhaLatencyScale, size: int) -> str:
    """The method with buckets of this size, and targets of its loss as in the paper: by random features."""
    return f"lha:buckets=0,bucket_size={size},targets=features,features={scale.features}"


class Layers:
    """One item of `length` tokens and the attention layers, projections included, that read it."""

    def __init__(self, scale: LhaLatencyScale, training: bool, device: str, length: int):
        self.scale, self.training, self.device, self.length = scale, training, device, length
        drawn = torch.randn(2, 1, length, scale.width, generator=torch.Generator().manual_seed(0)).to(device)
        self.x, self.gradient = drawn[0].requires_grad_(training), drawn[1]
        self.layers: list[MultiheadAttention] = []

    def call_of(self, name: str) -> Callable[[], Tensor]:
        """A training step without its update, or the output alone."""
        scale = self.scale
        with torch.random.fork_rng(devices=[]):  # the projections' start is torch's own
            torch.manual_seed(0)
            method = EXACT if name == NAIVE else name
            layer = MultiheadAttention(scale.width, scale.heads, method=method, max_length=self.length)
        self.layers.append(layer.train(self.training).to(self.device))
        return partial(self._train if self.training else self._infer, layer, name)

    def clear(self) -> None:
        """Forget all gradients."""
        self.x.grad = None
        for layer in self.layers:
            layer.zero_grad(set_to_none=True)

    def _train(self, layer: MultiheadAttention, name: str) -> Tensor:
        with kernel(name):
            loss = (layer(self.x) * self.gradient).sum()
            loss = with_auxiliary_loss(loss, layer) if has_auxiliary_loss(layer) else loss
            loss.backward()
        return loss

    def _infer(self, layer: MultiheadAttention, name: str) -> Tensor:
        with torch.inference_mode(), kernel(name):
            return layer(self.x)


def kernel(name: str) -> Any:
    """SDPA's plain form, which makes the N×N matrix, for a naive softmax."""
    return sdpa_kernel(SDPBackend.MATH) if name == NAIVE else nullcontext()


def key(stage: str, length: int, visit: int) -> str:
    """A cell's name."""
    return f"{stage} N={length} visit={visit}"


def cells(scale: LhaLatencyScale) -> list[Cell]:
    """One stage at one length each, visited several times."""
    return [
        Cell(key(stage, length, visit), partial(_times, scale, stage, length), timed=True)
        for visit in range(scale.visits)
        for stage in STAGES
        for length in scale.lengths
    ]


def _times(scale: LhaLatencyScale, stage: str, length: int, context: Context) -> dict[str, Any]:
    training = stage == "training"
    passes = BACKWARD if training else "forward"
    load = Load(length, "float32", passes, 1, scale.heads, scale.width // scale.heads, context.device, 0)
    names = [name for name in scale.methods if name != NAIVE or naive_gib(load) <= scale.gib]
    make = partial(Layers, scale, training, context.device)
    return alternating_rounds(make, length, names, Effort(seconds=scale.seconds, least=2), scale.limit, context.device)


# ---------------------------------------------------------------------- what comes out


def results(scale: LhaLatencyScale, records: JobResults) -> Results:
    """A table and a plot for each stage, and from which length on LHA is faster."""
    tables, plots = [_crossings(scale, records)], []
    for stage in STAGES:
        visits = {n: _visits(scale, records, stage, n) for n in scale.lengths}
        tables.append(_latencies(scale, stage, visits))
        plots.append(_plot(scale, stage, visits))
    return Results(
        summary=f"One attention layer, {scale.heads} heads, width {scale.width}, one item. `full` is SDPA, `naive` a "
        "softmax that forms the N×N matrix, as the paper's. LHA in training computes its learning-to-hash loss too; "
        "in inference it needs none. The paper's figure 5 gives curves, no numbers: \"LHA can achieve more significant "
        'speedup when facing longer sequences".',
        tables=tables,
        plots=plots,
    )


def _visits(scale: LhaLatencyScale, records: JobResults, stage: str, length: int) -> list[Timed]:
    return [records[key(stage, length, visit)] for visit in range(scale.visits)]


def _crossings(scale: LhaLatencyScale, records: JobResults) -> Table:
    rows = []
    for name in scale.methods[2:]:
        row = [short(name)]
        for stage in STAGES:
            for against in (NAIVE, EXACT):
                ratios = {n: speedup(_visits(scale, records, stage, n), name, against) for n in scale.lengths}
                known = {n: ratio.median for n, ratio in ratios.items() if ratio}
                at = crossover(known)
                far = f"; {shown(known[max(known)], '×')} at {max(known):,}" if known else ""
                row.append(("–" if not known else f"not up to {max(known):,}" if at is None else f"{at:,.0f}") + far)
        rows.append(row)
    columns = [f"{stage}, against {name}" for stage in STAGES for name in ("a naive softmax", "SDPA")]
    return Table(
        title="Tokens from which on LHA is faster, and how much at the longest", columns=["", *columns], rows=rows
    )


def _latencies(scale: LhaLatencyScale, stage: str, visits: dict[int, list[Timed]]) -> Table:
    rows = []
    for name in scale.methods:
        known = [all_rounds(visits[n], name) for n in scale.lengths]
        spreads = [spread([1e3 * second for second in rounds]) if rounds else None for rounds in known]
        rows.append([short(name), *(s and f"{shown(s.median)} ({shown(s.low)}–{shown(s.high)})" for s in spreads)])
    return Table(
        title=f"Latency in {stage}, ms: median (quartiles)",
        columns=["attention", *(f"N={n:,}" for n in scale.lengths)],
        rows=rows,
        note=f"Not run where predicted to take more than {scale.limit:g} s, or a naive softmax {scale.gib:g} GiB.",
    )


def short(name: str) -> str:
    """A method as tables and plots name it."""
    return f"lha of {name.partition('bucket_size=')[2].partition(',')[0]}" if name.startswith("lha") else name


def _plot(scale: LhaLatencyScale, stage: str, visits: dict[int, list[Timed]]) -> Lines:
    series, bands = {}, {}
    for name in scale.methods:
        rounds = {n: [1e3 * second for second in all_rounds(visits[n], name)] for n in scale.lengths}
        quartiles = {n: spread(times) for n, times in rounds.items() if times}
        series[short(name)] = [(float(n), s.median) for n, s in quartiles.items()]
        if quartiles:
            bands[short(name)] = [(s.low, s.high) for s in quartiles.values()]
    return Lines(
        file=f"latency-{stage}",
        title=f"latency of one attention layer in {stage}",
        x="tokens N",
        y="ms",
        series=series,
        bands=bands,
        log_x=True,
        log_y=True,
    )


EXPERIMENT = Experiment(
    name="lha-latency",
    title="Latency of learning-to-hash attention in training and inference",
    source="Sun, Yang, Yoo 2022, figure 5, appendix G",
    deviations=(
        "A processor in place of an A100, in small; the method's own code in place of JAX.",
        "Lengths and attention sizes are ours: the figure's are not given as text.",
        "Softmax attention is SDPA, and additionally a naive softmax, as the paper's was.",
    ),
    scales=SCALES,
    cells=cells,
    results=results,
)
