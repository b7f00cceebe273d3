"""Registration of methods that are not part of subquad, in this process."""

from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import subquad as sq
from subquad.methods.core.plugins import PROVIDERS, UnknownMethod, check_providers, find_method, record_of

TRAITS = replace(sq.Full.traits, source="a test")


@pytest.fixture(autouse=True)
def _methods_as_before():
    before = dict(sq.METHODS)
    yield
    sq.METHODS.clear()
    sq.METHODS.update(before)


def made(name: str = "mine", base: type = sq.Full, **members: object) -> type:
    """A new class of methods."""
    members = {"name": name, "traits": TRAITS, "__module__": __name__} | members
    return dataclass(frozen=True)(type("Mine", (base,), members))


def of_no_family() -> sq.Traits:
    traits = copy(TRAITS)
    object.__setattr__(traits, "family", "others")
    return traits


def test_a_registered_method_has_its_place_among_those_of_its_family():
    assert "mine" not in sq.list_methods()
    cls = sq.register(made())
    assert sq.parse_method("mine") == cls()
    names = sq.list_methods()
    assert names.index("full") < names.index("mine") < names.index("oracle-top")
    assert sq.register(cls) is cls


def test_a_class_that_was_defined_again_takes_the_place_of_the_one_before():
    sq.register(made())
    again = sq.register(made())
    assert sq.METHODS["mine"] is again


@pytest.mark.parametrize(
    ("cls", "error", "reason"),
    [
        (torch.nn.Linear, TypeError, "is not a dataclass derived from sq.Method"),
        (type("Mine", (sq.Full,), {"name": "mine"}), TypeError, "write @dataclass"),
        (made(name=None), TypeError, "has no `name`"),
        (made(traits=None), TypeError, "has no `name`, a text, or no `traits`"),
        (made("Mine"), ValueError, "is called 'Mine', but names are lower-case letters"),
        (made("clustered"), ValueError, "but so is subquad.methods.clustered.Clustered"),
        (made(traits=of_no_family()), ValueError, "it must be one of exact, clusters"),
    ],
)
def test_what_cannot_be_a_method_is_refused_by_its_name(cls, error, reason, unchecked):
    before = dict(sq.METHODS)
    with pytest.raises(error, match=reason):
        sq.register(cls)
    assert before == sq.METHODS


def test_the_module_of_a_method_without_a_package_is_recorded_and_named_where_it_is_missing():
    record = record_of(sq.register(made())())
    assert record[PROVIDERS]["mine"]["module"] == __name__
    assert sq.from_dict(record) == sq.parse_method("mine")
    del sq.METHODS["mine"]
    assert find_method("mine") is None
    record[PROVIDERS]["mine"] = {"module": "my_methods"}
    with pytest.raises(UnknownMethod, match="'mine' is not registered here: import 'my_methods'"):
        sq.from_dict(record)


@pytest.mark.parametrize("record", [3, ["mine"], {"mine": "theirs"}])
def test_a_damaged_record_of_packages_is_refused(record):
    with pytest.raises(ValueError, match="must map names to packages"):
        check_providers(record)


def test_methods_inside_of_others_are_recorded():
    @sq.register
    @dataclass(frozen=True)
    class Inner(sq.Local):
        name: ClassVar[str] = "inner-local"

    assert record_of(sq.parse_method("inner-local:window=3+keep:first=2"))[PROVIDERS].keys() == {"inner-local"}
    assert PROVIDERS in record_of(sq.parse_method("mixed-heads:methods=inner-local+full"))
    assert PROVIDERS not in record_of(sq.parse_method("mixed-heads:methods=local+full"))
    assert type(sq.parse_method("inner-local")) is Inner
