"""The published rows beside ours."""

from dataclasses import replace

from subquad.research.papers.experiments.linformer_quality import PUBLISHED, SCALES, methods, published_name


def test_published_rows_have_the_same_share_of_projected_tokens():
    for scale in (SCALES["small"], SCALES["paper"]):
        assert [published_name(scale, method) for method in methods(scale)] == list(PUBLISHED)
    other = replace(SCALES["paper"], length=1024)
    assert published_name(other, "linformer:k=256,sharing=headwise") == "128"
