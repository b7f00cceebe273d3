import ast

import pytest

from tests.identifiers import SOURCE, defined, private_words, python_files, shared_class_names

# How many names of a folder still have a private word. These numbers may fall; a folder that is not here has none.
STILL = {
    "audits": 17,
    "core": 1,
    "distributed": 172,
    "hf": 190,
    "kernels": 445,
    "masks": 9,
    "methods": 180,
    "nn": 22,
    "research": 354,
    "testing": 26,
    "tools": 223,
}


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
