"""Figure 1 of clustered attention: the error of models of speech against the time of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from subquad.research.papers import speech
from subquad.research.papers.base import Cell, Experiment, JobResults, note_on_seeds, spread
from subquad.research.papers.results import Lines, Results, Table
from subquad.research.papers.speech import HELD_OUT, RATE, TIMES, Recipe, SpeechVariant, model_key, shown
from subquad.research.training.model_settings import ModelSettings


@dataclass(frozen=True, kw_only=True)
class SpeedAccuracyScale:
    """The settings of the experiment on speed and accuracy: what is trained.

    Attributes:
        models: (method, layers); layers 0: as in the recipe.
        tuned: (method, layers) whose models start from those of the same kind with 100 clusters.
        tuning: settings that differ in the training of these.
        effort: seconds for the times of each.
    """

    recipe: Recipe
    models: tuple[tuple[str, int], ...]
    tuned: tuple[tuple[str, int], ...]
    tuning: dict[str, Any] = field(default_factory=dict)
    effort: float = 10.0
    seeds: tuple[int, ...] = (0,)


SCALES = {
    "smoke": SpeedAccuracyScale(
        recipe=speech.SMOKE,
        models=(("full", 0), ("clustered-100", 0)),
        tuned=(("clustered-200", 0),),
        tuning={"steps": 1},
        effort=0.1,
    ),
    "small": SpeedAccuracyScale(
        recipe=speech.SMALL,
        models=(
            ("full", 2),
            ("full", 0),
            ("i-clustered-100", 2),
            ("i-clustered-100", 0),
            ("clustered-100", 0),
            ("lsh-4", 0),
        ),
        tuned=(("i-clustered-200", 0), ("clustered-200", 0)),
        tuning={"steps": 15, "learning_rate": 1e-4, "warmup": 0, "every": 0},
    ),
    "paper": SpeedAccuracyScale(
        recipe=speech.PAPER,
        models=(
            *(("full", layers) for layers in (4, 6, 0)),
            *(("i-clustered-100", layers) for layers in (6, 0)),
            *((method, 0) for method in ("clustered-100", "lsh-1", "lsh-4")),
        ),
        tuned=(("i-clustered-200", 6), ("i-clustered-200", 0), ("clustered-200", 0), ("clustered-300", 0)),
        tuning={"steps": 30_000, "learning_rate": 1e-5},
        seeds=(0, 1, 2),
    ),
}


def variants(scale: SpeedAccuracyScale) -> list[SpeechVariant]:
    """All models of the figure."""
    return [SpeechVariant(method, layers) for method, layers in (*scale.models, *scale.tuned)]


def cells(scale: SpeedAccuracyScale) -> list[Cell]:
    """Models, those that start from them, times."""
    jobs = [speech.baseline_cell(scale.recipe)]
    for seed in scale.seeds:
        for method, layers in scale.models:
            cells = speech.model_cells(scale.recipe, [method], seed, layers)
            jobs += [cell for cell in cells if cell.key not in {known.key for known in jobs}]
        jobs += [_tuned(scale, method, layers, seed) for method, layers in scale.tuned]
    times = speech.times_cell(scale.recipe, variants(scale), scale.effort)
    return speech.reading_tones(scale.recipe, [*jobs, times])


def _tuned(scale: SpeedAccuracyScale, method: str, layers: int, seed: int) -> Cell:
    """Trained on from the model with 100 clusters."""
    start = model_key(f"{method.rpartition('-')[0]}-100", seed, layers)
    settings = scale.recipe.settings(method, seed, layers, scale.tuning)
    return Cell(model_key(method, seed, layers), partial(speech.fit, settings, start), (start,))


def results(scale: SpeedAccuracyScale, records: JobResults) -> Results:
    """The figure, and its points in a table."""
    points: dict[str, list[tuple[float, float]]] = {}
    labels: dict[str, list[str]] = {}
    for variant in variants(scale):
        kind = shown(variant.method).replace(f"-{_number(variant)}", "")  # "reformer (the paper's lsh)"
        rates = _rates(scale, records, variant, RATE)
        points.setdefault(kind, []).append((1000 * _forward(records, variant)[1], 100 * sum(rates) / len(rates)))
        labels.setdefault(kind, []).append("-".join(filter(None, (str(_layers(scale, variant)), _number(variant)))))
    return Results(
        summary="Error against time, over layers and over clusters or hashing rounds.",
        tables=[_table(scale, records), speech.baseline_table(records)],
        plots=[
            Lines(
                file="speed-accuracy",
                title="digit error rate against the time of a forward pass, labelled by layers, clusters or rounds",
                x=f"ms for {records[TIMES]['batch']} utterances",
                y="digit error rate, %",
                series=points,
                labels=labels,
                joined=False,
            )
        ],
    )


def _table(scale: SpeedAccuracyScale, records: JobResults) -> Table:
    rows = []
    for variant in variants(scale):
        low, median, high = (f"{1000 * seconds:.0f}" for seconds in _forward(records, variant))
        known, held_out = (_rates(scale, records, variant, figure) for figure in (RATE, HELD_OUT))
        rows.append(
            [
                shown(variant.method),
                str(_layers(scale, variant)),
                f"{median} ({low} to {high})",
                spread(known, 1, percent=True),
                spread(held_out, 1, percent=True),
            ]
        )
    return Table(
        title="Error and time of a forward pass",
        columns=["method", "layers", "ms (quartiles)", "digit error rate, known speakers, %", "held-out speaker, %"],
        rows=rows,
        note=f"A forward pass of {records[TIMES]['batch']} utterances, {records[TIMES]['tokens']} "
        "tokens each on average; all models in turn. "
        "The paper's figure gives points and no numbers: improved clustered attention has the "
        "lowest error at every time." + note_on_seeds(scale.seeds),
    )


def _number(variant: SpeechVariant) -> str:
    """Its clusters or rounds, where it has some."""
    number = variant.method.rpartition("-")[2]
    return number if number.isdigit() else ""


def _layers(scale: SpeedAccuracyScale, variant: SpeechVariant) -> int:
    return cast(ModelSettings, scale.recipe.settings(variant.method, 0, variant.layers).model).layers


def _rates(scale: SpeedAccuracyScale, records: JobResults, variant: SpeechVariant, figure: str) -> list[float]:
    keys = [model_key(variant.method, seed, variant.layers) for seed in scale.seeds]
    return [records[key]["test"][figure] for key in keys]


def _forward(records: JobResults, variant: SpeechVariant) -> list[float]:
    """Quartiles of seconds."""
    quartiles: list[float] = records[TIMES]["seconds"][variant.label]["forward"]
    return quartiles


EXPERIMENT = Experiment(
    name="speed-accuracy",
    title="Error of models of speech against time",
    source="Vyas et al. 2020, figure 1, section 4.1",
    deviations=(*speech.DEVIATIONS, speech.SWITCHBOARD, *speech.SMALL_DEVIATIONS),
    scales=SCALES,
    cells=cells,
    results=results,
    needs=("fsdd",),
)
