"""The commands, found by their folders: each folder of `tools` and `research` with a `command.py` registers its own.

A `command.py` defines `COMMAND`: the function that typer calls, its place in `subquad --help`, and the kinds of records
that it leaves. So a new command is a new folder, and without the folder `research` the other commands still run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from subquad.tools.cli.kinds import Kind
from subquad.tools.runs.options import as_command

PACKAGES = ("subquad.tools", "subquad.research")


@dataclass(frozen=True)
class Command:
    """The command that a folder registers."""

    run: Callable[..., None]
    position: int  # in the list of commands
    kinds: tuple[Kind, ...] = ()
    settings: Any = None  # the class of its settings, if its options are theirs


@cache
def commands() -> tuple[Command, ...]:
    """The registered commands, in the order of `subquad --help`."""
    registered = (import_module(name).COMMAND for name in _modules())
    return tuple(sorted(registered, key=lambda command: command.position))


def kinds() -> tuple[Kind, ...]:
    """The kinds of records of all commands."""
    return tuple(kind for command in commands() for kind in command.kinds)


def settings_class(name: str) -> Any:
    """The class of the settings of a command."""
    return next(command.settings for command in commands() if command.run.__name__ == name)


def command_line(name: str, ranks: int, **fields: Any) -> str:
    """The line that calls a command with these fields of its settings, in one process or on several ranks."""
    return as_command(name, settings_class(name)(**fields), ranks)


def _modules() -> Iterator[str]:
    """The names of the modules that register a command."""
    for package in PACKAGES:
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for module in iter_modules([folder]):
                if (Path(folder) / module.name / "command.py").is_file():
                    yield f"{package}.{module.name}.command"
