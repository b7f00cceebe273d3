"""Tests that `sq.hf.swap` treats small models of the listed architectures as docs/models.md says.

A line says "works" or "refused" of exact attention and of `clustered-tail`; of a refusal it quotes the reason in
italics.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import subquad as sq
from tests.library.hf.models import Case
from tests.library.hf.named import MODELS, build

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
HEAD = "| architecture | class | `full` | `clustered-tail` | weights | what to know |"
EXACT = "clustered-tail:topk=1000,block=8,last=3"  # more top keys than there are keys
COARSE = "clustered-tail:clusters=3,topk=3,cells=2,bits=15,block=8,last=3"
STAND_IN = "code of the repository, not of transformers"
WORKS, GLOBAL, REFUSED = "works", "works in global layers", "refused"


class Line(NamedTuple):
    """One line of the page."""

    name: str
    model_class: str
    full: str
    tail: str
    weights: str
    advice: str


def lines() -> dict[str, Line]:
    """The lines of the page by their names."""
    table = PAGE.read_text("utf-8").partition(HEAD + "\n")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [Line(*(cell.strip() for cell in row.strip("| ").split(" | "))) for row in table]
    names = [row.name.partition(" (")[0] for row in rows]
    assert len(set(names)) == len(names)
    return dict(zip(names, rows, strict=True))


def outputs(case: Case) -> list[Tensor]:
    """All outputs of a model that are numbers; of texts and speech, where they are real."""
    with torch.no_grad():
        result = case.model(**case.inputs)
    tensors = [x for x in result.values() if isinstance(x, Tensor) and x.is_floating_point()]
    assert tensors
    shape = () if case.valid is None else tuple(case.valid.shape)
    return [x[case.valid] if shape and tuple(x.shape[:2]) == shape else x for x in tensors]


def farthest(case: Case, wanted: list[Tensor]) -> float:
    """The greatest difference of the outputs, relative to the largest number."""
    pairs = zip(outputs(case), wanted, strict=True)
    return max(float((have - want).abs().max() / want.abs().max()) for have, want in pairs)


def quoted(line: Line) -> str:
    """The reason of a refusal as the page quotes it."""
    found = re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", line.advice)
    assert found, f"the line of {line.name} quotes no reason"
    return found[0].replace("\\_", "_")


def check_refused(case: Case, method: str, line: Line) -> None:
    """The method is refused for the reason that the page quotes, and the model is as it was."""
    before = outputs(case)
    with pytest.raises(ValueError, match=re.escape(quoted(line))):
        sq.hf.swap(case.model, method)
    assert farthest(case, before) == 0


def test_the_page_has_a_line_for_every_model_that_is_tried():
    assert lines().keys() == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_the_class_is_the_one_that_is_tried(name):
    line, case = lines()[name], build(name)
    shown = f"`{type(case.model).__name__}`" if type(case.model).__module__.startswith("transformers.") else STAND_IN
    assert line.model_class == shown


@pytest.mark.parametrize("name", MODELS)
def test_exact_attention_equals_the_models_own_or_is_refused(name):
    line, case = lines()[name], build(name)
    if line.full == REFUSED:
        return check_refused(case, "full", line)
    assert line.full == WORKS
    wanted = outputs(case)
    swapped = sq.hf.swap(case.model, "full")
    assert len(swapped.methods) == len(swapped.layers) > 0
    assert farthest(case, wanted) < 1e-5
    return None


@pytest.mark.parametrize("name", MODELS)
def test_clustered_tail_runs_where_the_page_says_so(name):
    line, case = lines()[name], build(name)
    if line.tail == REFUSED:
        return check_refused(case, COARSE, line)
    wanted = outputs(case)
    swapped = sq.hf.swap(case.model, EXACT)
    approximate = [layer for layer in swapped.layers if not swapped.methods[layer.number].is_exact]
    assert line.tail == (WORKS if len(approximate) == len(swapped.layers) else GLOBAL)
    assert all(layer.window is None for layer in approximate)
    assert all(layer.window is not None for layer in swapped.layers if layer not in approximate)
    assert approximate
    assert farthest(case, wanted) < 1e-5
    sq.hf.swap(case.model, COARSE)
    assert farthest(case, wanted) > 1e-4  # few keys differ, so it does run
    return None


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("CLIP", "SigLIP")])
def test_a_padded_text_is_what_it_is_alone(name):
    line, case = lines()[name], build(name)
    ids, mask = case.inputs.get("input_ids"), case.inputs.get("attention_mask")
    if REFUSED in (line.full, line.tail) or ids is None:
        pytest.skip("refused, or no text")
    sq.hf.swap(case.model, COARSE)
    together = outputs(case)[0]
    valid = mask[-1].bool()
    inputs = {key: value[-1:, valid] for key, value in case.inputs.items()}
    alone = outputs(Case(case.model, inputs))[0][0]
    torch.testing.assert_close(together[-len(alone) :], alone, atol=1e-5, rtol=1e-4)


def test_a_window_that_no_prompt_reaches_can_be_switched_off():
    case = build("Mistral with a window")
    case.model.config.sliding_window = 64  # the prompts have 29 tokens
    wanted = outputs(case)
    case.model.config.sliding_window = None
    sq.hf.swap(case.model, EXACT)
    assert farthest(case, wanted) < 1e-5


@pytest.mark.parametrize("method", ["full", EXACT])
def test_an_encoder_made_of_a_decoder_reads_packed_texts(method):
    """EmbeddingGemma's mask is a decoder's, made bidirectional: it is the only encoder of these that packs texts."""
    case = build("EmbeddingGemma")
    ids = case.inputs["input_ids"][:1]
    positions = torch.cat([torch.arange(12), torch.arange(ids.shape[1] - 12)])[None]
    packed = Case(case.model, {"input_ids": ids, "position_ids": positions, "use_cache": False})
    wanted = outputs(packed)[0]
    sq.hf.swap(case.model, method)
    have = outputs(packed)[0]
    torch.testing.assert_close(have, wanted, atol=1e-4, rtol=1e-4)
    alone = outputs(Case(case.model, {"input_ids": ids[:, :12], "use_cache": False}))[0]
    torch.testing.assert_close(have[:, :12], alone, atol=1e-4, rtol=1e-4)
