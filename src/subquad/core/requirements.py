"""The versions of other packages that subquad needs and those that it was tested with, as pyproject.toml declares them.

They are read from the metadata of the installed package. A checkout that is in the path without being installed has
none: then nothing is known, and nothing is refused.

Regular expressions read the lines: the package packaging would too, but `import subquad` needs torch and jaxtyping
alone, and neither of them brings it.
"""

import re
import warnings
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import NamedTuple

from subquad.core.entry_points import installed_version
from subquad.core.errors import not_installed, too_old

TESTED = "tested"  # the extra whose upper limits are the first versions that nobody tested


class Requirement(NamedTuple):
    """A version that a package must have."""

    package: str
    sign: str  # ">=", "<"
    release: str
    extra: str  # "" where every install needs it


def floors(extra: str = "") -> dict[str, str]:
    """The lowest version of each package that subquad, or one of its extras, needs."""
    return {each.package: each.release for each in _declared() if each.extra == extra and each.sign == ">="}


def untested() -> dict[str, str]:
    """The lowest version of each package that is newer than all versions that subquad was tested with."""
    return {each.package: each.release for each in _declared() if each.extra == TESTED and each.sign == "<"}


def check(packages: Iterable[str], extra: str = "") -> None:
    """Check that these packages, which an extra brings, are installed in versions that subquad runs with.

    A version that is newer than the tested ones gets a warning.

    Raises:
        ModuleNotFoundError: one is not installed.
        ImportError: one is too old.
    """
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(not_installed(package, extra), name=package)
        installed = installed_version(package)
        if installed is None:  # a source tree in the path
            continue
        least, limit = floors(extra).get(package), untested().get(package)
        if is_older(installed, least):
            raise ImportError(too_old(package, installed, str(least), extra), name=package)
        if is_untested(installed, limit):
            warnings.warn(
                f"{package} {installed} is installed, but subquad was tested with versions before {limit} only; if "
                f"something fails: pip install '{package}<{limit}'",
                stacklevel=2,
            )


def release(text: str) -> tuple[int, ...]:
    """The first three numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def is_older(installed: str, least: str | None) -> bool:
    """True if a version is below a floor; False if the floor is not known."""
    return least is not None and release(installed) < release(least)


def is_untested(installed: str, limit: str | None) -> bool:
    """True if a version is one that nobody tested; False if the limit is not known."""
    return limit is not None and release(installed) >= release(limit)


@cache
def _declared() -> tuple[Requirement, ...]:
    """The requirements in subquad's metadata, such as "torch>=2.9" or 'transformers<5.25; extra == "tested"'."""
    try:
        lines = requires("subquad") or []
    except PackageNotFoundError:
        return ()
    declared = []
    for line in lines:
        named, _, marker = line.partition(";")
        package = re.match(r"\s*([\w.-]+)", named)
        extra = re.search(r"""extra\s*==\s*["']([\w-]+)["']""", marker)
        for sign, version in re.findall(r"(>=|<(?!=))\s*([\d.]+)", named):
            declared.append(Requirement(package[1] if package else "", sign, version, extra[1] if extra else ""))
    return tuple(declared)
