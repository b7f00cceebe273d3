"""Tables 4 and 5 of learning-to-hash attention: forecasts of the ETT series, next to linear and naive ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from subquad.research.papers.base import Cell, Context, Experiment, JobResults, note_on_seeds, spread
from subquad.research.papers.experiments.forecast_published import COPIED, COPIED_IN, PUBLISHED
from subquad.research.papers.results import Lines, Results, Table
from subquad.research.papers.tasks.ett_forecast import Forecast
from subquad.research.training.run import train
from subquad.research.training.settings import settings_of

HYBRID = "LHA and local"
EXACT = "exact"
BASELINES = ("ridge", "last value", "last season")
FEATURES = {
    "S": "the oil temperature from its own past",
    "MS": "the oil temperature from all columns",
    "M": "all columns",
}


class Case(NamedTuple):
    """A case of forecasting: what is predicted, and from how much."""

    dataset: str
    features: str
    horizon: int
    seq_len: int
    label_len: int

    def __str__(self) -> str:
        return f"{self.dataset} {self.features} {self.horizon} from {self.seq_len} (decoder {self.label_len})"


class Variant(NamedTuple):
    """A model, trained with the first `seeds` of a scale's."""

    name: str
    model: dict[str, Any]
    task: dict[str, Any]
    seeds: int

    def __str__(self) -> str:
        settings = {**self.model, **self.task}
        listed = ", ".join(f"{name.replace('_', ' ')} `{value}`" for name, value in settings.items())
        return f"{self.name} ({listed}; {self.seeds} seed{'s' * (self.seeds > 1)})"


@dataclass(frozen=True, kw_only=True)
class ForecastScale:
    """The settings of the forecasts: what is trained, and for how many steps, or `epochs` where they are not 0."""

    cases: tuple[Case, ...]
    baselines: tuple[Case, ...]  # further cases, of which the baselines alone are measured
    variants: tuple[Variant, ...]
    model: dict[str, Any]
    training: dict[str, Any]
    epochs: int = 0
    seeds: tuple[int, ...] = (0,)


def variants(window: int, buckets: int, clusters: int, topk: int, seeds: int, **task: Any) -> tuple[Variant, ...]:
    """The paper's hybrid (half of the heads local, half hashed), exact attention, and what else there is to compare."""
    subtracts = task.get("subtract_last", True)
    other = "the level left in" if subtracts else "the last row subtracted"
    hybrid = {"method": f"mixed-heads:methods=local:window={window}+lha:buckets={buckets}"}
    return (
        Variant(HYBRID, hybrid, task, seeds),
        Variant(EXACT, {"method": "full"}, task, seeds),
        Variant("i-clustered", {"method": f"i-clustered:clusters={clusters},topk={topk}"}, task, 1),
        Variant("ProbSparse, Informer's", {"method": "probsparse"}, task, 1),
        Variant("LogSparse, LogTrans's", {"method": f"logsparse:window={window}"}, task, 1),
        Variant(f"encoder only, {HYBRID}", hybrid, {**task, "architecture": "encoder"}, 1),
        Variant(f"{HYBRID}, {other}", hybrid, {**task, "subtract_last": not subtracts}, 1),
    )


# Rows read and rows that the decoder reads too: those of Informer's published commands, by horizon.
INFORMER = {
    ("ETTh1", "S"): {24: (720, 168), 48: (720, 168), 168: (720, 336), 336: (720, 336), 720: (720, 336)},
    ("ETTh1", "M"): {24: (48, 48), 48: (96, 48), 168: (168, 168), 336: (168, 168), 720: (336, 336)},
    ("ETTm1", "S"): {24: (96, 48), 48: (96, 48), 96: (384, 384), 288: (384, 384), 672: (384, 384)},
    ("ETTm1", "M"): {24: (672, 96), 48: (96, 48), 96: (384, 384), 288: (672, 288), 672: (672, 384)},
}
ALL = tuple(Case(*row, horizon, *rows) for row, by in INFORMER.items() for horizon, rows in by.items())
TARGETS = tuple(Case("ETTh1", features, horizon, 48, 24) for features in ("S", "M") for horizon in (24, 48))

SCALES = {
    "smoke": ForecastScale(
        cases=(Case("waves", "M", 4, 8, 4),),
        baselines=(),
        variants=variants(2, 2, 2, 2, 1),
        model={"layers": 1, "heads": 2, "width": 8},
        training={"steps": 2, "batch": 4},
    ),
    "small": ForecastScale(
        cases=TARGETS,
        baselines=tuple(case for case in ALL if (case.dataset == "ETTh1") == (case.horizon > 96)),
        variants=variants(8, 4, 8, 8, 3),
        model={"layers": 2, "heads": 4, "width": 32},
        training={"steps": 300, "learning_rate": 3e-3},
        seeds=(0, 1, 2),
    ),
    "paper": ForecastScale(
        cases=ALL,
        baselines=(),
        variants=variants(32, 8, 25, 32, 3, subtract_last=False, decoder_layers=2),
        model={"layers": 2, "heads": 8, "width": 512, "feed_forward": 2048},
        training={"learning_rate": 1e-4, "schedule": "halving"},
        epochs=6,
        seeds=(0, 1, 2),
    ),
}


