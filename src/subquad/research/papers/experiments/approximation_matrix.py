"""Table 1 of clustered attention: train with one attention, evaluate with another, on speech."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from subquad.core.spelling import instead
from subquad.research.papers import speech
from subquad.research.papers.base import Cell, Context, Experiment, JobResults, note_on_seeds, spread
from subquad.research.papers.results import HeatMap, Results, Table
from subquad.research.papers.speech import HELD_OUT, RATE, Recipe, SpeechVariant, model_key, shown

TRAINED = ("full", "shared-full", "lsh-1", "lsh-4", "clustered-100", "i-clustered-100")  # the columns of the table
PUBLISHED: dict[str, tuple[float | None, ...]] = {  # phone error rate on WSJ's validation set, %
    "full": (5.14, None, None, None, 7.10, 5.56),
    "shared-full": (None, 6.57, 25.16, 41.61, None, None),
    "lsh-1": (None, 71.40, 10.43, 13.76, None, None),
    "lsh-4": (None, 64.29, 9.35, 9.33, None, None),
    "clustered-100": (44.88, 40.86, 68.06, 66.43, 7.06, 18.83),
    "clustered-200": (21.76, 25.86, 57.75, 57.24, 6.34, 8.95),
    "i-clustered-100": (9.29, 13.22, 41.65, 48.20, 8.80, 5.95),
    "i-clustered-200": (6.38, 8.43, 30.09, 42.43, 7.71, 5.60),
    "oracle-top": (17.16, 77.18, 43.35, 59.38, 24.32, 6.96),
}


@dataclass(frozen=True, kw_only=True)
class ApproximationMatrixScale:
    """The settings of the approximation matrix: what is trained, and what it is evaluated with.

    Attributes:
        columns: methods that models are trained with, of the paper's.
        more: methods that the model trained with full is evaluated with too.
        effort: seconds for the times of each method.
    """

    recipe: Recipe
    columns: tuple[str, ...] = TRAINED
    more: tuple[str, ...] = ()
    effort: float = 10.0
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if "full" not in self.columns:
            raise ValueError("columns has no 'full', whose model every other one is compared with")
        for column in self.columns:
            if column not in TRAINED:
                raise ValueError(f"columns: no column {column!r} in the paper's table{instead(column, TRAINED, '')}")


SCALES = {
    "smoke": ApproximationMatrixScale(recipe=speech.SMOKE, columns=("full", "lsh-1"), effort=0.1),
    "small": ApproximationMatrixScale(
        recipe=speech.SMALL,
        more=(
            "clustered-25",
            "i-clustered-25",
            *(f"i-clustered:clusters=100,topk={topk}" for topk in (8, 4, 2)),
            *(f"oracle-top:topk={topk}" for topk in (8, 4, 2)),
        ),
    ),
    "paper": ApproximationMatrixScale(recipe=speech.PAPER, seeds=(0, 1, 2)),
}


def pairs(scale: ApproximationMatrixScale) -> list[tuple[str, str]]:
    """(trained with, evaluated with): those that the paper gives, and `more`."""
    combinations = [
        (column, row)
        for row, values in PUBLISHED.items()
        for column, value in zip(TRAINED, values, strict=True)
        if value is not None and column in scale.columns
    ]
    return combinations + [("full", row) for row in scale.more]


def key(column: str, row: str, seed: int) -> str:
    """The cell of one figure."""
    return f"{column} as {row} seed={seed}"


def top_key(seed: int) -> str:
    """The cell of the weight that the best keys have."""
    return f"top keys of full seed={seed}"


def cells(scale: ApproximationMatrixScale) -> list[Cell]:
    """Each model, then it with other attentions; times."""
    by_key: dict[str, Cell] = {}
    for seed in scale.seeds:
        for column in scale.columns:
            by_key |= {cell.key: cell for cell in speech.model_cells(scale.recipe, [column], seed)}
            for row in (row for trained, row in pairs(scale) if trained == column):
                name = key(column, row, seed)
                by_key[name] = Cell(name, partial(_listen, scale, column, row, seed), (model_key(column, seed),))
        name, full = top_key(seed), model_key("full", seed)
        by_key[name] = Cell(name, partial(speech.top_mass, scale.recipe.settings("full", seed), full), (full,))
    times = speech.times_cell(scale.recipe, [SpeechVariant(method) for method in scale.columns], scale.effort)
    return speech.reading_tones(scale.recipe, [speech.baseline_cell(scale.recipe), *by_key.values(), times])


def _listen(scale: ApproximationMatrixScale, column: str, row: str, seed: int, context: Context) -> dict[str, Any]:
    return speech.listen(scale.recipe.settings(column, seed), model_key(column, seed), column, row, context)


def results(scale: ApproximationMatrixScale, records: JobResults) -> Results:
    """The table for known speakers and for the held-out one, what full loses, times."""
    rows, columns = list(PUBLISHED), [column for column in TRAINED if column in scale.columns]
    values = [[_mean(scale, records, column, row, RATE) for column in columns] for row in rows]
    return Results(
        summary=summary(scale, records),
        tables=[
            _matrix(scale, records, columns, RATE, "Digit error rate, known speakers, %"),
            _matrix(scale, records, columns, HELD_OUT, "Digit error rate, held-out speaker, %"),
            _lost(scale, records, [*rows, *scale.more]),
            _top(scale, records),
            speech.times_table(records, {m: [model_key(m, seed) for seed in scale.seeds] for m in columns}),
            speech.baseline_table(records),
        ],
        plots=[
            HeatMap(
                file="approximation-matrix",
                title="digit error rate, %, of known speakers",
                x="trained with",
                y="evaluated with",
                columns=[shown(column) for column in columns],
                rows=[shown(row) for row in rows],
                values=[[None if v is None else 100 * v for v in row] for row in values],
                high=100.0,
                format=".1f",
            )
        ],
    )


def _matrix(scale: ApproximationMatrixScale, records: JobResults, columns: list[str], figure: str, title: str) -> Table:
    body = []
    for row, published in PUBLISHED.items():
        row_values: list[str | None] = []
        for column in columns:
            theirs, values = published[TRAINED.index(column)], _values(scale, records, column, row, figure)
            if not values:
                row_values.append(None)
                continue
            ours = spread(values, 1, percent=True)
            row_values.append(ours if theirs is None else f"{ours} ({theirs})")
        body.append([shown(row), *row_values])
    return Table(
        title=title,
        columns=["evaluated with ↓, trained with →", *map(shown, columns)],
        rows=body,
        note="In brackets the published phone error rate on WSJ's validation set." + note_on_seeds(scale.seeds),
    )


def _lost(scale: ApproximationMatrixScale, records: JobResults, rows: list[str]) -> Table:
    body = [
        [
            shown(row),
            _points_lost(scale, records, row, RATE),
            _points_lost(scale, records, row, HELD_OUT),
            _published_loss(row),
        ]
        for row in rows
        if row != "full" and _values(scale, records, "full", row, RATE)
    ]
    return Table(
        title="What a model trained with full loses, points of error rate",
        columns=["evaluated with", "known speakers", "held-out speaker", "published (WSJ)"],
        rows=body,
        note="Target: at most 1 with i-clustered-100, more with clustered-100, and more with oracle-top, which keeps "
        "as many keys per query (32) and drops the others, than with i-clustered-100.",
    )


def _top(scale: ApproximationMatrixScale, records: JobResults) -> Table:
    layers = range(len(records[top_key(scale.seeds[0])]["1"]))
    rows = [
        [
            f"best {k}" if k > 1 else "best",
            *(
                spread([records[top_key(seed)][str(k)][layer] for seed in scale.seeds], 1, percent=True)
                for layer in layers
            ),
        ]
        for k in speech.TOPS
    ]
    return Table(
        title="How much of its weight a query gives to its best keys in the model trained with full, %",
        columns=["keys", *(f"layer {layer + 1}" for layer in layers)],
        rows=rows,
        note="Means over heads, queries and four test utterances. What is left is the tail that oracle-top forgets.",
    )


def _points_lost(scale: ApproximationMatrixScale, records: JobResults, row: str, figure: str = RATE) -> str:
    pairs = zip(
        _values(scale, records, "full", row, figure), _values(scale, records, "full", "full", figure), strict=True
    )
    return spread([with_it - with_full for with_it, with_full in pairs], 1, percent=True)


def _published_loss(row: str) -> str | None:
    theirs = PUBLISHED.get(row, (None,))[0]
    return None if theirs is None else f"{theirs - 5.14:.1f}"


def _values(scale: ApproximationMatrixScale, records: JobResults, column: str, row: str, figure: str) -> list[float]:
    keys = [key(column, row, seed) for seed in scale.seeds]
    return [records[name][figure] for name in keys if name in records]


def _mean(scale: ApproximationMatrixScale, records: JobResults, column: str, row: str, figure: str) -> float | None:
    values = _values(scale, records, column, row, figure)
    return sum(values) / len(values) if values else None


def summary(scale: ApproximationMatrixScale, records: JobResults) -> str:
    """The sentence above the tables."""
    lost = {
        row: _points_lost(scale, records, row)
        for row in ("i-clustered-100", "clustered-100", "oracle-top")
        if _values(scale, records, "full", row, RATE)
    }
    texts = ", ".join(f"{points} with {row}" for row, points in lost.items())
    return (
        "Models of speech trained with one attention and evaluated with another. Points of digit error rate that the "
        f"one trained with full loses on known speakers: {texts}."
    )


EXPERIMENT = Experiment(
    name="approximation-matrix",
    title="Train with one attention, evaluate with another",
    source="Vyas et al. 2020, table 1, section 4.1",
    deviations=(*speech.DEVIATIONS, *speech.SMALL_DEVIATIONS),
    scales=SCALES,
    cells=cells,
    results=results,
    needs=("fsdd",),
)
