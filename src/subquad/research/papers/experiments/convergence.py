"""Figure 7 and tables 2 and 3 of clustered attention: how fast models of speech learn, by updates and by time."""

from __future__ import annotations

from dataclasses import dataclass

from subquad.research.papers import speech
from subquad.research.papers.base import Cell, Experiment, JobResults, note_on_seeds, spread
from subquad.research.papers.results import Lines, Results, Table, Value
from subquad.research.papers.speech import HELD_OUT, RATE, TIMES, Recipe, SpeechVariant, model_key, shown

METHODS = ("full", "lsh-1", "lsh-4", "clustered-100", "i-clustered-100")  # the columns of table 2
PUBLISHED: dict[str, dict[str, tuple[float, float, float]]] = {  # test error %, time an epoch, hours to convergence
    "WSJ, table 2 (phone errors, seconds)": {
        "full": (5.03, 2514, 87.99),
        "lsh-1": (9.43, 1004, 189.64),
        "lsh-4": (8.59, 2320, 210.09),
        "clustered-100": (7.50, 803, 102.15),
        "i-clustered-100": (5.61, 1325, 72.14),
    },
    "Switchboard, table 3 (word errors, hours)": {
        "full": (15.0, 3.84, 228.05),
        "clustered-100": (18.5, 1.91, 132.13),
        "i-clustered-100": (15.5, 2.57, 127.44),
    },
}


@dataclass(frozen=True, kw_only=True)
class ConvergenceScale:
    """The settings of the convergence experiment: what is trained.

    Attributes:
        effort: seconds for the times of each method.
    """

    recipe: Recipe
    methods: tuple[str, ...] = METHODS
    effort: float = 10.0
    seeds: tuple[int, ...] = (0,)


SCALES = {
    "smoke": ConvergenceScale(recipe=speech.SMOKE, methods=("full", "i-clustered-100"), effort=0.1),
    "small": ConvergenceScale(recipe=speech.SMALL),
    "paper": ConvergenceScale(recipe=speech.PAPER, seeds=(0, 1, 2)),
}


def cells(scale: ConvergenceScale) -> list[Cell]:
    """Models, times."""
    models = [cell for seed in scale.seeds for cell in speech.model_cells(scale.recipe, scale.methods, seed)]
    times = speech.times_cell(scale.recipe, [SpeechVariant(method) for method in scale.methods], scale.effort)
    return speech.reading_tones(scale.recipe, [speech.baseline_cell(scale.recipe), *models, times])


def results(scale: ConvergenceScale, by_cell: JobResults) -> Results:
    """Errors, times and curves."""
    keys = {method: [model_key(method, seed) for seed in scale.seeds] for method in scale.methods}
    seconds = {shown(method): by_cell[TIMES]["seconds"][method]["update"][1] for method in scale.methods}
    first = scale.seeds[0]
    curves = {shown(m): by_cell[model_key(m, first)] for m in scale.methods}
    losses = {m: [(float(step), loss) for step, _, loss in curve["losses"]] for m, curve in curves.items()}
    rates = {m: [(float(step), 100 * rate) for step, _, rate, _ in curve["rates"]] for m, curve in curves.items()}
    return Results(
        summary="How fast models of speech learn with each attention. Curves are those of "
        f"seed {first}; time is the number of updates times the median time of one, measured apart.",
        tables=[
            _errors(scale, by_cell),
            speech.times_table(by_cell, keys),
            _published(),
            speech.baseline_table(by_cell),
        ],
        plots=[
            Lines(file="convergence-by-update", title="training loss a digit", x="updates", y="loss", series=losses),
            Lines(
                file="convergence-by-time",
                title="training loss a digit",
                x="seconds",
                y="loss",
                series={m: [(step * seconds[m], y) for step, y in points] for m, points in losses.items()},
            ),
            Lines(
                file="convergence-error",
                title="validation: digit error rate, %",
                x="seconds",
                y="digit error rate, %",
                series={m: [(step * seconds[m], y) for step, y in points] for m, points in rates.items()},
            ),
        ],
    )


def _errors(scale: ConvergenceScale, by_cell: JobResults) -> Table:
    rows = []
    for method in scale.methods:
        records = [by_cell[model_key(method, seed)] for seed in scale.seeds]
        rates = [[record["test"][name] for record in records] for name in (RATE, HELD_OUT)]
        rows.append([shown(method), *(spread(values, 1, percent=True) for values in rates)])
    return Table(
        title="Digit error rate of the test, %",
        columns=["trained with", "known speakers", "held-out speaker"],
        rows=rows,
        note=note_on_seeds(scale.seeds).strip(),
    )


def _published() -> Table:
    rows: list[list[Value]] = [
        [f"{shown(method)}, {where}", *published]
        for where, methods in PUBLISHED.items()
        for method, published in methods.items()
    ]
    return Table(
        title="Published",
        columns=["method", "error rate, %", "time an epoch", "hours to convergence"],
        rows=rows,
        note="On a GTX 1080 Ti, compared with a softmax over all N × N weights instead of SDPA; full with a batch of "
        "2, the others with 6 to 14.",
    )


EXPERIMENT = Experiment(
    name="convergence",
    title="How fast models of speech learn with each attention",
    source="Vyas et al. 2020, figure 7, tables 2 and 3",
    deviations=(*speech.DEVIATIONS, speech.SWITCHBOARD, *speech.SMALL_DEVIATIONS),
    scales=SCALES,
    cells=cells,
    results=results,
    needs=("fsdd",),
)
