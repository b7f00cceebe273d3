"""Names in code: which words none may contain, and which classes share a name.

    python -m tests.identifiers [FOLDER OR FILE …]

The words and the terms of the field that replace them are in `[identifiers]` of `tests/words.toml`.
"""

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "subquad"


def defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and name of every variable, parameter, function and class that this code defines."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Store()) | ast.arg(name):
                yield node.lineno, name
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield node.lineno, name


def private_words(files: Iterable[Path]) -> Iterator[str]:
    """Yields a line for every defined name that contains a word of the list, and for functions named `_`."""
    words = tomllib.loads((ROOT / "tests" / "words.toml").read_text("utf-8"))["identifiers"]
    patterns = [(re.compile(pattern), term) for pattern, term in words.items()]
    for file in files:
        tree = ast.parse(file.read_text("utf-8"))
        for line, name in [(1, file.stem), *defined(tree)]:
            for pattern, term in patterns:
                if pattern.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()):
                    yield f"{file.relative_to(ROOT)}:{line}: {name} (write: {term})"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "_":
                yield f"{file.relative_to(ROOT)}:{node.lineno}: a function named _ (write: what it does)"


def shared_class_names(files: Iterable[Path]) -> Iterator[str]:
    """Yields a line for every name that several classes of these files have."""
    places = defaultdict(list)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"{name}: {', '.join(where)}"


def python_files(paths: Iterable[Path]) -> list[Path]:
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))


if __name__ == "__main__":
    chosen = python_files(Path(name).resolve() for name in sys.argv[1:] or [SOURCE])
    print(*private_words(chosen), *shared_class_names(python_files([SOURCE])), sep="\n")
