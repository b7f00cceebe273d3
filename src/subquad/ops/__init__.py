"""What methods share: parts of attention (`parts`), choices of who meets whom (`choose`), and what both stand on.

The backends of an op register themselves. So that a new one is a new file and nothing else, all files of the ops'
folders are imported here; those for Triton only where they may run. Of the backends that can take a call, the one
registered last runs it: "triton" comes first, so that CPU tensors go to "cpu" also where Triton's interpreter is on.
"""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from subquad.ops import choose, parts, triton


def _import_below(folders: Iterable[str], package: str) -> None:
    """Import all modules of a package, less those for Triton."""
    for module in iter_modules(folders, f"{package}."):
        if not module.name.endswith(".triton"):
            imported = import_module(module.name)
            if module.ispkg:
                _import_below(imported.__path__, module.name)


for _package in (parts, choose):
    _import_below(_package.__path__, _package.__name__)
if triton.wanted():
    triton.load()
