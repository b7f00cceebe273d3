"""The methods by name, and the ways to name one: a name, a text with settings, plain data."""

from collections.abc import Mapping
from typing import Any

from subquad.methods.base import METHODS, Method
from subquad.spelling import instead


def list_methods() -> list[str]:
    """The names of all methods, by families.

    >>> list_methods()  # doctest: +NORMALIZE_WHITESPACE
    ['full', 'oracle-top', 'shared-full', 'synthesizer', 'clustered', 'clustered-tail', 'i-clustered',
     'cluster-former', 'lha', 'lha-tail', 'lsh', 'reformer', 'routing', 'sinkhorn', 'smyrf', 'adaptive-span', 'local',
     'learned-feature-map', 'linear', 'performer', 'rfa', 'linformer', 'nystrom', 'probsparse', 'tilted-pool',
     'by-length', 'mixed-heads']
    """
    return list(METHODS)


def resolve(method: str | Method) -> Method:
    """A method object from a name or a method object. ValueError names the nearest known name."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise TypeError(f"`method` is a name or a method object, got {type(method).__name__}")
    return parse_method(method)


def parse_method(text: str) -> Method:
    """Read a method as the command line writes it: a name, or `name:setting=value,…`.

    >>> parse_method("i-clustered:clusters=25,topk=16")
    ImprovedClustered(clusters=25, bits=63, iterations=10, topk=16, seed=0, space='queries', refine=0)
    """
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        setting, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: write settings as {name}:setting=value, not {part!r}")
        settings[setting.strip()] = _read_value(_class(name), setting.strip(), value.strip())
    return _class(name).from_settings(settings)


def from_dict(data: Mapping[str, Any]) -> Method:
    """The inverse of `Method.to_dict`.

    >>> from_dict({"name": "clustered", "clusters": 25})
    Clustered(clusters=25, bits=63, iterations=10, seed=0, space='queries', refine=0)
    """
    settings = dict(data)
    if "name" not in settings:
        raise ValueError(f"a method as a dict needs its 'name'; got {sorted(settings)}")
    return _class(settings.pop("name")).from_settings(settings)


_KINDS = {int: "a whole number", float: "a number"}


def _class(name: str) -> type[Method]:
    if name not in METHODS:
        raise ValueError(f"no method {name!r}{instead(name, METHODS, '`subquad methods` lists')}")
    return METHODS[name]


def _read_value(cls: type[Method], setting: str, text: str) -> Any:
    default = cls.defaults().get(cls.former.get(setting, setting), text)
    kind: type = type(default)
    try:
        return kind(text)
    except ValueError:
        raise ValueError(
            f"{cls.name!r}: {setting}={text!r} is not {_KINDS.get(kind, kind.__name__)} (default: {default})"
        ) from None
