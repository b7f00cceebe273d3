"""ListOps: expressions by the rules, and their values."""

import os
from pathlib import Path

import numpy as np
import pytest

from subquad.core.errors import InputError
from subquad.research.papers.data.listops_expressions import (
    END,
    MAX,
    MED,
    MIN,
    SM,
    SYMBOLS,
    Rules,
    apply,
    depth_of,
    evaluate,
    expression,
    parse,
    read_listops,
    root_digits,
)
from subquad.research.training.folders import find_data

REAL = os.environ.get("SUBQUAD_DATA")
SHORT = Rules(shortest=8, longest=40)


def drawn(rules, count):
    return [expression(rules, np.random.default_rng((0, i))) for i in range(count)]


def sizes(symbols):
    """The number of arguments of each operator."""
    open_lists, found = [0], []
    for symbol in symbols:
        if symbol == END:
            found.append(open_lists.pop())
        else:
            open_lists[-1] += 1
            if symbol >= MIN:
                open_lists.append(0)
    return found


@pytest.mark.parametrize(("text", "value", "depth", "digits"), [
    ("[MAX 4 [MIN 2 3 ] 1 0 ]", 4, 3, [4, 1, 0]),
    ("[SM 9 9 [SM 1 1 ] ]", 0, 3, [9, 9]),
    ("[MED 1 2 ]", 1, 2, [1, 2]),
    ("[MED 8 1 5 ]", 5, 2, [8, 1, 5]),
    ("( ( ( [MIN 7 ) ( ( [MAX 3 ) 9 ) ] ) ) ]", 7, 3, [7]),
    ("[MIN [MAX [SM 5 6 ] 0 ] [MED 2 2 9 9 ] ]", 1, 4, []),
])  # fmt: skip
def test_values_by_hand(text, value, depth, digits):
    symbols = parse(text)
    assert evaluate(symbols) == value
    assert depth_of(symbols) == depth
    assert root_digits(symbols) == digits


@pytest.mark.parametrize("text", ["[MAX 1 2", "[MAX ]", "1 2", "1 ]", ""])
def test_brackets_that_do_not_match(text):
    with pytest.raises(ValueError, match="expression"):
        evaluate(parse(text))


def test_operators():
    digits = [7, 2, 2, 9]
    assert [apply(operator, digits) for operator in (MIN, MAX, MED, SM)] == [2, 9, 4, 0]
    assert len(SYMBOLS) == 15


@pytest.mark.parametrize("rules", [
    SHORT,
    Rules(shortest=20, longest=60, depth=3, arguments=4, operators=0.5),
    Rules(),
    Rules(shortest=4, longest=4),
])  # fmt: skip
def test_expressions_keep_the_rules(rules):
    for symbols in drawn(rules, 15):
        assert rules.shortest <= len(symbols) <= rules.longest
        assert 2 <= depth_of(symbols) <= rules.depth
        assert all(2 <= size <= rules.arguments for size in sizes(symbols))
        assert 0 <= evaluate(symbols) <= 9


def test_an_expression_depends_on_its_generator_alone():
    assert drawn(SHORT, 5) == drawn(SHORT, 5)
    assert len({tuple(symbols) for symbols in drawn(SHORT, 50)}) == 50


def test_all_symbols_are_drawn_evenly():
    """Digits and operators by their own share: within four standard errors."""
    symbols = [symbol for expression in drawn(SHORT, 100) for symbol in expression]
    for own in (range(10), range(MIN, END)):
        counts = [symbols.count(symbol) for symbol in own]
        mean = sum(counts) / len(counts)
        assert all(abs(count - mean) < 4 * mean**0.5 for count in counts)


def test_the_share_of_operators_is_that_of_the_rules():
    """Below the outermost operator and above the last level, of trees of any size."""
    rules = Rules(shortest=4, longest=10**6, depth=3)
    inner = [size for symbols in drawn(rules, 150) for size in [sizes(symbols)]]
    nodes = sum(size[-1] for size in inner)
    operators = sum(len(size) - 1 for size in inner)
    assert abs(operators / nodes - 0.25) < 4 * (0.25 * 0.75 / nodes) ** 0.5


@pytest.mark.parametrize(("given", "message"), [
    ({"depth": 1}, "depth=1"),
    ({"operators": 1.5}, r"operators=1\.5"),
    ({"shortest": 3}, "4 tokens or more"),
    ({"shortest": 30, "longest": 20}, "the shortest no more than the longest"),
])  # fmt: skip
def test_rules_that_cannot_be(given, message):
    with pytest.raises(ValueError, match=message):
        Rules(**given)


def test_sizes_that_no_tree_has(monkeypatch):
    monkeypatch.setattr("subquad.research.papers.data.listops_expressions.MOST", 3)
    with pytest.raises(ValueError, match=r"3 draws of trees with depth=2.*none had 501 to 1999 tokens"):
        expression(Rules(depth=2), np.random.default_rng(0))


def test_files_of_labels_and_expressions(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("4\t( ( [MAX 4 ) 1 ) ]\n")
    assert list(read_listops(path)) == [(parse("[MAX 4 1 ]"), 4)]
    path.write_text("4\t[MAX 4 1 ]\n[MAX 4 1 ]\n")
    with pytest.raises(InputError, match=r"a\.tsv, line 2"):
        list(read_listops(path))
    with pytest.raises(InputError, match="no file or folder at"):
        list(read_listops(tmp_path / "none.tsv.gz"))
    path.write_text("4\t[MAX 4 1 ]\x0c4\t4\n")  # one line: a form feed ends none
    assert len(list(read_listops(path))) == 1


@pytest.mark.data
def test_all_published_labels_agree():
    path = find_data(Path(REAL), "listops", "test_d20s.tsv.gz", "x")
    right = [evaluate(symbols) == label for symbols, label in read_listops(path)]
    assert len(right) == 10_000
    assert all(right)
