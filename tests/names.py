"""Names in docstrings that the code does not have: those in single backquotes, and those of documented arguments.

    python -m tests.names [FOLDER OR FILE …]

A text in backquotes is checked if it is Python (`name`, `Class.member`, `name=value`, `module.function(argument)`), the
path of a file, or a name with hyphens, as methods and options have. Commands, shapes and formulas are none of these.
The name of another package's object occurs in the code, or begins with the package (`torch.nn.Module`) or with what
the file imports from it (`nn.Module`). A single letter, also with an index (`q_0`), is a symbol of a formula.
"""

import ast
import builtins
import keyword
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from tests.identifiers import ROOT, SOURCE, python_files

QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SYMBOL = re.compile(r"[A-Za-z](_\w)?", re.ASCII)
HYPHENS = re.compile(r"[a-z]\w*(-\w+)+", re.ASCII)
PATH = re.compile(r"[\w.]+(/[\w.]+)+|[\w./]+/|\w+\.py", re.ASCII)
CALL = re.compile(r"([A-Za-z_][\w.]*\w)\(.*\)", re.ASCII)
SECTION = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*):", re.MULTILINE)
EXAMPLE = re.compile(r"^    (?:.*\b(?:class|def|import|as) (\w+)|(?:>>> )?(\w+) = )", re.MULTILINE)
PYTHON = {*keyword.kwlist, *dir(builtins), "self", "cls"}
WITHOUT_MEMBERS = {"object", "Protocol", "ABC", "NamedTuple", "Generic"}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class File:
    """The names in the code of a file.

    Attributes:
        names: all identifiers.
        defined: the identifiers that the file defines or imports.
        members: the members that the file reads, each with the last name of its object: ("plan", "layers").
        texts: the strings, without docstrings.
        foreign: the identifiers that the file imports from other packages.
        packages: the other packages.
    """

    path: Path
    tree: ast.Module
    names: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)
    members: set[tuple[str, str]] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    docstrings: list[tuple[Documented, str]] = field(default_factory=list)

    @property
    def module(self) -> str:
        return self.path.parent.name if self.path.stem == "__init__" else self.path.stem


@cache
def read(path: Path) -> File:
    """Read the names in the code of a file."""
    file = File(path, ast.parse(path.read_text("utf-8")))
    documents = set()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Name):
            (file.defined if isinstance(node.ctx, ast.Store) else file.names).add(node.id)
        elif isinstance(node, ast.Attribute):
            (file.defined if isinstance(node.ctx, ast.Store) else file.names).add(node.attr)
            file.members.add((getattr(node.value, "attr", getattr(node.value, "id", "")), node.attr))
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and node not in documents:
                file.texts.add(node.value)
        elif isinstance(node, ast.arg):
            file.defined.add(node.arg)
        elif isinstance(node, ast.keyword):
            file.names.add(node.arg or "")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound = [alias.asname or alias.name for alias in node.names]
            file.defined.update(part for name in bound for part in name.split("."))
            package = str(getattr(node, "module", node.names[0].name)).partition(".")[0]
            if package != "subquad":
                file.packages.add(package)
                file.foreign.update(bound)
        elif isinstance(node, Documented):
            if not isinstance(node, ast.Module):
                file.defined.add(node.name)
            if isinstance(node, ast.ClassDef):
                file.classes[node.name] = node
            if text := ast.get_docstring(node):
                file.docstrings.append((node, text))
                documents.add(getattr(node.body[0], "value", None))
    file.names |= file.defined
    return file


