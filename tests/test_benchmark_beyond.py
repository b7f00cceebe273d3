"""The comparison of clustered methods beyond the encoder: its counts, its choices, and runs of a few seconds."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import subquad as sq
from subquad.masks import Mask
from subquad.tools.measure.capture import LayerInputs

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def beyond(script) -> ModuleType:
    return script("beyond_encoder")


def call(query: torch.Tensor, key: torch.Tensor) -> LayerInputs:
    options = {"mask": Mask(), "scale": 0.3, "bias": None, "dropout_p": 0.0}
    return LayerInputs(0, "layer", query, key, torch.randn_like(key), options)


def test_the_work_of_a_method_is_counted_as_in_the_other_scripts(beyond, script):
    assert beyond.cost(sq.Full(), 500, 32) == 2 * 500 * 32
    published = sq.ImprovedClustered(clusters=70, topk=20)
    assert beyond.cost(published, 500, 32) == script("published_ideas").improved_products(published, 500, 500, 32)
    settings = script("clustered_tail_settings")
    assert beyond.cost(sq.ClusteredTail(clusters=40, topk=30, cells=8), 500, 32) == settings.products(32, 40, 30, 8)
    assert beyond.cost(sq.ClusteredTail(), 512, 32) == settings.products(32, 32, 64, 32)


def test_the_work_of_choosing_clusters_is_counted(beyond):
    plain = beyond.cost(sq.Clustered(clusters=50), 500, 32)
    assert beyond.cost(sq.ImprovedClustered(clusters=50, topk=10), 500, 32) - plain == 10 * 2 * 32
    refined = sq.Clustered(clusters=50, space="logits", refine=2)
    assert beyond.cost(refined, 500, 32) - plain == 2 * 32**2 + 2 * 50 * 32
    with pytest.raises(ValueError, match=r"multiply-adds of .* are not known"):
        beyond.cost(sq.Local(), 500, 32)


def test_a_tail_is_compared_with_what_does_no_more_work(beyond):
    found = {
        "i-clustered:clusters=50": beyond.Figures(0.3, 0.20, {}),
        "i-clustered:clusters=50,space=logits": beyond.Figures(0.35, 0.16, {}),
        "i-clustered:clusters=200": beyond.Figures(0.6, 0.05, {}),
        "clustered-tail:clusters=16": beyond.Figures(0.4, 0.10, {}),
        "clustered-tail:clusters=4": beyond.Figures(0.2, 0.30, {}),
    }
    first, second = beyond.at_equal_work(found)
    assert first[3:6] == ["`i-clustered:clusters=50`", "0.200", "0.50"]
    assert first[6:] == ["`i-clustered:clusters=50,space=logits`", "0.160", "0.62"]
    assert second[3:] == ["–"] * 6


def test_spread_of_even_attention(beyond):
    ((_, *shares),) = beyond.spread([call(torch.zeros(1, 2, 64, 8), torch.randn(1, 2, 64, 8))])
    assert shares == ["1.6 %", "12.5 %", "50.0 %", "100.0 %", "35.9 %", "35.9 %"]  # 23 keys of 64 for each cluster


def test_the_top_keys_of_a_cluster_miss_what_single_queries_see(beyond):
    query, key = 4 * torch.randn(2, 1, 1, 200, 8)
    (row,) = beyond.spread([call(query, key)])
    best_8, of_clusters = float(row[2].split()[0]), [float(cell.split()[0]) for cell in row[5:]]
    assert all(10 < share < best_8 for share in of_clusters)


def test_patches_of_a_stride_are_some_of_those_of_all_pixels(script):
    patches = script("image_patches")
    draw = np.random.default_rng(0)
    levels = draw.integers(0, 256, 784)
    items = [{"input_ids": levels + 2, "labels": 3}]
    every = patches.Patches(window=3).collate(items)
    some = patches.Patches(window=3, stride=2).collate(items)
    assert every["patches"].shape == (1, 784, 9)
    assert some["positions"][0, :3].tolist() == [0, 2, 4]
    assert some["positions"][0, 14] == 2 * 28
    torch.testing.assert_close(some["patches"][0], every["patches"][0, some["positions"][0]])
    torch.testing.assert_close(every["patches"][0, :, 4], torch.from_numpy(2 * levels / 255 - 1).float())


def test_an_unknown_setting_is_named(beyond, run_script):
    with pytest.raises(SystemExit, match=r"no setting 'speach'.*; there are speech, reviews, images"):
        run_script(beyond, "--settings", "speach")


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(("setting", "metric"), [("speech", "digit error rate"), ("images", "accuracy")])
def test_a_setting_runs(beyond, run_script, tmp_path, setting, metric):
    words = ["--scale", "smoke", "--settings", setting, "--threads", "1", "--models", str(tmp_path / "models")]
    for _ in range(2):  # the second time with the models of the first
        run_script(beyond, *words, "--out", str(tmp_path / "out.md"))
    written = (tmp_path / "out.md").read_text("utf-8")
    assert f"| method | multiply-adds | error | {metric} |" in written
    for method in beyond.SMOKE_METHODS:
        assert f"| `{method}` | " in written
    assert "| `full` | 100.0 % | 0.000 | " in written
