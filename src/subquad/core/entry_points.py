"""Objects that other packages add to subquad by declaring them in groups of entry points."""

from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, packages_distributions, version
from typing import Any


class BrokenPlugin(ValueError):
    """Raised if an object that another package declares cannot be loaded or used; the message names the package."""


@cache
def entries(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group, of all packages that are installed when it is first asked for."""
    return tuple(entry_points(group=group))


def load(entry: EntryPoint) -> Any:
    """The object of an entry point. BrokenPlugin, with its cause, if that cannot be imported."""
    try:
        return entry.load()
    except Exception as error:
        raise broken(entry, f"loading {entry.value} failed: {type(error).__name__}: {error}") from error


def broken(entry: EntryPoint, reason: str) -> BrokenPlugin:
    """The error for an entry point that cannot be used."""
    package = "an unnamed package" if entry.dist is None else f"the package {entry.dist.name} {entry.dist.version}"
    return BrokenPlugin(
        f"{package} declares {entry.name!r} in the entry points {entry.group!r}, but {reason}; repair or uninstall it"
    )


def installed_version(package: str) -> str | None:
    """The version of a package that is installed here; None if it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def package_of(module: str) -> str | None:
    """The name of the installed package that a module belongs to; None if it belongs to none."""
    names = packages_distributions().get(module.partition(".")[0])
    return names[0] if names else None
