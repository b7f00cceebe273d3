import ast

import pytest

from tests.identifiers import SOURCE, defined, private_words, python_files, shared_class_names

# Names that stay: keys of files that finished runs have written, and "wide", said of a drawing and of windows.
STILL = {"research": 4, "tools": 3}


@pytest.mark.parametrize("part", sorted(path.name for path in SOURCE.iterdir() if path.suffix in ("", ".py")))
def test_names_are_terms_of_the_field(part):
    found = list(private_words(python_files([SOURCE / part])))
    assert len(found) <= STILL.get(part, 0), "\n".join(found)


def test_names_of_classes_are_unique():
    assert not list(shared_class_names(python_files([SOURCE])))


def test_defined_names_are_found():
    code = "class A:\n    b: int\n    def c(self, d, *, e=f): g = h = i(d)\nfor j, (k, *l) in m: pass\n(n := 1)"
    assert [name for _, name in sorted(defined(ast.parse(code)), key=str)] != []
    assert {name for _, name in defined(ast.parse(code))} == {*"Abcdeghjkln", "self"}
