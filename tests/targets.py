"""The design of the tools in numbers, read in the sources: lines, repeated names, folders that import each other.

python -m tests.targets
"""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import networkx as nx

from tests.identifiers import ROOT, SOURCE, python_files

TOOLS, BENCHMARKS = SOURCE / "tools", ROOT / "benchmarks"
OVER_RANKS = SOURCE / "distributed" / "methods"  # not counted: a method over ranks has the name of its file in methods
CLOCKS = ("perf_counter", "monotonic", "time")  # of the module `time`; each also in nanoseconds, with the ending _ns


def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"))


def lines(files: Iterable[Path]) -> int:
    """The number of lines of some files."""
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


def typed_dicts(tree: ast.AST) -> Iterator[int]:
    """Yields the line of each class that is a `TypedDict`, and of each call that makes one."""
    for node in ast.walk(tree):
        bases = node.bases if isinstance(node, ast.ClassDef) else [node.func] if isinstance(node, ast.Call) else []
        yield from (node.lineno for base in bases if ast.unparse(base).split(".")[-1] == "TypedDict")


def added_arguments(tree: ast.AST) -> Iterator[int]:
    """Yields the line of each call of `add_argument`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield node.lineno


def clock_reads(tree: ast.AST) -> Iterator[int]:
    """Yields the line of each use of a clock of the module `time`, under whatever name it is imported.

    A clock that is handed on without a call, such as a default, is a use too.
    """
    modules, clocks = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "time"}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            clocks |= {alias.asname or alias.name for alias in node.names if _is_clock(alias.name)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(module), name) if module in modules and _is_clock(name):
                yield node.lineno
            case ast.Name(name, ast.Load()) if name in clocks:
                yield node.lineno


def _is_clock(name: str) -> bool:
    return name.removesuffix("_ns") in CLOCKS


def shared_names(files: Iterable[Path]) -> dict[str, list[Path]]:
    """The files of each name that several of them have, aside from `__init__.py` and those of `OVER_RANKS`."""
    by_name = defaultdict(list)
    for file in files:
        if file.name != "__init__.py" and file.parent != OVER_RANKS:
            by_name[file.name].append(file)
    return {name: paths for name, paths in by_name.items() if len(paths) > 1}


def folder_graph(root: Path) -> nx.DiGraph:
    """The folders of the package at `root`, and which of them imports which, anywhere in a file.

    Each edge has the importing places in its attribute `places`.
    """
    package = f"subquad.{root.name}."
    graph = nx.DiGraph()
    for file in python_files([root]):
        folder = file.relative_to(root).parts[0]
        for node in ast.walk(tree_of(file)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for other in {name.removeprefix(package).split(".")[0] for name in names if name.startswith(package)}:
                if other != folder:
                    graph.add_edge(folder, other)
                    graph[folder][other].setdefault("places", []).append(f"{file.relative_to(root)}:{node.lineno}")
    return graph


def two_way(graph: nx.DiGraph) -> dict[tuple[str, str], list[str]]:
    """The pairs of folders that import each other, with the importing places of the direction that has fewer."""
    pairs = [(a, b) for a, b in graph.edges if a < b and graph.has_edge(b, a)]
    return {(a, b): min(graph[a][b]["places"], graph[b][a]["places"], key=len) for a, b in pairs}


def places(find: Callable[[ast.AST], Iterator[int]], files: Iterable[Path]) -> list[str]:
    """The lines that a finder finds in some files, as file:line."""
    return [f"{file.relative_to(ROOT)}:{line}" for file in files for line in sorted(find(tree_of(file)))]


def outside_measure() -> list[Path]:
    """The files of the tools, without those of `tools/measure`."""
    return [file for file in python_files([TOOLS]) if not file.is_relative_to(TOOLS / "measure")]


def table() -> Iterator[tuple[str, str]]:
    """Yields what is measured and its value, for each target."""
    source, tools, benchmarks = map(python_files, ([SOURCE], [TOOLS], [BENCHMARKS]))
    shared = shared_names(source)
    yield "lines of Python in src and benchmarks", f"{lines([*source, *benchmarks]):,}"
    yield "lines of Python in tools", f"{lines(tools):,}"
    yield "TypedDict in tools", str(len(places(typed_dicts, tools)))
    yield "add_argument in benchmarks", str(len(places(added_arguments, benchmarks)))
    yield "pairs of folders of tools that import each other", str(len(two_way(folder_graph(TOOLS))))
    yield "reads of a clock in tools outside measure", str(len(places(clock_reads, outside_measure())))
    yield "file names shared in src", f"{len(shared)} by {sum(map(len, shared.values()))} files"


if __name__ == "__main__":
    rows = list(table())
    for what, value in rows:
        print(f"{what:<{max(len(what) for what, _ in rows)}}  {value}")
