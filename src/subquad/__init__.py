"""subquad: transformer attention in sub-quadratic time, with measurements of what it costs in quality."""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.core import torch_installed as _installed  # noqa: F401  (first: an error with the remedy where torch is too old)

# isort: split
from subquad.attention import attention
from subquad.kernels.dispatch import backends, use_backend
from subquad.kernels.tokens.rotary import Rotary
from subquad.masks import Mask
from subquad.methods import *  # noqa: F403  (the methods: see their __all__)
from subquad.methods import __all__ as _methods

if TYPE_CHECKING:
    from subquad import distributed, hf, nn
    from subquad.audits import Controlled, audit
    from subquad.hf.plans import Plan, load_plan
    from subquad.nn.interception import intercept
    from subquad.tools.compare.module_result import ModuleComparison
    from subquad.tools.compare.modules import compare
    from subquad.tools.modules.plan import plan
    from subquad.tools.modules.planned import ModulePlan

__version__ = "0.1.0"
__all__ = [
    "Controlled",
    "Mask",
    "ModuleComparison",
    "ModulePlan",
    "Plan",
    "Rotary",
    "attention",
    "audit",
    "backends",
    "compare",
    "distributed",
    "hf",
    "intercept",
    "load_plan",
    "nn",
    "plan",
    "use_backend",
    *_methods,
]

_ELSEWHERE = {
    "Controlled": "audits",
    "audit": "audits",
    "intercept": "nn.interception",
    "Plan": "hf.plans",
    "load_plan": "hf.plans",
    "ModuleComparison": "tools.compare.module_result",
    "ModulePlan": "tools.modules.planned",
    "compare": "tools.compare.modules",
    "plan": "tools.modules.plan",
}


_SUBMODULES = ("audits", "methods")  # public, in addition to `__all__`


def __getattr__(name: str) -> Any:
    """Load `sq.nn`, `sq.hf`, and what needs SciPy or transformers, on first use."""
    if name in ("nn", "hf", "distributed"):
        return importlib.import_module(f"subquad.{name}")
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f"subquad.{_ELSEWHERE[name]}"), name)
    raise AttributeError(f"module 'subquad' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names: those of `__all__`, and the submodules that users import from."""
    return sorted({*__all__, *_SUBMODULES, "__version__"})
