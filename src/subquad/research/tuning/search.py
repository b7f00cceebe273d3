"""The settings that are searched: `--search table.setting=values`, read and checked before anything is trained.

training.learning_rate=1e-4:1e-2:log      a range, on a logarithmic scale
training.batch=8:32:8                     a range of whole numbers, every eighth
method.clusters=16,32,64                  choices; of the setting of a method
method=['full', 'i-clustered:clusters=25,topk=16']   choices that hold commas, as TOML writes a list
"""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from subquad.core.errors import InputError, as_input_error
from subquad.core.spelling import instead
from subquad.methods import parse_method
from subquad.methods.core.names import name_of
from subquad.research.training.settings import RunSettings, read_overrides, settings_of

METHOD = "method"  # searched as a whole; "method.clusters" is a setting of the method
TABLES = (METHOD, "task", "model", "training")
DIGITS = 6  # of a value that is drawn, so that a command can name it exactly
EXAMPLE = "--search training.learning_rate=1e-4:1e-2:log or --search method.clusters=16,32,64"

Value = str | int | float


@dataclass(frozen=True)
class Searched:
    """A setting with the values that it may have: choices, or a range with both ends."""

    name: str
    text: str  # as it was given
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """Values that must fit for all to fit, as texts."""
        return self.choices or (self.shown(self.low), self.shown(self.high))

    @property
    def points(self) -> list[Value] | None:
        """All values, in their order; None where they are not counted."""
        if self.choices:
            return list(self.choices)
        if not self.whole or self.log:
            return None
        return list(range(int(self.low), int(self.high) + 1, int(self.step or 1)))

    def shown(self, value: Value) -> str:
        """A value as text, which `--set` reads."""
        return value if isinstance(value, str) else str(int(value)) if self.whole else f"{value:.{DIGITS}g}"

    def suggested(self, trial: Any) -> None:
        """Have Optuna choose the value of a trial."""
        if self.choices:
            trial.suggest_categorical(self.name, list(self.choices))
        elif self.whole:
            trial.suggest_int(self.name, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)
        else:
            trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)


