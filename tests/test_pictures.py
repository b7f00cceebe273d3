"""The pictures of the docs: each is up to date and embedded, and the patterns are what the methods compute."""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

import subquad as sq
from tests.test_layers import LEVELS, SOURCE, inner, layer
from tests.test_layers import imports as imports_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ASSETS = DOCS / "assets" / "pictures"
sys.path.append(str(DOCS))

from pictures import layers, matrix, patterns, plan, schematics, svg, terminal, tree  # noqa: E402

DRAWN = schematics.FILES | tree.FILES | plan.FILES | layers.FILES | terminal.FILES
REMEDY = "run python docs/pictures"
SOME = ("full", "local", "clustered-tail", "performer", "nystrom", "mixed-heads", "rfa")
MOST_BYTES = {"patterns": 15_000, "": 100_000}


def stored(name: str) -> str:
    return (ASSETS / name).read_text("utf-8")


def files() -> list[str]:
    return sorted(str(path.relative_to(ASSETS)) for path in ASSETS.rglob("*.svg"))


def method_or_long(name: str):
    return name if name in SOME else pytest.param(name, marks=pytest.mark.long)


# ---------------------------------------------------------------------- all pictures


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_up_to_date(name):
    assert DRAWN[name]() == stored(name), f"docs/assets/pictures/{name} is out of date: {REMEDY}"


def test_every_method_has_a_pattern_and_no_picture_is_left_over():
    assert files() == sorted([*DRAWN, *patterns.FILES])
    assert set(patterns.PATTERNS) <= set(sq.METHODS)


def test_every_picture_is_in_a_page():
    pages = "".join(path.read_text("utf-8") for path in [ROOT / "README.md", *DOCS.rglob("*.md")])
    missing = [name for name in files() if f"assets/pictures/{name})" not in pages]
    # The picture of the terminal is for README.md.
    assert [name for name in missing if name != "terminal.svg"] == []


def test_every_page_of_a_method_has_its_own_pattern():
    for name in sq.METHODS:
        page = (DOCS / "methods" / f"{name}.md").read_text("utf-8")
        assert f"(../assets/pictures/patterns/{name}.svg)" in page, name


@pytest.mark.parametrize("name", files())
def test_a_picture_stands_alone(name):
    text = stored(name)
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{space}title").text
    assert len(root.find(f"{space}desc").text) > 40
    assert not re.search(r"<script|@font-face|href|https?://(?!www\.w3\.org/2000/svg)", text)
    assert len(text.encode()) <= MOST_BYTES["patterns" if name.startswith("patterns/") else ""]


def test_a_text_that_leaves_its_picture_or_box_is_an_error():
    picture = svg.Picture(100, 50, "title", "about")
    with pytest.raises(ValueError, match="does not fit"):
        picture.text(60, 20, "a long line of text")
    with pytest.raises(ValueError, match="wider than its box"):
        picture.box(10, 10, 40, 30, ("a long line",))


# ---------------------------------------------------------------------- patterns


@pytest.mark.parametrize("name", [method_or_long(name) for name in sq.METHODS])
def test_a_pattern_is_what_the_method_computes(name):
    *_, drawn = matrix.read(stored(f"patterns/{name}.svg"))
    computed = matrix.levels_of(patterns.weights(name)[-1])
    assert drawn.shape == computed.shape == (patterns.TOKENS, patterns.TOKENS)
    # Rounding differs between processors: a weight between two levels of colour may have either, but few are there.
    assert (drawn != computed).mean() < 0.03, REMEDY
    assert (np.abs(drawn - computed) > 1).mean() < 0.01, REMEDY


@pytest.mark.parametrize("name", [method_or_long(name) for name in sq.METHODS])
def test_the_weights_of_each_query_add_to_one(name):
    np.testing.assert_allclose(patterns.weights(name).sum(-1), 1.0, atol=1e-4)


def test_weights_are_softmax_of_the_products_and_local_is_a_band_of_them():
    q, k = (side[0, 0].double().numpy() for side in patterns.inputs())
    mass = np.exp(q @ k.T / np.sqrt(patterns.WIDTH))
    near = np.abs(np.subtract.outer(*2 * [np.arange(patterns.TOKENS)])) <= 4
    for name, pairs in (("full", np.ones_like(near)), ("local", near)):
        want = np.where(pairs, mass, 0) / np.where(pairs, mass, 0).sum(1, keepdims=True)
        np.testing.assert_allclose(patterns.weights(name)[0], want, atol=1e-5)
    assert (matrix.levels_of(patterns.weights("local")[0]) > 0).tolist() == near.tolist()


def test_causal_patterns_have_no_later_keys():
    causal = [name for name in sq.METHODS if patterns.drawn_as(name).causal]
    assert causal
    for name in causal:
        assert not np.triu(patterns.weights(name)[-1], 1).any(), name


def test_a_picture_says_where_it_could_have_been_another():
    assert patterns.remark("lha") == patterns.remark("linformer") == "untrained: initial parameters"
    assert patterns.remark("clustered") == "one random seed of many"
    assert patterns.remark("local") == ""


def test_a_method_that_is_not_listed_is_drawn_with_its_example(monkeypatch):
    monkeypatch.delitem(patterns.PATTERNS, "oracle-top")
    drawn = patterns.drawn_as("oracle-top")
    assert sq.parse_method(drawn.method) == sq.OracleTopK(**sq.OracleTopK.traits.example)
    assert drawn.caption


def test_a_matrix_is_read_as_it_was_drawn():
    levels = np.array([[0, 0, 3, 3], [1, 7, 1, -1], [0, 0, 0, 0]])
    picture = svg.Picture(100, 100, "title", "about")
    matrix.draw(picture, levels, 10, 10, 5)
    (read,) = matrix.read(picture.svg())
    assert read.tolist() == levels.tolist()
    assert matrix.levels_of(np.array([0.0, 1e-6, 0.01, 0.5, -0.1])).tolist() == [0, 1, 2, 7, -1]


# ---------------------------------------------------------------------- sources


def test_the_layers_are_those_of_the_imports():
    assert [*layers.LAYERS] == LEVELS[::-1]
    for name, imported in layers.imports().items():
        paths = [path for path in SOURCE.rglob("*.py") if layer(path) == name]
        assert imported == set().union(*(inner(imports_of(path)) for path in paths)) - {name}


def test_the_plan_is_a_measured_one():
    rows = [json.loads(line) for line in plan.ROWS.read_text("utf-8").splitlines()]
    text = stored("plan.svg")
    for row in plan.plans():
        assert row in rows
        assert f">{row['speedup']:.2f}×<" in text
        assert f">{1 - row['loss']:.4f}<" in text


def test_the_tree_names_methods_and_their_settings():
    def leaves(node):
        return [node] if isinstance(node, tree.Leaf) else [leaf for _, below in node.answers for leaf in leaves(below)]

    choose = (DOCS / "how-to" / "choose.md").read_text("utf-8")
    for leaf in leaves(tree.TREE):
        for method in leaf.method.split(", "):
            sq.parse_method(method)
            assert f"`{method}" in choose


def test_the_terminal_shows_the_figures_of_the_report():
    text = re.sub(r"<[^>]+>", " ", stored("terminal.svg")).replace("&#160;", " ")
    for method in terminal.report().methods:
        for costs in method.model.values():
            assert f"{costs.speedup:.2f}×" in text
