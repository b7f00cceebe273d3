"""Imports run strictly downward."""

import ast
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import pytest

import subquad
from tests.targets import folder_graph, two_way

SOURCE = Path(subquad.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# From the ground up, in the library and then above it. A file may import from a lower level and from its own folder.
LEVELS = [
    "core",
    "masks",
    "kernels",
    "methods",
    "distributed",
    "attention",
    "nn",
    "hf",
    "audits",
    "testing",
    "tools",
    "research",
]
LEVEL = {name: level for level, name in enumerate(LEVELS)}
MAY_IMPORT = {
    "transformers": {"hf", "tools", "research"},
    "matplotlib": {
        "tools/report",
        "tools/bench",
        "tools/compare",
        "tools/inspect",
        "tools/needle",
        "tools/plan",
        "research/papers",
    },
    "triton": {"triton.py", "triton"},
    "ray": {"tools/runs"},
    "optuna": {"research/tuning"},
    "pytest": {"testing"},
}

# Circles that are left, each with its reason.
CIRCLES = [
    {"subquad.methods", "subquad.methods.mixed_heads"},  # the text of mixed heads holds other methods, by their names
]


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """The imports, calls and functions of a file, read once for all tests."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.FunctionDef)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def imports(path: Path) -> set[str]:
    """Every module that a file imports anywhere in it, as dotted names."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module)
            if node.module == "subquad":
                names |= {f"subquad.{alias.name}" for alias in node.names}
    return names


def circles(root: Path) -> list[set[str]]:
    """The modules under `root`, a package, that import each other, at their top, in a function or for types alone.

    `from package import name` imports the module `package.name` where there is one, and else the package's own file.
    """
    paths = {".".join(path.relative_to(root.parent).with_suffix("").parts): path for path in root.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph = nx.DiGraph()
    for name, path in modules.items():
        for node in nodes(path):
            if isinstance(node, ast.Import):
                graph.add_edges_from((name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found = (f"{node.module}.{alias.name}" for alias in node.names)
                graph.add_edges_from((name, one if one in modules else node.module) for one in found)
    return [circle for circle in nx.strongly_connected_components(graph) if len(circle) > 1]


def layer(path: Path) -> str:
    """The part of the house that a file is in: its folder, or its name at the top."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def inner(names: set[str]) -> set[str]:
    """Those parts of subquad that are imported, `subquad.kernels.dispatch` → `kernels`."""
    return {name.split(".")[1] for name in names if name.startswith("subquad.") and name.split(".")[1] in LEVEL}


def upward(path: Path) -> set[str]:
    """The parts above that of a file, or beside it, that the file imports."""
    return {name for name in inner(imports(path)) - {layer(path)} if LEVEL[name] >= LEVEL[layer(path)]}


def misplaced(path: Path) -> set[str]:
    """The packages that a file imports although they belong in other rooms."""
    place = path.relative_to(SOURCE)
    rooms = {*place.parts, *map(str, place.parents)}
    tops = {name.split(".")[0] for name in imports(path)}
    return {top for top in tops & set(MAY_IMPORT) if not MAY_IMPORT[top] & rooms}


def offenders(rule: Callable[[Path], set[str]], paths: list[Path]) -> dict[str, set[str]]:
    """The files that break a rule, with what breaks it."""
    found = {str(path.relative_to(SOURCE)): rule(path) for path in paths}
    return {name: names for name, names in found.items() if names}


def private_names(path: Path) -> set[str]:
    """The functions and methods of a file whose name begins with one underscore."""
    functions = {node.name for node in nodes(path) if isinstance(node, ast.FunctionDef)}
    return {name for name in functions if name.startswith("_") and not name.endswith("__")}


def private_calls(paths: list[Path]) -> dict[str, set[str]]:
    """By file, the private functions of other modules that it imports or calls as a method."""
    known = {path: private_names(path) for path in paths}
    every = set().union(*known.values())
    found = {}
    for path in paths:
        calls = [node.func for node in nodes(path) if isinstance(node, ast.Call)]
        methods = [func for func in calls if isinstance(func, ast.Attribute)]
        names = {func.attr for func in methods if ast.unparse(func.value) not in ("self", "cls", "super()")}
        imported = [node for node in nodes(path) if isinstance(node, ast.ImportFrom)]
        names |= {alias.name for node in imported for alias in node.names if node.module.startswith("subquad")}
        found[str(path)] = {name for name in names & every if name not in known[path]}
    return {name: names for name, names in found.items() if names}


def test_every_part_has_a_level():
    assert {layer(path) for path in FILES} == {*LEVEL, "__init__", "__main__"}


def test_imports_run_downward():
    assert offenders(upward, [path for path in FILES if layer(path) in LEVEL]) == {}


def test_outside_packages_stay_in_their_rooms():
    assert offenders(misplaced, FILES) == {}


def test_no_module_imports_itself_through_others():
    assert [circle for circle in circles(SOURCE) if circle not in CIRCLES] == []


def test_no_two_folders_of_tools_import_each_other():
    pairs = two_way(folder_graph(SOURCE / "tools"))
    assert not pairs, f"move what both folders use to tools/measure or tools/models: {pairs}"


def test_no_private_function_is_called_from_another_module():
    assert private_calls(FILES) == {}


def test_the_finder_of_private_calls_finds_them(tmp_path):
    files = {
        "one.py": "class A:\n    def _f(self): ...\ndef _g(): ...\n_g()",
        "two.py": "from subquad.one import _g\ndef h(a):\n    a._f()\n    a._replace()",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert private_calls(sorted(tmp_path.glob("*.py"))) == {str(tmp_path / "two.py"): {"_f", "_g"}}


def test_the_finder_of_circles_finds_them(tmp_path):
    files = {
        "house/__init__.py": "from house.a import one",
        "house/a.py": "from house import b",
        "house/b.py": "def f():\n    from house.rooms import c",
        "house/rooms/__init__.py": "",
        "house/rooms/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.a",
        "house/rooms/d.py": "from house.rooms.c import two\nimport house",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    assert circles(tmp_path / "house") == [{"house.a", "house.b", "house.rooms.c"}]


def test_the_finder_of_folders_that_import_each_other_finds_them(tmp_path):
    files = {
        "plan/a.py": "def f():\n    from subquad.tools.compare import b",
        "plan/c.py": "import subquad.tools.measure.d",
        "compare/b.py": "import subquad.tools.compare.e\nimport subquad.tools.plan.a\nfrom subquad.tools import plan",
        "measure/d.py": "from subquad.toolshed.plan import a",
    }
    for name, text in files.items():
        path = tmp_path / "tools" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    graph = folder_graph(tmp_path / "tools")
    assert set(graph.edges) == {("plan", "compare"), ("plan", "measure"), ("compare", "plan")}
    assert two_way(graph) == {("compare", "plan"): ["plan/a.py:2"]}
    assert graph["compare"]["plan"]["places"] == ["compare/b.py:2", "compare/b.py:3"]


def test_the_reader_of_imports_sees_them():
    assert {"kernels", "masks", "methods"} <= inner(imports(SOURCE / "methods" / "cluster_former.py"))
    assert "torch" in imports(SOURCE / "masks" / "mask.py")


def test_importing_subquad_imports_nothing_heavy():
    # Triton itself is imported by torch's flop counter, where it is installed.
    heavy = {"transformers", "matplotlib", "sklearn", "pytest", "subquad.kernels.triton.launch"}
    heavy |= {"subquad.hf", "subquad.nn", "subquad.testing"}
    code = f"import sys, subquad; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nn_loads_on_first_use_and_an_unknown_name_does_not():
    assert subquad.nn.MultiheadAttention.__module__ == "subquad.nn.attention"
    with pytest.raises(AttributeError, match="'subquad' has no attribute 'colour'"):
        subquad.colour  # noqa: B018
