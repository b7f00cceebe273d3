"""Importing this file raises an ImportError with the remedy if a package that `sq.hf` needs is missing or too old."""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from subquad.core.errors import not_installed, too_old

LEAST = {"transformers": "5.17", "safetensors": "0.5"}  # as in the extra "hf" of pyproject.toml


def check(least: dict[str, str], extra: str) -> None:
    """Check that these packages, which an extra brings, are installed in these versions or later.

    Raises:
        ModuleNotFoundError: one is not installed.
        ImportError: one is older.
    """
    for package, lowest in least.items():
        if find_spec(package) is None:
            raise ModuleNotFoundError(not_installed(package, extra), name=package)
        try:
            installed = version(package)
        except PackageNotFoundError:  # a source tree in the path
            continue
        if _release(installed) < _release(lowest):
            raise ImportError(too_old(package, installed, lowest, extra), name=package)


def _release(text: str) -> list[int]:
    """The major and the minor number of a version."""
    return [int(number) for number in re.findall(r"\d+", text)[:2]]


check(LEAST, "hf")
