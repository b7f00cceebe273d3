"""The page of all methods: its columns are true, and its filter shows the methods that they name."""

import json
import re
import runpy
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import subquad as sq
from subquad.testing.oracle import qkv
from tests.library.test_exits import NOT_COMPILED_ONCE

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "methods.md").read_text("utf-8")
GENERATOR = runpy.run_path(str(DOCS / "all_methods.py"))
FILTER = DOCS / "assets" / "methods.js"


def cells() -> dict[str, dict[str, str]]:
    """The cells of both tables: by method, and by column."""
    methods: dict[str, dict[str, str]] = {}
    heads: list[str] = []
    for row in re.findall(r"^\| (.*) \|$", PAGE, re.MULTILINE):
        columns = [re.sub(r"\[`(.*?)`\]\(.*\)", r"\1", cell).replace("`", "") for cell in row.split(" | ")]
        if columns[0] == "method":
            heads = columns
        elif set(columns[0]) != {"-"}:
            methods.setdefault(columns[0], {}).update(zip(heads, columns, strict=True))
    return methods


CELLS = cells()


def having(column: str, pattern: str) -> set[str]:
    return {name for name, row in CELLS.items() if re.search(pattern, row[column])}


def with_trait(name: str) -> set[str]:
    return {method for method, cls in sq.METHODS.items() if getattr(cls.traits, name)}


def test_the_page_has_a_row_for_every_method():
    assert list(CELLS) == list(sq.METHODS)


def test_sub_quadratic_is_what_the_contract_counts():
    """The contract counts operations at the settings of the examples, whose trait is that of the default settings."""
    assert having("sub-quadratic", "^yes") == with_trait("subquadratic")
    for cls in sq.METHODS.values():
        assert cls.from_settings(dict(cls.traits.example)).traits.subquadratic == cls().traits.subquadratic


def test_most_methods_are_as_readme_promises():
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    promise = (
        r"more than thirty attention methods .*\nMost of them run in sub-quadratic .* and most have compiled kernels"
    )
    assert re.search(promise, readme)
    assert len(sq.METHODS) > 30
    assert 2 * len(with_trait("subquadratic") & having("compiled on the CPU", "^(?!none$)")) > len(sq.METHODS)


def test_settings_that_the_page_calls_sub_quadratic_are():
    for name in having("sub-quadratic", r"^no \("):
        settings = GENERATOR["SUBQUADRATIC_WITH"][name]
        assert f"yes with {settings}" in CELLS[name]["sub-quadratic"]
        assert sq.parse_method(f"{name}:{settings}").traits.subquadratic


def test_methods_without_training_have_nothing_to_learn_and_an_exact_limit():
    for name in having("training", "^none"):
        traits = sq.METHODS[name].traits
        assert not traits.learned
        assert not isinstance(traits.exact_limit, str)
    assert having("training", "calibration") <= {n for n in sq.METHODS if sq.METHODS[n].traits.fit is not None}
    assert having("training", "as its parts") == {n for n in sq.METHODS if sq.METHODS[n].traits.family == "mixture"}


def test_training_follows_the_traits_and_the_sentence():
    training, traits = GENERATOR["training"], sq.Clustered.traits
    assert training(traits, "In an encoder.") == "none"
    assert training(traits, "In a model that is trained with it.") == "yes"
    assert training(replace(traits, exact_limit="it differs"), "In an encoder.") == "yes"
    assert training(sq.TiltedPool.traits, "After some minutes of fitting.") == "calibration"
    assert training(sq.TiltedPool.traits, "In an encoder.") == "yes, or calibration"


def test_cached_steps_are_those_that_methods_take():
    assert having("cached steps", "✓") == {name for name, method in sq.METHODS.items() if takes_cached_steps(method)}


def takes_cached_steps(method: type[sq.Method]) -> bool:
    layer = method.from_settings(dict(method.traits.example)).bind(heads=2, head_dim=8, max_length=64).eval()
    query, key, value = qkv(50)
    try:
        layer(query[:, :, -3:], key, value, mask=sq.Mask.causal(offset=47))
    except ValueError:
        return False
    return True


def test_methods_that_are_not_compiled_once_are_named():
    paragraph = next(text for text in PAGE.split("\n- ") if text.startswith("`torch.compile"))
    with_other_settings = {"by-length", "lsh", "lha"}
    assert set(re.findall(r"`([a-z-]+)`", paragraph)) == set(NOT_COMPILED_ONCE) | with_other_settings


FILTERS = re.findall(r'^  \["(.*?)", "(.*?)", /(.*)/\],$', FILTER.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("label", "column", "pattern"), FILTERS)
def test_a_filter_chooses_some_methods_and_not_all(label, column, pattern):
    assert 0 < len(having(column, pattern)) < len(CELLS)


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js runs the script")
@pytest.mark.parametrize(
    ("text", "labels"),
    [("", []), ("", ["causal"]), ("", ["no training", "sub-quadratic"]), ("lsh", []), ("CLUSTERS encoder", ["keep="])],
)
def test_the_filter_shows_the_methods_with_the_text_and_all_chosen_properties(text, labels):
    call = f"filteredMethods({json.dumps(CELLS)}, {json.dumps(text)}, {json.dumps(labels)})"
    script = f"{FILTER.read_text('utf-8')}\nconsole.log(JSON.stringify({call}))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    wanted = set(CELLS)
    for label, column, pattern in FILTERS:
        wanted &= having(column, pattern) if label in labels else wanted
    wanted = {n for n in wanted if all(word in " ".join(CELLS[n].values()).lower() for word in text.lower().split())}
    assert set(json.loads(done.stdout)) == wanted
    assert wanted


def test_learned_distances_are_named_where_they_end_exactness():
    supports = PAGE.partition("<!-- supports:begin -->")[2]
    rows = {line.split("`")[1]: line for line in supports.splitlines() if line.startswith("| [`")}
    ends = {name for name, row in rows.items() if "unless `positions=relative`" in row}
    assert ends == {"full", "local"}
    for name in ends:
        assert isinstance(sq.METHODS[name](positions="relative").traits.exact_limit, str)
