"""The benchmark of a vision transformer: its pages and positions, its intervals, and a run of a few seconds."""

import importlib
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def vit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)  # as for a script
    return importlib.import_module("vit")


@pytest.fixture
def mosaics(vit: ModuleType) -> ModuleType:
    return vit.mosaics


def test_half_of_a_page_shows_its_kind_and_no_other_shows_as_much(mosaics):
    labels = torch.arange(10).repeat(3)
    images = labels[:, None, None].expand(-1, 28, 28).mul(20).to(torch.uint8)  # each kind has a grey of its own
    for grid, half, quarter in ((1, 1, 0), (2, 2, 1), (4, 8, 4)):
        found = mosaics.pages(mosaics.Pictures(images, labels), grid, 20, random.Random(0))
        assert found.pixels.shape == (20, 1, 28 * grid, 28 * grid)
        for page, kind, each in zip(*found, strict=True):
            greys = ((page[0, ::28, ::28] + 1) * 127.5 / 20).round().long().flatten()
            counts = greys.bincount(minlength=10)
            assert torch.equal(greys, each.flatten())
            assert counts[kind] == half
            counts[kind] = 0
            assert counts.max() <= quarter


def test_every_patch_has_the_kind_of_its_picture(mosaics):
    page = mosaics.Pages(torch.zeros(1, 1, 56, 56), torch.tensor([3]), torch.tensor([[[3, 1], [2, 3]]]))
    patches = page.patches.view(28, 28)
    assert patches[:14, :14].unique().tolist() == patches[14:, 14:].unique().tolist() == [3]
    assert patches[:14, 14:].unique().tolist() == [1]
    assert patches[14:, :14].unique().tolist() == [2]


def test_a_window_has_the_positions_of_its_part_of_the_page(mosaics):
    side = mosaics.GRID * 14
    positions = torch.arange(side**2 + 1.0)[None, :, None]
    assert torch.equal(mosaics.window(positions, mosaics.GRID), positions)
    part = mosaics.window(positions, 2, row=1, column=2)[0, :, 0]
    assert len(part) == mosaics.tokens(2) == 785
    assert part[0] == 0  # the class token
    assert part[1] == 1 + 14 * side + 28
    assert part[-1] == 1 + (3 * 14 - 1) * side + (4 * 14 - 1)


def test_positions_start_as_sines_that_tell_all_patches_apart(mosaics):
    found = mosaics.sines(56, 32)
    assert found.shape == (56**2, 32)
    assert torch.cdist(found, found).fill_diagonal_(1.0).min() > 0.1


def test_the_interval_covers_the_mean_as_often_as_it_says(vit, monkeypatch):
    monkeypatch.setattr(vit, "RESAMPLES", 400)
    draw = np.random.default_rng(0)
    intervals = [vit.interval(draw.normal(0.3, 1, 200)) for _ in range(300)]
    assert 0.91 < np.mean([low < 0.3 < high for low, high in intervals]) < 0.98
    assert vit.interval(np.full(9, 0.5)) == (0.5, 0.5)


def test_a_difference_that_rounds_to_nothing_has_no_minus(vit):
    assert [vit.signed(x) for x in (-0.0004, 0.0, 0.012, -0.012)] == ["+0.0%", "+0.0%", "+1.2%", "-1.2%"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scale", "smal"], r"no scale 'smal'.*'small'.*; there are small, smoke"),
        (["--lengths", "1000"], r"no page has 1,000 tokens; pages have 197, 785, 1,765, 3,137"),
    ],
)
def test_mistakes_end_in_a_message(vit, run_script, words, message):
    with pytest.raises(SystemExit, match=message):
        run_script(vit, *words)


@pytest.mark.slow
@pytest.mark.data
def test_it_runs_and_saves_its_model(vit, run_script, tmp_path):
    methods = ["full:kernel=subquad", "clustered-tail:clusters=4,topk=4,cells=2", "local:window=4"]
    words = ["--scale", "smoke", "--pages", "2", "--turns", "1", "--threads", "1", "--lengths", "197 785"]
    words += ["--methods", " ".join(methods), "--weights", str(tmp_path / "model"), "--out", str(tmp_path / "out.md")]
    written = []
    for _ in range(2):  # the second time with the model of the first
        run_script(vit, *words)
        written.append((tmp_path / "out.md").read_text("utf-8"))
    assert "saved in" in written[1]
    first, second = (
        [line.split(" | ")[:-1] for line in text.splitlines() if line.startswith("| ")] for text in written
    )
    assert first == second  # all but the speed
    by_name = {(row[0], row[1].strip("`")): row[2:] for row in first[2:]}
    assert len(by_name) == 2 * (1 + len(methods))
    for tokens in ("| 197", "| 785"):
        assert by_name[tokens, "full:kernel=subquad"][:3] == ["1.0000", "1.0000", "100.0%"]
        assert float(by_name[tokens, "local:window=4"][1]) < 1
