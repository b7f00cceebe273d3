"""Every column of a page, and every mark, is explained by a term of the glossary or by its own words."""

from itertools import pairwise

import pytest

from subquad.methods import METHODS
from subquad.tools.compare import page, tables
from subquad.tools.plan import tables as plan_tables
from subquad.tools.report import layout, terms
from tests.tools.report import sample
from tests.tools.report.sample_plan import plan

TABLES = [
    tables.main_table(sample.record(sample.encoder())),
    *(table for make in (sample.encoder, sample.with_requests) for _, _, table in page._tables(sample.record(make()))),
    *(table for _, _, table in plan_tables.tables(plan())),
]


@pytest.mark.parametrize("table", TABLES)
def test_every_column_says_what_it_means(table):
    assert table.columns
    for column in table.columns:
        assert column.meaning, column.title
        assert column.term in terms.TERMS  # or a tooltip says what no glossary does
    assert terms.term_of(table.first) in terms.TERMS
    assert {column.term for column in table.columns} <= {term for term, _ in terms.glossary(layout.heads([table]))}


def test_the_words_of_the_pages_are_terms():
    assert {*terms.COMPARED, *terms.PLANNED, *terms.ALIASES.values()} <= set(terms.TERMS)


def test_every_mark_is_a_term():
    report = sample.encoder()
    report["methods"][5]["unfitted"] = True
    marks = {mark for line in tables.main_table(sample.record(report)).lines for mark in line.marks}
    assert marks == {
        "baseline",
        "recommended at 512 tokens",
        "recommended at 2,048 and 4,096 tokens",
        "reference",
        "4 of 6 layers",
        "not calibrated",
    }
    assert {terms.term_of(mark) for mark in marks} == {
        "baseline", "recommended", "reference", "some layers", "not calibrated"
    }  # fmt: skip


def test_the_glossary_has_what_is_asked_for_in_order():
    found = terms.glossary(["speed-up", "nothing of the kind", "its speed-up", "fidelity", "2 of 3 layers"])
    assert [term for term, _ in found] == ["fidelity", "some layers", "speed-up"]
    assert all(a.lower() < b.lower() for a, b in pairwise(term for term, _ in terms.glossary(terms.TERMS)))


def test_reference_methods_are_those_of_the_traits():
    for name, method in METHODS.items():
        assert terms.is_reference(name) == method.traits.quadratic_baseline
        assert ("reference method" in terms.description(name)) == (method.traits.quadratic_baseline and name != "full")
    assert not terms.is_reference("full:kernel=subquad")
    assert terms.family_of("plan:folder") == ""
    assert not terms.is_reference("plan:folder")
    assert [name for name, _ in terms.described(["lha@folder", "lha", "plan:x", "local:window=2"])] == ["lha", "local"]


def test_ids_of_terms_and_methods_are_all_different():
    ids = [terms.anchor(word) for word in (*terms.TERMS, *METHODS)]
    assert len(set(ids)) == len(ids)
