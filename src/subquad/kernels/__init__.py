"""The mathematics that methods share: attention over chosen pairs (`attention`), the choice of pairs (`selection`).

The backends of an op register themselves. So that a new one is a new file and nothing else, all files of the ops'
folders are imported here; those for Triton, `triton.py` or a folder of that name, only where they may run. Of the
backends that can take a call, the one registered last runs it: "triton" comes first, so that CPU tensors go to "cpu"
also where Triton's interpreter is on.
"""

from importlib import import_module
from pathlib import Path

from subquad.kernels import triton

for _file in sorted(Path(__file__).parent.glob("*/*/*.py")):
    if _file.parts[-3] in ("attention", "selection") and _file.name not in ("triton.py", "__init__.py"):
        import_module(".".join((__name__, *_file.parts[-3:-1], _file.stem)))
if triton.wanted():
    triton.load()