class Code:
    """The names of several files, in which those of docstrings are looked up."""

    def __init__(self, files: Iterable[File]) -> None:
        files = list(files)
        self.modules: dict[str, list[File]] = defaultdict(list)
        for file in files:
            self.modules[file.module].append(file)
        self.classes = {name: node for file in files for name, node in file.classes.items()}
        self.defined = PYTHON.union(self.modules, *(file.defined for file in files))
        self.names = self.defined.union(*(file.names for file in files))
        self.read = {pair for file in files for pair in file.members}
        self.texts = {text for file in files for text in file.texts}
        self.packages = set(sys.stdlib_module_names).union(*(file.packages for file in files))
        self._members: dict[str, set[str] | None] = {}

    def members(self, name: str) -> set[str] | None:
        """The members of a class and of its bases; None if one of these is a class of another package."""
        if name not in self._members:
            self._members[name] = self._members_of(name)
        return self._members[name]

    def _members_of(self, name: str) -> set[str] | None:
        if name in WITHOUT_MEMBERS or name not in self.classes:
            return set() if name in WITHOUT_MEMBERS else None
        node, result = self.classes[name], set()
        for part in ast.walk(node):
            match part:
                case ast.Name(member, ast.Store()) | ast.Attribute(_, member, ast.Store()) | ast.arg(member):
                    result.add(member)
                case ast.FunctionDef(member) | ast.AsyncFunctionDef(member) | ast.ClassDef(member):
                    result.add(member)
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            inherited = self.members(getattr(base, "attr", getattr(base, "id", "")))
            if inherited is None:
                return None
            result |= inherited
        return result

    def missing(self, text: str, file: File) -> list[str]:
        """The names in a text in backquotes, in a docstring of this file, that do not exist."""
        if text in self.texts and re.search(r"[./-]", text):  # the name of a file or of a method, an option
            return []
        if HYPHENS.fullmatch(text):
            return [] if text.replace("-", "_") in self.texts | self.packages else [text]
        if PATH.fullmatch(text):
            return [] if text.rstrip("/") in paths() or text.rpartition("/")[2] in self.texts else [text]
        return [name for name in names_in(text) if not self.has(name, file)]

    def has(self, name: str, file: File) -> bool:
        """True if a name, with dots between its parts, exists for a docstring of this file."""
        first, *others = name.split(".")
        if first in self.packages or first in file.foreign or SYMBOL.fullmatch(name):
            return True
        if first in ("sq", "subquad"):
            first, *others = others or [first]
        known = self.defined if others else self.names
        if not (first in known or first in file.names or first in file.texts or first in commands()):
            return False
        return all(self._has_member(*pair, file) for pair in zip([first, *others], others, strict=False))

    def _has_member(self, owner: str, member: str, file: File) -> bool:
        if owner in self.classes:
            members = self.members(owner)
            return members is None or member in members
        if owner in self.modules and owner not in file.defined:
            inside = any(member in one.defined or member in one.texts for one in self.modules[owner])
            return inside or f"{owner}/{member}" in paths()
        known = member in file.defined or (owner in file.names and member in self.names)
        return known or (owner, member) in self.read


def names_in(text: str) -> Iterator[str]:
    """Yields the names in a text that is Python, or that begins with a call."""
    try:
        yield from _names_of(ast.parse(text.strip("=.").replace("…", "...")))
    except SyntaxError:
        if hit := CALL.fullmatch(text):
            yield hit[1]


def _names_of(node: ast.AST) -> Iterator[str]:
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        yield ".".join([node.id, *attributes])
        return
    yield from attributes
    if isinstance(node, ast.keyword) and node.arg:
        yield node.arg
    for child in ast.iter_child_nodes(node):
        yield from _names_of(child)


@cache
def commands() -> frozenset[str]:
    """The commands of installed packages, such as `torchrun`."""
    return frozenset(script.name for script in entry_points(group="console_scripts"))


@cache
def paths() -> frozenset[str]:
    """The paths of the repository's files and folders, and every end of them, with and without `.py`."""
    result = set()
    for folder in ("src", "tests", "docs", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*"):
            parts = path.relative_to(ROOT).parts
            for at in range(len(parts)):
                end = "/".join(parts[at:])
                result |= {end, end.removesuffix(".py")}
    return frozenset(result)


def documented(text: str) -> Iterator[tuple[int, str]]:
    """Yields each name that the sections Args and Attributes of a docstring describe, after its place in the text."""
    for section in SECTION.finditer(text + "\n"):
        for entry in ENTRY.finditer(section[1]):
            yield from ((section.start(1) + entry.start(), name.strip(" *")) for name in entry[1].split(","))


def stale_names(files: Iterable[Path], code: Code) -> Iterator[str]:
    """Yields a line for every name in docstrings of these files that the code does not have."""
    for file in map(read, files):
        where = file.path.relative_to(ROOT) if file.path.is_relative_to(ROOT) else file.path.name
        for node, text in file.docstrings:
            examples = {name for pair in EXAMPLE.findall(text) for name in pair}
            wrong = [
                (hit.start(), name)
                for hit in QUOTED.finditer(text)
                for name in code.missing(hit[1], file)
                if name.partition(".")[0] not in examples
            ]
            if isinstance(node, ast.ClassDef):
                names = code.members(node.name)
            else:
                names = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
            if names is not None:
                wrong += [(at, f"{name} (documented)") for at, name in documented(text) if name not in names]
            for at, name in wrong:
                yield f"{where}:{node.body[0].lineno + text.count(chr(10), 0, at)}: {name}"


@cache
def library() -> Code:
    """The code of subquad."""
    return Code(read(path) for path in python_files([SOURCE]))


if __name__ == "__main__":
    chosen = python_files(Path(name).resolve() for name in sys.argv[1:] or [SOURCE])
    print(*stale_names(chosen, library()), sep="\n")
