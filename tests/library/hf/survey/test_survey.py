"""Tests that docs/assets/architectures.csv is right about each model type: a sample in CI, all with `-m survey`.

The table is written by `python -m tests.library.hf.survey --out results.json --table`.
"""

import re
from pathlib import Path

import pytest
import transformers

from tests.library.hf.survey.__main__ import LIMIT, died
from tests.library.hf.survey.compare import STATUSES, survey
from tests.library.hf.survey.pool import run_all
from tests.library.hf.survey.table import documented, documented_long_prompts, long_prompts
from tests.library.hf.survey.zoo import model_types

# Those that were silently wrong, or whose poolers, convolutions or padded queries were, before masks came from what
# transformers builds; then one or more of every kind of architecture, but for those that `tests/library/hf/models.py`
# has.
ONCE_WRONG = (
    "nllb-moe", "pegasus_x", "bigbird_pegasus", "informer", "moonshine", "aimv2_text_model", "paligemma", "colpali",
    "bridgetower_text_model", "siglip2", "molmo2", "wav2vec2-conformer", "gemma3n_text", "siglip",
)  # fmt: skip
OF_EVERY_KIND = (
    "albert", "layoutlm", "markuplm", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v32", "exaone4",
    "doge", "llama4_text", "switch_transformers", "clip", "segformer", "qwen2_vl",
)  # fmt: skip

PAGE = Path(__file__).parents[4] / "docs" / "architectures.md"
MINOR = ".".join(transformers.__version__.split(".")[:2])

# The table is one version's: others have other model types, and put more or fewer of them on the interface.
pytestmark = pytest.mark.skipif(
    f"Model types of transformers {MINOR}:" not in PAGE.read_text("utf-8"), reason=f"the page is not of {MINOR}"
)


@pytest.fixture(scope="module")
def page() -> dict[str, str]:
    return documented()


def test_the_sample_has_29_types():
    assert len({*ONCE_WRONG, *OF_EVERY_KIND}) == 29


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*ONCE_WRONG, *OF_EVERY_KIND])
def test_equal_or_refused_at_swap(model_type, page):
    result = survey(model_type)
    assert result["status"] in ("equal", "refused at swap"), result
    assert result["status"] == page[model_type], result
    assert long_prompts(result) == documented_long_prompts().get(model_type, ""), result


def test_the_page_has_every_model_type_once(page):
    assert sorted(page) == model_types()


def test_nothing_is_wrong_crashes_or_is_refused_late(page):
    late = {"silently wrong", "crashed", "refused at first forward"}
    assert late < {*STATUSES}
    assert {t: s for t, s in page.items() if s in late} == {}


def test_long_prompts_run_or_are_refused():
    said = documented_long_prompts()
    fine = re.compile(r"yes|in \d+ of \d+ layers|not surveyed|no effect|refused: .+")
    assert {t: s for t, s in said.items() if not fine.fullmatch(s)} == {}
    assert said["llama"] == "yes"
    assert said["gemma3_text"] == "in 1 of 2 layers"
    assert said["gemma2"].startswith("refused: layer 1")
    assert "bert" not in said


@pytest.mark.slow
@pytest.mark.survey
def test_every_model_type(page):
    """Two minutes on two quiet cores, and many times that on busy ones."""
    found = dict(run_all(survey, model_types(), 2, LIMIT, died))
    assert {t: r for t, r in found.items() if r["status"] != page[t]} == {}
    said = {t: cell for t, r in found.items() if (cell := long_prompts(r))}
    assert said == documented_long_prompts()
