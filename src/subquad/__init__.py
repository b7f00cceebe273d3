"""subquad: transformer attention in sub-quadratic time, with measurements of what it costs in quality."""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.functional import attention
from subquad.masks import Mask
from subquad.methods import *  # noqa: F403  (the methods: see their __all__)
from subquad.methods import __all__ as _methods
from subquad.ops.backends import backends, use_backend

if TYPE_CHECKING:
    from subquad import hf, nn, parallel
    from subquad.audits import Controlled, audit
    from subquad.hf.plans import Plan, load_plan
    from subquad.intercepts import intercept
    from subquad.workflows.planning.run import plan

__version__ = "0.1.0"
__all__ = [
    "Controlled",
    "Mask",
    "Plan",
    "attention",
    "audit",
    "backends",
    "hf",
    "intercept",
    "load_plan",
    "nn",
    "parallel",
    "plan",
    "use_backend",
    *_methods,
]

_ELSEWHERE = {
    "Controlled": "audits",
    "audit": "audits",
    "intercept": "intercepts",
    "Plan": "hf.plans",
    "load_plan": "hf.plans",
    "plan": "workflows.planning.run",
}


_SUBMODULES = ("audits", "intercepts", "methods", "training")  # public, beside those of `__all__`


def __getattr__(name: str) -> Any:
    """Load `sq.nn`, `sq.hf`, and what needs SciPy or transformers, on first use."""
    if name in ("nn", "hf", "parallel"):
        return importlib.import_module(f"subquad.{name}")
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f"subquad.{_ELSEWHERE[name]}"), name)
    raise AttributeError(f"module 'subquad' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names: those of `__all__`, and the submodules that users import from."""
    return sorted({*__all__, *_SUBMODULES, "__version__"})
