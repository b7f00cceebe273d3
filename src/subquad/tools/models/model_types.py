"""Model classes that are not in transformers: modules that packages name in the entry points `subquad.models`.

Such a module registers its config classes with transformers' Auto classes when it is imported.
"""

from functools import cache
from types import ModuleType
from typing import Any

import transformers

from subquad.core import entry_points

GROUP = "subquad.models"


@cache
def registered() -> tuple[ModuleType, ...]:
    """The modules, which are imported here; a module that is no longer there is left out."""
    modules = []
    for entry in entry_points.entries(GROUP):
        try:
            modules.append(entry_points.load(entry))
        except entry_points.BrokenPlugin as error:
            missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
            if not f"{entry.module}.".startswith(f"{missing}."):
                raise
    return tuple(modules)


def class_of(name: str) -> Any:
    """A model class of transformers or of a registered module, by its name; None if there is none."""
    return next((getattr(module, name) for module in (transformers, *registered()) if hasattr(module, name)), None)
