"""The ways to name a method: its name, a text with settings, plain data."""

import re
from collections.abc import Mapping
from typing import Any

from subquad.core.spelling import instead
from subquad.methods.core.bound_method import BoundMethod
from subquad.methods.core.grammar import MISSING, bare, settings, terms
from subquad.methods.core.method import Method
from subquad.methods.core.plugins import PROVIDERS, UnknownMethod, all_methods, check_providers, find_method


def list_methods() -> list[str]:
    """The names of all methods, by family, including those of other packages.

    >>> list_methods()  # doctest: +NORMALIZE_WHITESPACE
    ['full', 'oracle-top', 'shared-full', 'synthesizer', 'clustered', 'clustered-tail', 'i-clustered',
     'cluster-former', 'lha', 'lha-tail', 'lsh', 'reformer', 'routing', 'sinkhorn', 'smyrf', 'adaptive-span', 'bigbird',
     'fixed', 'keep', 'local', 'logsparse', 'longformer', 'strided', 'learned-feature-map', 'linear', 'performer',
     'rfa', 'linformer', 'nystrom', 'probsparse', 'tilted-pool', 'by-length', 'mixed-heads', 'sum']
    """
    return list(all_methods())


def resolve(method: str | Method) -> Method:
    """The method object of a name; method objects are returned as they are. ValueError names the nearest known name."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        if isinstance(method, type):
            raise TypeError(f"`method` is a name or a method object, got the class {method.__name__}; give an instance")
        if isinstance(method, BoundMethod):
            raise TypeError(
                f"`method` is a name or a method object, got the bound method {method.method}; call it, "
                "bound(query, key, value), or give its `method`, which has no learned parameters"
            )
        raise TypeError(f"`method` is a name or a method object, got {type(method).__name__}")
    return parse_method(method)


def parse_method(text: str) -> Method:
    """Read a method as the command line writes it: a name, `name:setting=value,…`, or several with `+` between them.

    >>> parse_method("i-clustered:clusters=25,topk=16").to_dict()["topk"]
    16
    >>> parse_method("local:window=32+keep:first")
    Sum(terms='local:window=32+keep')
    """
    text = bare(text)
    if text.endswith("+") and "=" not in terms(text)[-1]:  # not the value of a setting, such as "favor++"
        raise ValueError(f"{text!r}: {MISSING}")
    name, _, setting_text = text.partition(":")
    if name_of(text) == "sum" != name:
        return _class("sum").from_settings({"terms": text})
    cls = find_method(name)
    is_text = cls is not None and cls.is_text()
    values: dict[str, Any] = {}
    for part in filter(None, [setting_text] if is_text else settings(setting_text)):
        setting, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and _class(name).is_flag(setting):
            value = "1"
        elif not equals:
            raise ValueError(f"{text!r}: write settings as {name}:setting=value, not {part!r}")
        if setting in values:
            raise ValueError(f"{text!r} sets {setting} twice; give it once")
        values[setting] = _read_value(_class(name), setting, value)
    return _class(name).from_settings(values)


def name_of(text: str) -> str:
    """The name of the method that a text begins with; "sum" where there are several with `+` between them.

    >>> name_of("clustered:clusters=25"), name_of("local:window=32+keep:first")
    ('clustered', 'sum')
    """
    name = re.split("[:@ +]", text.lstrip(" ("))[0]
    cls = find_method(name)
    is_text = cls is not None and cls.is_text()
    return "sum" if not is_text and len(terms(text)) > 1 else name


def from_dict(data: Mapping[str, Any]) -> Method:
    """The method that a dict of `Method.to_dict` describes.

    >>> from_dict({"name": "clustered", "clusters": 25})
    Clustered(clusters=25, bits=63, iterations=10, seed=0, ..., block=0, last=128, queries='rectangle')
    """
    if not isinstance(data, Mapping):
        raise TypeError(
            f"a method as plain data is a dict with its 'name', got {type(data).__name__}; for a text such as "
            "'local:window=32' use sq.parse_method"
        )
    settings = dict(data)
    if PROVIDERS in settings:
        check_providers(settings.pop(PROVIDERS))
    if "name" not in settings:
        raise ValueError(f"a method as a dict needs its 'name'; got {sorted(settings)}")
    return _class(settings.pop("name")).from_settings(settings)


_KINDS = {int: "a whole number", float: "a number"}


def _class(name: str) -> type[Method]:
    cls = find_method(name)
    if cls is None:
        begin, *others = re.split("[ ,=]+", name, maxsplit=1)
        if others and find_method(begin) is not None:
            raise UnknownMethod(f"no method {name!r}; write settings after a colon, {begin}:setting=value,…")
        raise UnknownMethod(f"no method {name!r}{instead(name, all_methods(), '`subquad methods` lists')}")
    return cls


def _read_value(cls: type[Method], setting: str, text: str) -> Any:
    default = cls.defaults().get(setting, text)
    kind: type = type(default)
    try:
        return kind(text)
    except ValueError:
        raise ValueError(
            f"{cls.name!r}: {setting}={text!r} is not {_KINDS.get(kind, kind.__name__)} (default: {default})"
        ) from None