def key(case: Case, name: str, seed: int | None = None) -> str:
    """A cell's name."""
    what = f"{case} {name}"
    return what if seed is None else f"{what} seed={seed}"


def all_cases(scale: ForecastScale) -> list[Case]:
    """Those that models are trained for, then those of which the baselines alone are measured; each once."""
    return list(dict.fromkeys(scale.cases + scale.baselines))


def cells(scale: ForecastScale) -> list[Cell]:
    """The baselines of each case, then one trained model each."""
    baselines = [Cell(key(case, "baselines"), partial(_baselines, case)) for case in all_cases(scale)]
    trained = [
        Cell(key(case, variant.name, seed), partial(_fit, scale, case, variant, seed))
        for number, seed in enumerate(scale.seeds)
        for case in scale.cases
        for variant in scale.variants
        if number < variant.seeds
    ]
    return baselines + trained


def _baselines(case: Case, context: Context) -> dict[str, Any]:
    task = Forecast(**case._asdict())
    splits = task.splits(context.data)
    context.progress("ridge", 0, 1)
    return dict(task.baselines(splits, context.data))


def _fit(scale: ForecastScale, case: Case, variant: Variant, seed: int, context: Context) -> dict[str, Any]:
    tables: dict[str, dict[str, Any]] = {
        "task": {**case._asdict(), **variant.task},
        "model": {**scale.model, **variant.model},
        "training": {**scale.training, "seed": seed},
    }
    if scale.epochs:
        settings = settings_of("forecast", tables)
        windows: Any = settings.task.splits(context.data).train
        each = len(windows) // settings.training.batch
        tables["training"] |= {"steps": scale.epochs * each, "every": each}
    settings = settings_of("forecast", tables)
    outcome = train(settings, context.folder, data=context.data, device=context.device, progress=context.progress)
    return {**outcome.test, "steps": outcome.steps, "best_step": outcome.best_step, "training_seconds": outcome.seconds}


def results(scale: ForecastScale, records: JobResults) -> Results:
    """A table for each series and kind of forecast, the order of the targets, and the errors by horizon."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in all_cases(scale):
        groups.setdefault((case.dataset, case.features), []).append(case)
    ordered = {group: sorted(members, key=lambda case: case.horizon) for group, members in groups.items()}
    tables = [_ranking(scale, records), *(_table(scale, records, *group, cs) for group, cs in ordered.items())]
    plots = [_by_horizon(scale, records, *group, cs) for group, cs in ordered.items()]
    return Results(summary=_summary(scale, records), tables=[*tables, _times(scale, records)], plots=plots)


def _runs(scale: ForecastScale, records: JobResults, case: Case, variant: Variant) -> list[dict[str, Any]]:
    """The results of the seeds; none for a case that is not trained."""
    keys = [key(case, variant.name, seed) for seed in scale.seeds[: variant.seeds]]
    return [records[key] for key in keys if key in records]


def _mean(scale: ForecastScale, records: JobResults, case: Case, variant: Variant, metric: str = "mse") -> float:
    return fmean(run[metric] for run in _runs(scale, records, case, variant))


def _all(scale: ForecastScale, records: JobResults, case: Case) -> dict[str, float]:
    """Every squared error that was measured for a case."""
    ours = {variant.name: _mean(scale, records, case, variant) for variant in scale.variants}
    return ours | {name: records[key(case, "baselines")][name]["mse"] for name in BASELINES}


def _published(case: Case) -> Mapping[str, tuple[float, float]]:
    """{model: (MSE, MAE)} of the paper's tables."""
    rows = PUBLISHED.get((case.dataset, case.features), {})
    return {name: by[case.horizon] for name, by in rows.items() if case.horizon in by}


def _summary(scale: ForecastScale, records: JobResults) -> str:
    """The number of forecasts that each model wins, in words."""
    every = [_all(scale, records, case) for case in scale.cases]
    first = [min(errors, key=errors.__getitem__) for errors in every]
    won = {name: first.count(name) for name in dict.fromkeys(first)}
    hashed = sum(errors[HYBRID] < errors[EXACT] for errors in every)
    linear = sum(errors["ridge"] < errors[HYBRID] for errors in every)
    return (
        f"Squared error on the test months, of {len(every)} forecasts that were trained: "
        + ", ".join(f"{name} has the least in {count}" for name, count in won.items())
        + f". The same model has less with LHA and local heads than with exact attention in {hashed} of {len(every)}; "
        f"a ridge regression has less than the former in {linear} of {len(every)}."
    )


