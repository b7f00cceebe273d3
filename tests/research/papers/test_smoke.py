"""Every experiment runs at its smallest scale, and what comes out can be written."""

import os
from pathlib import Path

import pytest

from subquad.research.papers.catalogue import NAMES, load
from subquad.research.papers.run import reproduce
from subquad.research.papers.write import rich_results, write_results

IN_CI = ("lha-latency", "training-dynamics", "lm-ablation", "spectrum", "performer-approximation")  # the quickest


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.long) for name in NAMES]
)
def test_a_smoke_run_ends_with_tables_and_plots(name, tmp_path):
    experiment = load(name)
    data = Path(os.environ["SUBQUAD_DATA"]) if experiment.smoke_needs and "SUBQUAD_DATA" in os.environ else None
    if experiment.smoke_needs and data is None:
        pytest.skip(f"needs the data in {', '.join(experiment.smoke_needs)}: set SUBQUAD_DATA")
    header, results, cells = reproduce(experiment, "smoke", tmp_path / "out", data=data)
    paths = write_results(header, results, cells, tmp_path / "out")
    assert set(cells) == {cell.key for cell in experiment.cells(experiment.scales["smoke"])}
    assert {"results.json", "results.md"} | {f"{plot.file}.png" for plot in results.plots} == {p.name for p in paths}
    assert results.tables
    for table in results.tables:
        assert {len(row) for row in table.rows} <= {len(table.columns)}, table.title
    assert rich_results(header, results)
