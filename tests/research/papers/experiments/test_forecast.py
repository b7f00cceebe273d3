"""The results made of the cells of `reproduce forecast`; test_smoke.py tests that it runs."""

from dataclasses import replace

import pytest

from subquad.research.papers.experiments.forecast import BASELINES, EXACT, HYBRID, SCALES, Case, cells, key, results
from subquad.research.papers.experiments.forecast_published import COPIED, PUBLISHED

SMALL = SCALES["small"]


@pytest.fixture
def found():
    """Every model and baseline has the errors 0.05 and 0.2, less or more where a test says so."""
    same = {"mse": 0.05, "mae": 0.2, "training_seconds": 1.0}
    baselines = {name: dict(same) for name in BASELINES}
    return {cell.key: baselines if "baselines" in cell.key else dict(same) for cell in cells(SMALL)}


def hybrid(found, case, **errors):
    for seed in SMALL.seeds:
        found[key(case, HYBRID, seed)] = {**found[key(case, HYBRID, seed)], **errors}


def test_within_means_both_errors(found):
    first, second = SMALL.cases[:2]
    hybrid(found, first, mse=0.0601, mae=0.1)
    hybrid(found, second, mse=0.01, mae=0.237)
    ranking = results(SMALL, found).tables[0]
    assert [row[3] for row in ranking.rows] == ["no", "no", "yes", "yes"]
    assert ranking.rows[0][1:3] == ["0.060 / 0.191", "0.060 / 0.100"]
    assert ranking.rows[0][4].endswith(f"{HYBRID} 0.060")
    assert ranking.rows[1][4].startswith(f"{HYBRID} 0.010 < ")


def test_the_summary_says_which_wins(found):
    hybrid(found, SMALL.cases[0], mse=0.01)
    hybrid(found, SMALL.cases[1], mse=0.06)
    found[key(SMALL.cases[2], EXACT, 1)]["mse"] = 0.02
    for case in SMALL.cases[2:]:
        found[key(case, "baselines")] = {**found[key(case, "baselines")], "ridge": {"mse": 0.03, "mae": 0.1}}
    said = results(SMALL, found).summary
    assert f"of 4 forecasts that were trained: {HYBRID} has the least in 1" in said
    assert "ridge has the least in 2" in said
    assert "than with exact attention in 1 of 4" in said
    assert "less than the former in 3 of 4" in said


def test_the_copied_column_is_said_and_not_drawn(found):
    made = results(SMALL, found)
    notes = {table.title.split(":")[0]: table.note for table in made.tables}
    assert [title for title, note in notes.items() if COPIED in note] == ["ETTm1, M"]
    drawn = {plot.file: plot.series for plot in made.plots}
    assert "LHA, published" in drawn["mse-ETTh1-M"]
    assert "LHA, published" not in drawn["mse-ETTm1-M"]
    column, original = PUBLISHED["ETTm1", "M"]["LHA"], PUBLISHED["ETTh1", "S"]["LHA"]
    assert list(column.values())[1:] == list(original.values())[1:]


def test_cases_that_read_more_or_less_have_cells_and_columns_of_their_own():
    scale = replace(SCALES["smoke"], cases=(Case("waves", "M", 4, 8, 4), Case("waves", "M", 4, 16, 4)))
    names = [cell.key for cell in cells(scale)]
    assert len(set(names)) == len(names)
    records = {}
    for name in names:
        figures = {"mse": 0.1 if "from 8" in name else 0.2, "mae": 0.3, "training_seconds": 1.0}
        records[name] = dict.fromkeys(BASELINES, figures) if name.endswith("baselines") else figures
    table = next(table for table in results(scale, records).tables if table.title.startswith("waves"))
    assert table.columns[1::2] == ["4 from 8 (decoder 4): MSE", "4 from 16 (decoder 4): MSE"]
    assert {tuple(row[1::2]) for row in table.rows} == {("0.100", "0.200")}
    assert len(cells(replace(scale, baselines=scale.cases))) == len(names)


def test_published_figures_by_horizon():
    assert PUBLISHED["ETTh1", "M"]["LHA"] == {
        24: (0.475, 0.469), 48: (0.569, 0.544), 168: (0.883, 0.706), 336: (0.970, 0.793), 720: (1.021, 0.805)
    }  # fmt: skip
    assert all(len(rows) == 5 for table in PUBLISHED.values() for rows in table.values())


def test_every_trained_case_has_three_seeds_where_there_is_a_target():
    keys = [cell.key for cell in cells(SMALL)]
    for case in SMALL.cases:
        assert case.horizon in PUBLISHED[case.dataset, case.features]["LHA"]
        for name in (HYBRID, EXACT):
            assert sum(k.startswith(key(case, name) + " seed=") for k in keys) == 3
