"""A call passes through the functions that `docs/design/overview.md` lists under "Call paths"."""

import re
import types
from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad.testing.oracle import qkv
from tests.library import spine
from tests.library.spine import Stop, Walk

OVERVIEW = Path(__file__).parents[2] / "docs" / "design" / "overview.md"
MOST = {"sq.attention": 12, "sq.hf.swap": 16}


def listed(title: str) -> list[Stop]:
    """The stops below one heading of the section "Call paths"."""
    section = OVERVIEW.read_text("utf-8").partition("\n## Call paths\n")[2].partition("\n## ")[0]
    below = section.partition(f"\n### {title}\n")[2].partition("\n### ")[0]
    found = re.findall(r"^(\d+)\. `([\w/.]+)`: `([\w.]+)`", below, re.MULTILINE)
    assert [int(number) for number, *_ in found] == list(range(1, len(found) + 1))
    stops = [Stop(file, function) for _, file, function in found]
    if as_above := re.search(r"from here on as above, from step (\d+) to the end\.$", below.strip()):
        above = listed("sq.attention")[int(as_above[1]) - 1 :]
        assert stops[-1] == above[0]
        stops += above[1:]
    return stops


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    made = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    sq.hf.swap(made, "clustered:clusters=4")
    return made


def walk_of_attention() -> Walk:
    """The walk of one call; the first call, which also loads what later ones find, is not traced."""
    inputs = qkv(64)
    sq.attention(*inputs, method="clustered")
    with spine.recording() as walk:
        sq.attention(*inputs, method="clustered")
    return walk


def walk_of_model(model: torch.nn.Module) -> Walk:
    """The walk of a forward pass on a padded batch, after transformers calls the registered function."""
    ids, mask = torch.arange(32).view(2, 16), torch.ones(2, 16, dtype=torch.int64)
    mask[0, 12:] = 0
    forward = type(model).forward.__wrapped__  # without the checks of the call, which are over by then
    with torch.no_grad():
        model(ids, attention_mask=mask)
        with spine.recording() as walk:
            forward(model, ids, attention_mask=mask)
    return walk


@pytest.fixture(params=MOST)
def walked(request: pytest.FixtureRequest) -> tuple[str, Walk]:
    """The title of a walk, and the walk."""
    if request.param == "sq.attention":
        return request.param, walk_of_attention()
    return request.param, walk_of_model(request.getfixturevalue("model"))


def test_the_page_lists_the_stops_that_a_call_makes(walked):
    title, walk = walked
    assert listed(title) == walk.stops


def test_a_walk_is_short(walked):
    title, walk = walked
    assert len(walk.chain) > 5
    assert len(walk.stops) <= MOST[title]


def test_no_file_is_entered_again_after_it_was_left(walked):
    assert spine.left_and_entered_again(walked[1].stops) == []


def test_no_function_only_passes_the_call_on(walked):
    assert spine.that_pass_on(walked[1].chain) == []


def test_a_file_that_is_entered_again_is_found():
    stops = [Stop(file, "f") for file in ("a.py", "a.py", "b.py", "c.py", "b.py")]
    assert spine.left_and_entered_again(stops) == ["b.py"]
    assert spine.left_and_entered_again(stops[:4]) == []


def passes_on(x: int, *more: int) -> int:
    """Documented."""
    return works(x, *more)


def works(x: int, *more: int) -> int:
    y = x + 1
    return sum([y, *more])


def test_a_function_that_only_passes_on_is_found():
    codes: list[types.CodeType] = [passes_on.__code__, works.__code__]
    assert spine.that_pass_on(codes) == ["passes_on"]
