"""Imports run strictly downward."""

import ast
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

import subquad

SOURCE = Path(subquad.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# From the ground up. A file may import from a lower level and from its own folder, and from nowhere else.
LEVELS = [
    {"shapes", "errors", "spelling", "expected", "environment", "torch_ops", "sdpa_masks", "plain_tables"},
    {"files"},
    {"seals", "executors"},
    {"masks", "randomness", "data"},
    {"parallel"},
    {"ops"},
    {"methods"},
    {"functional", "sdpa_arguments"},
    {"intercepts"},
    {"nn"},
    {"hf"},
    {"training", "measure", "audits"},
    {"report"},
    {"workflows"},
    {"papers"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
MAY_IMPORT = {
    "transformers": {"hf", "training", "workflows", "papers"},
    "matplotlib": {"report"},
    "triton": {"triton.py", "triton"},
    "ray": {"executors"},
    "optuna": {"tuning"},
}


# Circles that are left, each with its reason.
CIRCLES = [
    {"subquad.methods", "subquad.methods.mixed_heads"},  # the text of mixed heads holds other methods, by their names
]


def imports(path: Path) -> set[str]:
    """Every module that a file imports anywhere in it, as dotted names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
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
        for node in ast.walk(ast.parse(path.read_text())):
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
    """Those parts of subquad that are imported, `subquad.ops.kmeans` → `ops`."""
    return {name.split(".")[1] for name in names if name.startswith("subquad.") and name.split(".")[1] in LEVEL}


def identify(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_every_part_has_a_level():
    assert {layer(path) for path in FILES} - {"__init__", "__main__"} <= set(LEVEL)


@pytest.mark.parametrize("path", [p for p in FILES if layer(p) in LEVEL], ids=identify)
def test_imports_run_downward(path):
    upward = {name for name in inner(imports(path)) - {layer(path)} if LEVEL[name] >= LEVEL[layer(path)]}
    assert not upward


@pytest.mark.parametrize("path", FILES, ids=identify)
def test_outside_packages_stay_in_their_rooms(path):
    tops = {name.split(".")[0] for name in imports(path)}
    misplaced = {
        top for top in tops & set(MAY_IMPORT) if not MAY_IMPORT[top] & {layer(path), *path.relative_to(SOURCE).parts}
    }
    assert not misplaced


def test_no_module_imports_itself_through_others():
    assert [circle for circle in circles(SOURCE) if circle not in CIRCLES] == []


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


def test_the_reader_of_imports_sees_them():
    assert {"ops", "masks", "methods"} <= inner(imports(SOURCE / "methods" / "cluster_former.py"))
    assert "torch" in imports(SOURCE / "masks.py")


def test_importing_subquad_imports_nothing_heavy():
    # Triton itself is imported by torch's flop counter, where it is installed.
    heavy = "{'transformers', 'matplotlib', 'sklearn', 'subquad.ops.triton.launch', 'subquad.hf', 'subquad.nn'}"
    code = f"import sys, subquad; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nn_loads_on_first_use_and_an_unknown_name_does_not():
    assert subquad.nn.MultiheadAttention.__module__ == "subquad.nn.attention"
    with pytest.raises(AttributeError, match="'subquad' has no attribute 'colour'"):
        subquad.colour  # noqa: B018
