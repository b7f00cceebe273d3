"""The published rows beside ours."""

from dataclasses import replace

from subquad.research.papers.experiments.linformer_quality import (
    BASELINES,
    PUBLISHED,
    SCALES,
    cells,
    methods,
    published_name,
    results,
)


def test_published_rows_have_the_same_share_of_projected_tokens():
    for scale in (SCALES["small"], SCALES["paper"]):
        assert [published_name(scale, method) for method in methods(scale)] == list(PUBLISHED)
    other = replace(SCALES["paper"], length=1024)
    assert published_name(other, "linformer:k=256,sharing=headwise") == "128"


def test_a_sharing_that_the_paper_lacks_has_a_row_without_published_figures():
    scale = replace(SCALES["smoke"], sharings=("none",))
    run = {"before": 0.5, "accuracy": 0.75, "loss": 1.0, "training_seconds": 2.0}
    records = {cell.key: run for cell in cells(scale)}
    records[BASELINES] = {"sizes": {"train": 9, "test": 8}, "accuracy": {"majority": 0.5}}
    assert list(results(scale, records).tables[0].rows[-1][6:]) == [None, None, None, "85, none"]
