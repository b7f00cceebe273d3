"""Settings of methods: the fields of a frozen dataclass, whose rules are declared with the field and checked here."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from subquad.core.spelling import instead

FEW = 1024  # a setting up to this costs little, however few tokens there are
MOST_REPEATS = 1000  # of rounds and iterations
WIDEST = 2**16  # of learned layers and feature maps


def whole(
    default: int,
    *,
    least: int = 0,
    most: int | None = None,
    beyond: str = "",
    clamped: bool = False,
    counts: bool = False,
    flag: bool = False,
) -> Any:
    """Declare a whole number.

    Args:
        default: the setting where none is given.
        least: the smallest that it may be.
        most: the largest, for settings that size parameters or set how often work is repeated.
        beyond: the reason for `most`, if the message should state more than the number.
        clamped: a value above the number of tokens means that number.
        counts: it is the number of parts of the tokens, so far more parts than tokens are refused.
        flag: 1 where a text names it without a value.
    """
    rule = {"least": least, "most": most, "beyond": beyond or f"it must be at most {most}"}
    return field(default=default, metadata=rule | {"clamped": clamped, "counts": counts, "flag": flag})


def number(default: float, *, least: float) -> Any:
    """Declare a finite number of at least `least`."""
    return field(default=default, metadata={"least": least})


def choice(*words: str, default: str | None = None) -> Any:
    """Declare a choice of words; the first is the default unless another is named."""
    return field(default=words[0] if default is None else default, metadata={"choices": words})


def text_of_methods(default: str, *, examples: tuple[str, ...]) -> Any:
    """Declare a text of several methods, which is the only setting of its method; `examples` are such texts."""
    return field(default=default, metadata={"examples": examples, "text": True})


def explained(method: type) -> dict[str, str]:
    """The description of each setting of a method, one line each, from the docstring of its class.

    >>> from subquad.methods import METHODS
    >>> explained(METHODS["linear"])
    {'feature_map': '"elu" (elu(x) + 1), "exp" or "softmax".'}
    """
    args = re.search(r"^Args:\n((?:(?: .*)?\n?)*)", inspect.getdoc(method) or "", re.MULTILINE)
    entries = re.findall(r"^    (\w+(?:, \w+)*): ((?:.*\n?)(?:^     +.*\n?)*)", args[1] if args else "", re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


S = TypeVar("S", bound="Settings")


@dataclass(frozen=True)
class Settings:
    """The settings of a method, under its name: checked when it is made, and turned into plain data and back."""

    name: ClassVar[str]
    _ruled: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # the settings whose fields are marked "clamped", "counts", …

    def __init_subclass__(cls) -> None:
        # Kept by class, because torch.compile cannot trace `dataclasses.fields`.
        rules = {name: field.metadata for name, field in vars(cls).items() if isinstance(field, Field)}
        cls._ruled = {
            rule: (*cls._ruled.get(rule, ()), *(name for name, metadata in rules.items() if metadata.get(rule)))
            for rule in ("clamped", "counts", "flag", "text")
        }

    def __new__(cls, *values: Any, **settings: Any) -> Any:
        """Raise TypeError for an unknown setting, with the nearest known one, before the dataclass does without."""
        for name in settings:
            if name not in cls.__match_args__:
                raise TypeError(cls.unknown(name))
        return super().__new__(cls)

    @property
    def label(self) -> str:
        """The method in refusals: its name, or what else tells it from the method that refuses nothing."""
        return self.name

    @property
    def default_seed(self) -> int:
        """The seed of a call without a seed: the field `seed`, if the method has one."""
        return getattr(self, "seed", 0)

    def check_fields(self) -> None:
        """Raise ValueError for a setting with a value that its field does not allow."""
        for setting in fields(self):
            have, rule = getattr(self, setting.name), setting.metadata
            wanted = _wanted(have, type(setting.default), rule.get("least"), rule.get("choices"))
            if wanted is None and rule.get("most") is not None and have > rule["most"]:
                wanted = rule["beyond"]
            if wanted is not None:
                shown = have if wanted == rule.get("beyond") else repr(have)
                raise ValueError(f"{self.name!r}: {setting.name}={shown}, but {wanted}")

    def to_dict(self) -> dict[str, Any]:
        """Name and settings as plain data: `{"name": "clustered", "clusters": 100, …}`."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_settings(cls: type[S], settings: Mapping[str, Any]) -> S:
        """Build a method from some settings. ValueError names an unknown setting and the nearest known one."""
        for name in settings:
            if name not in cls.__match_args__:
                raise ValueError(cls.unknown(name))
        return cls(**settings)

    @classmethod
    def unknown(cls, setting: str) -> str:
        """The message about a setting that the method does not have."""
        remedy = instead(setting, cls.__match_args__, f"`subquad methods {cls.name}` lists", "it has")
        return f"{cls.name!r} has no setting {setting!r}{remedy}"

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The settings and their defaults."""
        # Not `dataclasses.fields`, which torch.compile cannot trace on a class: it would refuse methods given as text.
        names: tuple[str, ...] = cls.__match_args__
        return {name: getattr(cls, name) for name in names}

    @classmethod
    def is_text(cls) -> bool:
        """True if the only setting is a text of other methods."""
        return bool(cls._ruled["text"])

    @classmethod
    def is_flag(cls, setting: str) -> bool:
        """True if a setting is 1 where a text names it without a value."""
        return setting in cls._ruled["flag"]

    def __str__(self) -> str:
        """The method as on the command line, with the settings that differ from the defaults."""
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    def check_counts(self, N: int, M: int) -> None:
        """Raise ValueError if tokens would be divided into far more parts than there are tokens."""
        for setting in self._ruled["counts"]:
            have = getattr(self, setting)
            # A small setting is not compared with a length, which is symbolic while a compiler traces.
            if have > FEW and have > max(N, M):
                raise ValueError(
                    f"{self.name!r}: {setting}={have} for {int(max(N, M))} tokens, but it must be at most "
                    f"{max(FEW, int(N), int(M))} there"
                )

    def clamped_to(self: S, N: int, M: int) -> S:
        """Return the method for N queries and M keys, with settings that exceed these numbers reduced to them."""
        beyond = [s for s in self._ruled["clamped"] if getattr(self, s) > FEW and getattr(self, s) > max(N, M)]
        return replace(self, **{setting: int(max(N, M)) for setting in beyond}) if beyond else self


def _wanted(have: Any, kind: type, least: int | float | None, choices: tuple[str, ...] | None) -> str | None:
    """The requirement that a setting does not meet; None if it does."""
    if choices is not None:
        fits = have in choices and not isinstance(have, bool)
        return None if fits else f"it must be one of {', '.join(map(repr, choices))}"
    if least is None:
        return None
    if kind is int:
        fits = isinstance(have, int) and not isinstance(have, bool) and have >= least
        return None if fits else f"it must be a whole number ≥ {least}"
    fits = isinstance(have, int | float) and not isinstance(have, bool) and math.isfinite(have) and have >= least
    return None if fits else f"it must be a number ≥ {least:g}"
