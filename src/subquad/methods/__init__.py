"""The attention methods: every module of this folder is imported, and a method is registered by its definition."""

import pkgutil
from importlib import import_module
from typing import Any

from subquad.methods.core.method import METHODS, BoundMethod, Fit, Method, Traits
from subquad.methods.core.names import from_dict, list_methods, parse_method, resolve
from subquad.methods.core.plugins import register
from subquad.methods.core.settings import explained

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)

_CLASSES = {method.__name__: method for method in METHODS.values()}

__all__ = [
    "METHODS",
    "BoundMethod",
    "Fit",
    "Method",
    "Traits",
    "explained",
    "from_dict",
    "list_methods",
    "parse_method",
    "register",
    "resolve",
    *_CLASSES,
]


def __getattr__(name: str) -> Any:
    """Return a method's class by its name."""
    if name in _CLASSES:
        return _CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