def _ranking(scale: ForecastScale, records: JobResults) -> Table:
    rows = []
    for case in scale.cases:
        errors = _all(scale, records, case)
        hybrid = next(variant for variant in scale.variants if variant.name == HYBRID)
        ours = errors[HYBRID], _mean(scale, records, case, hybrid, "mae")
        published = _published(case).get("LHA")
        within = "–" if published is None else ("yes" if ours[0] <= published[0] and ours[1] <= published[1] else "no")
        order = sorted(errors, key=errors.__getitem__)
        shown = " < ".join(f"{name} {errors[name]:.3f}" for name in order)
        limit = "–" if published is None else "{:.3f} / {:.3f}".format(*published)
        rows.append([str(case), limit, f"{ours[0]:.3f} / {ours[1]:.3f}", within, shown])
    return Table(
        title="Within the published figures, and which wins",
        columns=["forecast", "published LHA, MSE / MAE", "LHA and local here", "within", "MSE in order, best first"],
        rows=rows,
    )


def _table(scale: ForecastScale, records: JobResults, dataset: str, features: str, cases: Sequence[Case]) -> Table:
    rows: list[list[str | None]] = []
    for variant in scale.variants:
        runs = [_runs(scale, records, case, variant) for case in cases]
        if any(runs):
            rows.append([variant.name, *(_figure(each, m) for each in runs for m in ("mse", "mae"))])
    for name in BASELINES:
        each = [records[key(case, "baselines")][name] for case in cases]
        rows.append([name, *(f"{errors[m]:.3f}" for errors in each for m in ("mse", "mae"))])
    for name in PUBLISHED.get((dataset, features), {}):
        pairs = [_published(case).get(name) for case in cases]
        rows.append([f"{name}, published", *(None if p is None else f"{x:.3f}" for p in pairs for x in p or (0, 0))])
    return Table(
        title=f"{dataset}, {features}: {FEATURES[features]}",
        columns=["", *(f"{_horizon(case, cases)}: {metric}" for case in cases for metric in ("MSE", "MAE"))],
        rows=rows,
        note=_note(dataset, features) + note_on_seeds(scale.seeds),
    )


def _horizon(case: Case, cases: Sequence[Case]) -> str:
    """The horizon, and where several of these cases have it, from how much it is predicted too."""
    if [one.horizon for one in cases].count(case.horizon) == 1:
        return str(case.horizon)
    return str(case).removeprefix(f"{case.dataset} {case.features} ")


def _figure(runs: Sequence[Mapping[str, float]], metric: str) -> str | None:
    return spread([run[metric] for run in runs]) if runs else None


def _note(dataset: str, features: str) -> str:
    notes = ["Mean ± standard deviation (seeds), on standardised values, all windows. Ridge: each column from its own "
             "past, of a length and with a penalty chosen on the validation months."]  # fmt: skip
    if features == "S":
        notes.append("The paper's text says that all seven columns are read for its univariate table; the figures that "
                     "it takes from Informer for the others are of the oil temperature alone.")  # fmt: skip
    return " ".join([*notes, COPIED] if (dataset, features) == COPIED_IN else notes)


def _times(scale: ForecastScale, records: JobResults) -> Table:
    """Seconds of training, mean over seeds."""
    rows = [
        [variant.name, *(f"{_mean(scale, records, case, variant, 'training_seconds'):.0f}" for case in scale.cases)]
        for variant in scale.variants
    ]
    columns = ["", *map(str, scale.cases)]
    return Table(title="Seconds of training", columns=columns, rows=rows)


def _by_horizon(scale: ForecastScale, records: JobResults, dataset: str, features: str, cases: Sequence[Case]) -> Lines:
    series: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        errors = _all(scale, records, case) if case in scale.cases else {}
        errors |= {name: records[key(case, "baselines")][name]["mse"] for name in BASELINES}
        shown = ("Informer",) if (dataset, features) == COPIED_IN else ("LHA", "Informer")
        errors |= {f"{name}, published": _published(case)[name][0] for name in shown if _published(case)}
        for name, error in errors.items():
            series.setdefault(name, []).append((float(case.horizon), error))
    return Lines(
        file=f"mse-{dataset}-{features}",
        title=f"squared error by horizon: {dataset}, {features}",
        x="rows predicted",
        y="MSE of standardised values",
        series=series,
        log_x=True,
        log_y=True,
    )


EXPERIMENT = Experiment(
    name="forecast",
    title="Forecasts of the ETT series",
    source="Sun, Yang, Yoo 2022, tables 4 and 5; protocol of Zhou et al. 2021 (Informer)",
    deviations=(
        "Every window of the test months is counted; Informer's code drops those of the last incomplete batch.",
        "small: the last row of the past is subtracted before the model and added after it, since the level of the "
        "test months is another than that of the training months; neither paper does so. The row with the level left "
        "in shows what it is worth.",
        "small: 32 wide, 48 rows read for every horizon, 300 steps; the paper: 512 wide, lengths chosen by horizon.",
        "No distilling between the encoder's layers, pre-norm blocks, and no causal mask in the decoder, which reads "
        "zeros in the place of the future; cross-attention is exact.",
        "The paper does not state the width of its local heads or its number of buckets.",
    ),
    scales=SCALES,
    cells=cells,
    results=results,
    needs=("ett",),
)
