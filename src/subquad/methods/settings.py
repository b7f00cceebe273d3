"""Settings of methods: the allowed values are declared with the field and checked here."""

import inspect
import math
import re
from dataclasses import field, fields
from typing import Any

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
    former: str | None = None,
) -> Any:
    """Declare a whole number.

    Args:
        default: the setting where none is given.
        least: the smallest that it may be.
        most: the largest, for settings that size parameters or say how often work is repeated.
        beyond: why not more, where the message should say more than the number.
        clamped: more than there are tokens means as many as there are.
        counts: it says into how many parts the tokens go, so far more parts than tokens are refused.
        former: the name that it had in earlier versions, under which it is still read.
    """
    rule = {"least": least, "most": most, "beyond": beyond or f"it must be at most {most}"}
    return field(default=default, metadata=rule | {"clamped": clamped, "counts": counts, "former": former})


def number(default: float, *, least: float) -> Any:
    """Declare a finite number of at least `least`."""
    return field(default=default, metadata={"least": least})


def choice(*words: str, default: str | None = None) -> Any:
    """Declare a choice of words; the first is the default unless another is named."""
    return field(default=words[0] if default is None else default, metadata={"choices": words})


def explained(method: type) -> dict[str, str]:
    """What the docstring of a method's class says of each setting, under `Args:`, each in one line.

    >>> from subquad.methods import METHODS
    >>> explained(METHODS["linear"])
    {'feature_map': '"elu" (elu(x) + 1), "exp" or "softmax".'}
    """
    args = re.search(r"^Args:\n((?:(?: .*)?\n?)*)", inspect.getdoc(method) or "", re.MULTILINE)
    entries = re.findall(r"^    (\w+(?:, \w+)*): ((?:.*\n?)(?:^     +.*\n?)*)", args[1] if args else "", re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def check(method: Any) -> None:
    """Raise ValueError for a setting with a value that its field does not allow."""
    for setting in fields(method):
        have, rule = getattr(method, setting.name), setting.metadata
        wanted = _wanted(have, type(setting.default), rule.get("least"), rule.get("choices"))
        if wanted is None and rule.get("most") is not None and have > rule["most"]:
            wanted = rule["beyond"]
        if wanted is not None:
            shown = have if wanted == rule.get("beyond") else repr(have)
            raise ValueError(f"{method.name!r}: {setting.name}={shown}, but {wanted}")


def _wanted(have: Any, kind: type, least: int | float | None, choices: tuple[str, ...] | None) -> str | None:
    """What a setting must be and is not; None where it is."""
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
