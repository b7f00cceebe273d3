"""What methods share: parts of attention (`parts`), choices of who meets whom (`choose`), and what both stand on.

The backends of an op register themselves. So that a new one is a new file and nothing else, all files of the ops'
folders are imported here.
"""

from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):
    if _module.name.startswith((f"{__name__}.parts.", f"{__name__}.choose.")):
        import_module(_module.name)
