"""The lists of docs/reference/: every public class and function, for mkdocstrings to replace by its docstring."""

import inspect
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import subquad as sq
import subquad.audits
import subquad.distributed
import subquad.hf
import subquad.methods
import subquad.nn
from subquad.tools.models import demo

PLANNING = ("compare", "ModuleComparison", "plan", "Plan", "ModulePlan", "load_plan")
DEMO = {"encoder": demo.encoder, "decoder": demo.decoder}


def public(module: ModuleType) -> dict[str, Any]:
    """The public classes and functions of a module, by name; an alias of another one is left out."""
    found = {name: getattr(module, name) for name in module.__all__}
    return {
        name: what
        for name, what in found.items()
        if (inspect.isclass(what) or inspect.isfunction(what)) and what.__name__ == name
    }


def entries(things: Mapping[str, Any], prefix: str, *, members: bool = True) -> str:
    """One entry per class or function, headed by the name under which a user calls it; functions come first."""
    lines = []
    for name, what in sorted(things.items(), key=lambda thing: inspect.isclass(thing[1])):
        options = f"heading: {prefix}.{name}" + ("" if members else ", members: false")
        lines += [f"::: {what.__module__}.{what.__qualname__}", f"    options: {{{options}}}", ""]
    return "\n".join(lines).rstrip()


def without(things: Mapping[str, Any], *others: Iterable[str]) -> dict[str, Any]:
    """The things that are not named in the others."""
    named = {name for names in others for name in names}
    return {name: what for name, what in things.items() if name not in named}


def pages() -> dict[str, str]:
    """The entries of each page of the reference."""
    audits, methods = public(subquad.audits), public(subquad.methods)
    classes = {method.__name__: method for method in sq.METHODS.values()}
    planning = {name: getattr(sq, name) for name in PLANNING}
    return {
        "attention": entries(without(public(sq), audits, methods, planning), "sq"),
        "methods": f"{entries(without(methods, classes), 'sq')}\n\n{entries(classes, 'sq', members=False)}",
        "nn": entries(public(subquad.nn), "sq.nn"),
        "parallel": entries(public(subquad.distributed), "sq.distributed"),
        "hf": entries(public(subquad.hf), "sq.hf"),
        "planning": f"{entries(planning, 'sq')}\n\n{entries(DEMO, 'demo')}",
        "audits": entries(audits, "subquad.audits"),
    }
