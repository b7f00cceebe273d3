"""What methods share: parts of attention (`parts`), choices of who meets whom (`choose`), and what both stand on.

The backends of an op register themselves. So that a new one is a new file and nothing else, all files of the ops'
folders are imported here; those for Triton only where they may run. Of the backends that can take a call, the one
registered last runs it: "triton" comes first, so that CPU tensors go to "cpu" also where Triton's interpreter is on.
"""

from importlib import import_module
from pkgutil import walk_packages

from subquad.ops import triton

for _module in walk_packages(__path__, f"{__name__}."):
    if _module.name.startswith((f"{__name__}.parts.", f"{__name__}.choose.")) and not _module.name.endswith(".triton"):
        import_module(_module.name)
if triton.wanted():
    triton.load()
