"""Options of a command, defined once: fields of its settings, with the form of their command-line options."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from subquad.tools.runs.imports import as_options

S = TypeVar("S")


@dataclass(frozen=True)
class Option:
    """An option or argument of the command line, for one setting."""

    name: str  # without dashes, as Python writes it
    help: str
    kind: Any  # the type of the setting
    default: Any
    argument: bool = False  # True if it is given by its position
    envvar: str | None = None
    read: Callable[[str], Any] | None = None  # the reader of lists that are given as one text
    shown: str | None = None  # the default of such a list, as text
    reading: bool = False  # changes how results are read, not what is measured

    @property
    def is_list(self) -> bool:
        """True if it can be repeated: paths, or texts separated by spaces."""
        return get_origin(self.kind) is tuple and self.read is None

    @property
    def asked(self) -> tuple[Any, Any]:
        """The type on the command line, and the default there."""
        if self.is_list:
            return list[get_args(self.kind)[0]] | None, None  # type: ignore[misc]
        if self.read is not None:
            return (str, self.shown) if self.shown else (str | None, None)
        return self.kind, self.default

    def value(self, raw: Any) -> Any:
        """The setting from what the command line got, which is not None."""
        if self.is_list:
            is_path = get_args(self.kind)[0] is Path
            return tuple(raw) if is_path else tuple(word for text in raw for word in text.split())
        return raw if self.read is None else self.read(raw)

    @property
    def label(self) -> str:
        """The name on the command line."""
        return self.name if self.argument else f"--{self.name.replace('_', '-')}"

    def words(self, value: Any) -> list[str]:
        """The words of a command line that gives this value."""
        flag = self.label
        if value == self.default:
            return []
        if self.argument:
            return [str(value)]
        if isinstance(value, bool):
            return [flag]
        if self.is_list and get_args(self.kind)[0] is Path:
            return [word for path in value for word in (flag, str(path))]
        if isinstance(value, tuple):
            return [flag, (" " if self.is_list else ",").join(map(str, value))]
        return [flag, str(value).removesuffix(".0") if isinstance(value, float) else str(value)]


def option(default: Any, help: str, **fields: Any) -> Any:
    """A setting with an option; `fields` are those of `Option`. A setting without one is not for the command line."""
    return field(default=default, metadata={"help": help, **fields})


def options(settings: type) -> dict[str, Option]:
    """The options of some settings, by the setting."""
    kinds = get_type_hints(settings)
    return {
        f.name: Option(**({"name": f.name, "kind": kinds[f.name], "default": f.default} | f.metadata))
        for f in fields(settings)
        if f.metadata
    }


def from_arguments(settings: type[S], arguments: Mapping[str, Any], standard: Mapping[str, Any]) -> S:
    """Settings from what the command line got, by the names of the options; the rest is as in `standard`."""
    known = options(settings)
    values = {name: o.value(arguments[o.name]) for name, o in known.items() if arguments.get(o.name) is not None}
    return settings(**{**standard, **values})


def as_command(command: str, settings: Any, ranks: int = 1) -> str:
    """The line that asks for these settings, in one process or on several ranks."""
    known = options(type(settings))
    arguments_first = sorted(known, key=lambda name: not known[name].argument)
    words = [word for name in arguments_first for word in known[name].words(getattr(settings, name))]
    start = ["subquad"] if ranks == 1 else ["torchrun", "--nproc-per-node", str(ranks), "-m", "subquad"]
    return shlex.join([*start, command, *words, *as_options()])
