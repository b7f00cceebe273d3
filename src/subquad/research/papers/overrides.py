"""Settings of a scale that the user changes: another model, task or size."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from subquad.core.errors import InputError
from subquad.research.training.settings import checked, read_overrides


def read_changes(texts: Sequence[str]) -> dict[str, Any]:
    """`setting=value`, each value as TOML writes it, or as plain text. InputError where one is not of that form."""
    for text in texts:
        name, equals, _ = text.partition("=")
        if not (equals and name.strip()):
            raise InputError(f"--set {text!r}: write setting=value, as in model=path/or/hub-id or seeds=[0,1]")
    return read_overrides([f"scale.{text.strip()}" for text in texts]).get("scale", {})


def changed(settings: Any, changes: Mapping[str, Any]) -> Any:
    """The settings, a frozen dataclass, with some of them changed.

    Raises:
        InputError: an unknown setting, or a value that does not fit; named.
    """
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    return checked(type(settings), values | dict(changes), "scale") if changes else settings


def as_options(changes: Mapping[str, Any]) -> list[str]:
    """The words of a command line that `read_changes` reads these from."""
    pairs = ((name, value if isinstance(value, str) else _toml(value)) for name, value in changes.items())
    return [word for name, value in pairs for word in ("--set", f"{name}={value}")]


def _toml(value: Any) -> str:
    """A value as TOML writes it inside of a line; numbers, texts and truth as JSON does."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_toml(inner)}' for name, inner in value.items())}}}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)