@dataclass(frozen=True)
class Base:
    """The run that a search starts from: a task, and tables of settings over its defaults."""

    task: str
    fixed: tuple[Mapping[str, Mapping[str, Any]], ...] = ()

    def at(self, values: Mapping[str, str]) -> RunSettings:
        """The settings with these values in their places. InputError where one does not fit."""
        return settings_of(self.task, *self.fixed, self.tables(values))

    def tables(self, values: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Tables of the values alone."""
        tables = read_overrides([f"{name}={value}" for name, value in values.items() if not _is_of_method(name)])
        if any(map(_is_of_method, values)):
            tables.setdefault("model", {})[METHOD] = self.method_at(values)
        return tables

    def method_at(self, values: Mapping[str, str]) -> str:
        """The text of the method with these values."""
        text = values.get(METHOD) or self._method()
        settings = [f"{name.partition('.')[2]}={value}" for name, value in values.items() if name.startswith("method.")]
        if not settings:
            return text
        if name_of(text) == "sum":
            raise InputError(f"--search {METHOD}.{settings[0]} is of one method, but the method is the sum {text!r}")
        fixed = METHOD in values or any(METHOD in source.get("model", {}) for source in self.fixed)
        with as_input_error("" if fixed else f"--search {METHOD}.{settings[0]}, and no --method is given: "):
            return str(parse_method(f"{text}{',' if ':' in text else ':'}{','.join(settings)}"))

    def _method(self) -> str:
        """The method of all layers, without what is searched."""
        method = settings_of(self.task, *self.fixed).model.method
        if not isinstance(method, str):
            raise InputError(f"--search {METHOD}.… is of one method, but the layers have {len(method)} of their own")
        return method


def _is_of_method(name: str) -> bool:
    return name.partition(".")[0] == METHOD


def read_searches(texts: Sequence[str], base: Base) -> list[Searched]:
    """Return the settings that are searched.

    Raises:
        InputError: nothing is, a text is not of the form, a range is upside down, a setting is unknown, given twice or
            given by `--set` too, or has a value that does not fit.
    """
    if not texts:
        raise InputError(f"nothing to search: give {EXAMPLE}")
    searched = list(map(_read, texts))
    for i, one in enumerate(searched):
        if one.name in {other.name for other in searched[:i]}:
            raise InputError(f"--search {one.text}: {one.name} is searched twice")
        _check_not_fixed(one, base)
    first = {one.name: one.ends[0] for one in searched}
    _check_methods(searched, first, base)
    return [_checked(one, first, base) for one in searched]


def _read(text: str) -> Searched:
    """One text, as far as it can be read without the settings."""
    name, equals, values = (part.strip() for part in text.partition("="))
    name = METHOD if name == "model.method" else name
    table, dot, setting = name.partition(".")
    if not equals or not values or (name != METHOD and not (dot and setting)):
        raise InputError(f"--search {text!r}: write table.setting=values, as in {EXAMPLE}")
    if table not in TABLES:
        raise InputError(f"--search {text}: no table {table!r}{instead(table, TABLES, '')}")
    ends = _range(text, values)
    if ends is not None:
        return replace(ends, name=name)
    choices = tuple(dict.fromkeys(_choices(text, values)))
    if len(choices) < 2:
        raise InputError(
            f"--search {text}: {values!r} is one value, which leaves nothing to search; a range is LOW:HIGH, and "
            "choices are A,B,C"
        )
    return Searched(name, text, choices)


def _range(text: str, values: str) -> Searched | None:
    """LOW:HIGH, LOW:HIGH:log or LOW:HIGH:STEP; None where it is not of that form."""
    parts = values.split(":")
    ends = [_number(part) for part in parts[:2]]
    if not 2 <= len(parts) <= 3 or ends[0] is None or ends[1] is None:
        return None
    low, high, log = ends[0], ends[1], parts[2:] == ["log"]
    step = None if log or len(parts) < 3 else _number(parts[2])
    if len(parts) == 3 and not log and (step is None or not 0 < step <= high - low) and low < high:
        raise InputError(f"--search {text}: {parts[2]!r} is neither log nor a step of at most {high - low:g}")
    if not low < high:
        raise InputError(f"--search {text}: the range from {low:g} to {high:g} is upside down or empty")
    if log and low <= 0:
        raise InputError(f"--search {text}: a logarithmic range begins above 0, not at {low:g}")
    return Searched("", text, low=low, high=high, step=step, log=log)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _choices(text: str, values: str) -> list[str]:
    """Values that are separated by commas, or a list as TOML writes it."""
    if not values.startswith("["):
        return [value.strip() for value in values.split(",") if value.strip()]
    try:
        listed = tomllib.loads(f"value = {values}")["value"]
    except (ValueError, RecursionError):
        raise InputError(f"--search {text}: write a list as TOML does, ['full', 'lsh:buckets=4']") from None
    return [value if isinstance(value, str) else json.dumps(value) for value in listed]


def _check_not_fixed(one: Searched, base: Base) -> None:
    """InputError if --set, --method or the file of settings sets what is searched."""
    table, _, name = ("model", "", METHOD) if one.name == METHOD else one.name.partition(".")
    for source in base.fixed:
        if table != METHOD and name in source.get(table, {}):
            raise InputError(f"{one.name} is searched by --search {one.text}, and given as {source[table][name]!r} too")


def _check_methods(searched: Sequence[Searched], first: Mapping[str, str], base: Base) -> None:
    """InputError where a method that is searched lacks a setting that is searched."""
    methods = next((one.choices for one in searched if one.name == METHOD), ())
    for method in methods:
        base.at({**first, METHOD: method})


def _checked(one: Searched, first: Mapping[str, str], base: Base) -> Searched:
    """Check the ends as values of the setting, and note of a range whether it is of whole numbers."""
    if one.choices:
        for choice in one.choices:
            base.at({**first, one.name: choice})
        return one
    kind = _kind(one, base.at({**first, one.name: _plain(one.low)}), base, first)
    if kind not in (int, float):
        raise InputError(f"--search {one.text}: {one.name} is not a number; separate its values by commas")
    if kind is int and not all(float(value).is_integer() for value in (one.low, one.high, one.step or 1)):
        raise InputError(f"--search {one.text}: {one.name} is a whole number")
    one = replace(one, whole=kind is int)
    base.at({**first, one.name: one.ends[1]})
    return one


def _kind(one: Searched, settings: RunSettings, base: Base, first: Mapping[str, str]) -> type:
    """The type of a setting, as it is with the low end."""
    table, _, name = one.name.partition(".")
    if table == METHOD:
        return type(getattr(parse_method(base.method_at({**first, one.name: _plain(one.low)})), name))
    return type(getattr(getattr(settings, table), name))


def _plain(value: float) -> str:
    return str(int(value)) if value.is_integer() else f"{value:.{DIGITS}g}"


def all_points(searched: Sequence[Searched], most: int) -> list[dict[str, Value]] | None:
    """Every point of the search; None where there are more than `most`, or no end of them."""
    axes = [one.points for one in searched]
    if any(axis is None for axis in axes) or math.prod(len(axis or ()) for axis in axes) > most:
        return None
    names = [one.name for one in searched]
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*(axis or () for axis in axes))]
