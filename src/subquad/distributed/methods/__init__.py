"""The strategies of this package's methods: each module registers those of a family.

Every module of this folder is imported, as every module of `subquad.methods` is.
"""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
