"""Methods of other packages: how they are registered, found by their names, and named in files.

A package declares its methods in the entry points `subquad.methods`, which are loaded when a name is not known or when
all methods are listed. Any module can call `register`; those that the environment variable `SUBQUAD_IMPORT` lists,
separated by commas, are imported first.
"""

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any, TypeVar

import torch

from subquad.core import entry_points
from subquad.methods.core import registry
from subquad.methods.core.method import METHODS, Method
from subquad.methods.core.traits import FAMILIES, Traits

GROUP = "subquad.methods"
IMPORTED = "SUBQUAD_IMPORT"
PROVIDERS = "provided-by"  # in the record of a method: where the methods of other packages in it come from
M = TypeVar("M", bound=type[Method])


class UnknownMethod(ValueError):
    """No method of this name is registered."""


def register(cls: M) -> M:
    """Register a method of another package, as a decorator above `@dataclass(frozen=True)`.

    Its name then works wherever subquad accepts one: `sq.attention`, `sq.hf.swap`, files and the command line.

    Raises:
        TypeError: it is not a frozen dataclass derived from `sq.Method` with `name` and `traits`.
        ValueError: its name is not made of lower-case letters, digits and hyphens, or another method has it.
    """
    label = f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}"
    if not isinstance(cls, type) or not issubclass(cls, Method) or "__dataclass_params__" not in vars(cls):
        raise TypeError(f"{label} is not a dataclass derived from sq.Method: write @dataclass(frozen=True) above it")
    if not isinstance(getattr(cls, "name", None), str) or not isinstance(getattr(cls, "traits", None), Traits):
        raise TypeError(f"{label} has no `name`, a text, or no `traits`, an sq.Traits")
    if not re.fullmatch("[a-z][a-z0-9-]*", cls.name):
        raise ValueError(f"{label} is called {cls.name!r}, but names are lower-case letters, digits and hyphens")
    if cls.traits.family not in FAMILIES:
        raise ValueError(f"{label} has the family {cls.traits.family!r}, but it must be one of {', '.join(FAMILIES)}")
    other = METHODS.get(cls.name, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):  # else the module was reloaded
        raise ValueError(
            f"{label} is called {cls.name!r}, but so is {other.__module__}.{other.__qualname__}; rename one of them"
        )
    registry.register(METHODS, cls)
    return cls


def find_method(name: str) -> type[Method] | None:
    """The class of a method by its name, of other packages too; None if there is none.

    Raises:
        BrokenPlugin: a package declares a method of this name, but it cannot be loaded; names the package.
        UnknownMethod: the name is not known yet while torch.compile traces, when files cannot be read.
    """
    if name in METHODS:
        return METHODS[name]
    if torch.compiler.is_compiling():
        raise UnknownMethod(
            f"no method {name!r} is registered yet, and packages are not searched while torch.compile traces: call "
            f"sq.parse_method({name!r}) before"
        )
    import_modules(listed_modules())
    if name not in METHODS:
        for entry in entry_points.entries(GROUP):
            if entry.name == name:
                _register_entry(entry)
    return METHODS.get(name)


def all_methods() -> dict[str, type[Method]]:
    """All methods by name, of other packages too. A method that cannot be loaded is left out, with a warning."""
    import_modules(listed_modules())
    for entry in entry_points.entries(GROUP):
        try:
            _register_entry(entry)
        except entry_points.BrokenPlugin as error:
            warnings.warn(str(error), stacklevel=2)
    return dict(METHODS)


def _register_entry(entry: EntryPoint) -> None:
    """Register what an entry point names. BrokenPlugin names the package if that is not possible."""
    cls = entry_points.load(entry)
    try:
        register(cls)
    except (TypeError, ValueError) as error:
        raise entry_points.broken(entry, str(error)) from error
    if cls.name != entry.name:
        raise entry_points.broken(entry, f"the name of {entry.value} is {cls.name!r}: the two must be equal")


# ---------------------------------------------------------------------- modules that register methods


def listed_modules() -> tuple[str, ...]:
    """The modules that `SUBQUAD_IMPORT` lists."""
    return tuple(name.strip() for name in os.environ.get(IMPORTED, "").split(",") if name.strip())


@cache
def import_modules(names: tuple[str, ...]) -> None:
    """Import the modules that register methods. BrokenPlugin names the one that cannot be imported."""
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            raise entry_points.BrokenPlugin(
                f"the module {name!r} of --import ({IMPORTED}) cannot be imported: {type(error).__name__}: {error}"
            ) from error


def outside_modules() -> list[str]:
    """The modules that define the registered methods of other packages."""
    return sorted({cls.__module__ for cls in _outside().values()})


def _outside() -> dict[str, type[Method]]:
    return {name: cls for name, cls in METHODS.items() if not cls.__module__.startswith("subquad.")}


# ---------------------------------------------------------------------- files


def record_of(method: Method) -> dict[str, Any]:
    """A method as files record it: `to_dict`, with the packages that provide it if these are other ones."""
    outside = _outside()
    names = sorted(set(re.findall("[a-z][a-z0-9-]*", str(method))) & outside.keys()) if outside else []
    return method.to_dict() | ({PROVIDERS: {name: dict(_provider(outside[name])) for name in names}} if names else {})


def _provider(cls: type[Method]) -> Iterator[tuple[str, str]]:
    """The module of a class, and the package and version that it is from if it is installed."""
    yield "module", cls.__module__
    declared = next((e.dist for e in entry_points.entries(GROUP) if e.name == cls.name and e.dist is not None), None)
    package = entry_points.package_of(cls.__module__) if declared is None else declared.name
    if package is not None:
        yield "package", package
        yield "version", entry_points.installed_version(package) or ""


def check_providers(record: object) -> None:
    """UnknownMethod if methods in a record are not registered here; names the package that provides them."""
    if not isinstance(record, Mapping) or not all(isinstance(source, Mapping) for source in record.values()):
        raise ValueError(f"{PROVIDERS!r} of a method must map names to packages, got {str(record)[:50]!r}")
    for name, source in record.items():
        if find_method(name) is None:
            raise UnknownMethod(_remedy(name, source))


def _remedy(name: str, source: Mapping[str, Any]) -> str:
    """The remedy for a method that is not registered here."""
    package, module = source.get("package"), source.get("module")
    if package is None:
        return f"the method {name!r} is not registered here: import {module!r}, the module that registers it"
    here = entry_points.installed_version(package)
    if here is None:
        return (
            f"the method {name!r} is from the package {package!r} {source.get('version', '')}, which is not installed "
            f"here: pip install {package}"
        )
    return (
        f"the method {name!r} is from the package {package!r} {source.get('version', '')}, but version {here}, the one "
        f"that is installed here, does not declare it: import {module!r}, or install that version"
    )
