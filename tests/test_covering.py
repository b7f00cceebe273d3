"""Covering arrays have every pair of values, and far fewer rows than the product."""

from itertools import combinations, product

import pytest

from tests.covering import covering

pytest_plugins = ("pytester",)


def pairs(rows):
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize("sizes", [(5, 6, 3), (4, 4, 4, 2, 2), (7, 2), (3,), (2, 1, 9)], ids=str)
def test_every_pair_of_values_occurs(sizes):
    rows = list(product(*map(range, sizes)))
    taken = [rows[i] for i in covering(rows)]
    assert pairs(taken) == pairs(rows)


def test_few_rows_are_enough():
    rows = list(product(range(5), range(6), range(6), range(3)))
    assert len(covering(rows)) < 50  # of 540; at least 36
    assert len(covering(rows, strength=1)) == 6
    assert covering(rows) == covering(rows)


def test_values_take_turns():
    rows = list(product(range(12), "xyz"))
    taken = [rows[i][1] for i in covering(rows, strength=1)]
    assert sorted(map(taken.count, "xyz")) == [4, 4, 4]


def test_combinations_that_do_not_exist_are_not_asked_for():
    rows = [(0, 0, 0), (0, 1, 1), (1, 0, 1)]
    assert covering(rows) == [0, 1, 2]


def test_every_value_meets_the_others_but_values_of_a_kind_share_them():
    rows = list(product(["a1", "a2", "a3", "b1"], ["x", "y"]))
    taken = [rows[i] for i in covering(rows, kind=lambda value: value[0])]
    assert {first for first, _ in taken} == {"a1", "a2", "a3", "b1"}
    assert {(first[0], second) for first, second in taken} == set(product("ab", "xy"))
    assert len(taken) == 5


def test_the_other_cases_are_long(pytester: pytest.Pytester):
    pytester.makeconftest(
        """
        import pytest
        from tests.covering import mark_long

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(items):
            mark_long(items)
        """
    )
    pytester.makeini("[pytest]\nmarkers =\n  covering\n  long\naddopts = -p no:cacheprovider")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.covering
        @pytest.mark.parametrize("a", range(3))
        @pytest.mark.parametrize("b", range(3))
        @pytest.mark.parametrize("c", range(3))
        def test_product(a, b, c):
            pass

        @pytest.mark.covering(strength=1)
        @pytest.mark.parametrize("a", range(3))
        @pytest.mark.parametrize("b", range(4))
        def test_sum(a, b):
            pass

        @pytest.mark.parametrize("a", range(3))
        def test_all(a):
            pass
        """
    )
    short, whole = (pytester.inline_run("-m", marks).listoutcomes()[0] for marks in ("not long", "long or not long"))
    count = {name: sum(name in report.nodeid for report in short) for name in ("product", "sum", "all")}
    assert 9 <= count["product"] < 15
    assert (count["sum"], count["all"]) == (4, 3)
    assert len(whole) == 27 + 12 + 3
