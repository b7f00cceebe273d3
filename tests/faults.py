"""Put faults into the code, one at a time, and see which of them the tests find.

    python -m tests.faults --count 200 --seed 0 --before CHECKOUT

A fault changes one place in a function of `src/subquad`: a comparison, a sign, a number, a condition, an argument that
is left out, an assignment that is left out. The tests are collected once; for each fault a fork of the process puts the
changed code into the functions that are loaded, and runs the cases that matter to that file until one fails: those of
the test files that import it, those of the test files that import what imports it or its package, the contract of the
methods that are built on it, and those of the test files one step farther. Of each test one case runs first, then the
others.

After a change that makes tests fewer, `--before` names a checkout of the earlier tests: cases that only these had, and
that still exist here (under `-m long`), run for the faults that the present ones do not find, and must not find them
either. A fault that no test finds may change nothing that can be seen: read it.

Tests that start processes do not see the faults; cases marked `slow` are left out, and so are the tests of the
documentation. Run these for a fault in a command, or in what ranks run, before you believe that no test finds it.
"""

import argparse
import ast
import functools
import gc
import inspect
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType

import pytest

import subquad as sq

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "subquad"
FOLDERS = ("tests/library", "tests/tools", "tests/research")
ABSENT = "no test loads it"
OUT_OF_TIME = "the time is up"  # the cases have not found it so far, or it makes one of them run on for ever
RUNS_NOW = "not survey and not long and not slow"
WITHOUT_EFFECT = ("strict", "source", "complexity", "metadata", "generator")  # as arguments; some are required
OTHER = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}


@dataclass(frozen=True)
class Fault:
    """Other text in place of that of some lines and columns (bytes) of a file."""

    file: Path  # from src/subquad
    start: tuple[int, int]
    end: tuple[int, int]
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.start[0]}:{self.start[1]} → {self.text.strip()!r}"

    def put(self, source: str) -> str:
        lines = [line.encode() for line in source.splitlines(keepends=True)]
        (first, left), (last, right) = self.start, self.end
        changed = lines[first - 1][:left] + self.text.encode() + lines[last - 1][right:]
        return b"".join([*lines[: first - 1], changed, *lines[last:]]).decode()


def faults_of(file: Path, source: str) -> Iterator[Fault]:
    """Every fault that we know how to put into this file."""

    def fault(node: ast.AST, text: str) -> Fault:
        return Fault(file, (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text)

    def text(node: ast.AST) -> str:
        return ast.unparse(node)

    for node in _code(ast.parse(source)):
        match node:
            case ast.Compare(left, [operator], [right]) if type(operator) in OTHER:
                yield fault(node, f"({text(left)} {OTHER[type(operator)]} {text(right)})")
            case ast.BinOp(left, operator, right) if type(operator) in OTHER:
                yield fault(node, f"({text(left)} {OTHER[type(operator)]} {text(right)})")
            case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
                yield fault(node, f"({text(operand)})")
            case ast.Constant(bool() as value):
                yield fault(node, str(not value))
            case ast.Constant(int() as value):
                yield fault(node, str(value + 1))
            case ast.Constant(float() as value):
                yield fault(node, str(2 * value if value else 1.0))
            case ast.IfExp(test, body, other):
                yield fault(node, f"({text(other)} if {text(test)} else {text(body)})")
            case ast.If(test):
                yield fault(test, f"not ({text(test)})")
            case ast.Call(function, given, [_, *_] as named) if all(keyword.arg for keyword in named):
                for left_out in (keyword for keyword in named if keyword.arg not in WITHOUT_EFFECT):
                    rest = [keyword for keyword in named if keyword is not left_out]
                    yield fault(node, text(ast.Call(function, given, rest)))
            case ast.Assign([ast.Name(name)], value) | ast.AugAssign(ast.Name(name), _, value) if any(
                isinstance(part, ast.Name) and part.id == name for part in ast.walk(value)
            ) or isinstance(node, ast.AugAssign):
                yield fault(node, "pass")


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """All parts but annotations, decorators, and what errors say."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST) and not isinstance(part, ast.Raise | ast.JoinedStr | ast.Import):
                yield part
                yield from _code(part)


def chosen(count: int, seed: int, folders: Iterable[str]) -> list[Fault]:
    """Faults at random: as many of each file as of any other, as far as there are."""
    draw, piles = random.Random(seed), []
    places = [SOURCE / folder for folder in folders]
    for path in sorted({path for place in places for path in ([place] if place.is_file() else place.rglob("*.py"))}):
        if "triton" in path.parts or path.stem in ("triton", "__main__"):
            continue  # tested in processes of their own
        pile = list(faults_of(path.relative_to(SOURCE), path.read_text("utf-8")))
        piles.append(draw.sample(pile, len(pile)))
    draw.shuffle(piles)
    rounds = (pile[i] for i in range(max(map(len, piles))) for pile in piles if i < len(pile))
    in_functions = (fault for fault in rounds if changed_code(SOURCE / fault.file, fault))
    return list(islice(in_functions, count))


# ---------------------------------------------------------------------- code of functions that are loaded


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of all functions of a module."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from codes(part)


def changed_code(path: Path, fault: Fault) -> dict[tuple[str, int], CodeType]:
    """The functions whose code the fault changes, by name and place; {} where it changes only the module's own."""
    source = path.read_text("utf-8")
    try:
        before, after = (
            {(code.co_qualname, code.co_firstlineno): code for code in codes(compile(text, str(path), "exec"))}
            for text in (source, fault.put(source))
        )
    except SyntaxError:  # an expression over several lines, whose parentheses were outside of it
        return {}
    return {
        key: code
        for key, code in after.items()
        if key in before
        and code.co_flags & inspect.CO_OPTIMIZED
        and code != before[key]
        and code.co_freevars == before[key].co_freevars
    }


def put(path: Path, fault: Fault) -> int:
    """Change the functions that are loaded from the file; how many there were."""
    wanted, count = changed_code(path, fault), 0
    gc.unfreeze()  # pytest may have frozen what it collected: objects that are frozen are not listed
    for function in [item for item in gc.get_objects() if isinstance(item, FunctionType)]:
        code = function.__code__
        if code.co_filename == str(path) and (new := wanted.get((code.co_qualname, code.co_firstlineno))):
            function.__code__, count = new, count + 1
    return count


# ---------------------------------------------------------------------- which tests matter


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """The modules of the project that a file imports, under all names that may be modules."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sq":
            names.add(getattr(getattr(sq, node.attr, None), "__module__", f"subquad.{node.attr}"))
    return frozenset(name for name in names if name.startswith(("subquad.", "tests.")))


def module_of(path: Path) -> str:
    """The dotted name of a file of the sources or the tests."""
    base = SOURCE.parent if path.is_relative_to(SOURCE) else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


class Tests:
    """The collected cases, and which of them matter to a file, the nearest first."""

    def __init__(self, items: list[pytest.Item]):
        self.by_file: dict[Path, list[pytest.Item]] = defaultdict(list)
        for item in items:
            self.by_file[item.path].append(item)
        files = {*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")}
        self.imports = {module_of(path): imports(path) for path in files}

    def built_on(self, modules: set[str]) -> set[str]:
        """The modules that import one of these; a package that only gathers names is passed through."""
        return {name for name, imported in self.imports.items() if imported & modules}

    def matter_to(self, path: Path) -> list[pytest.Item]:
        """First the cases of the nearest tests."""
        steps, reached = [], {module_of(path)}
        if not any(name.startswith("subquad.") for name in self.built_on(reached)):
            # it registers itself: the tests of what it imports from its folder are its tests
            reached |= {name for name in imports(path) if name.rpartition(".")[0] == module_of(path.parent)}
        for _ in range(3):
            steps.append(reached)
            reached = reached | {name for name in self.built_on(reached) if name != "subquad"}
        steps[1] = steps[1] | {module_of(path.with_name("__init__.py"))}
        ranks: dict[Path, int] = {}
        for file in self.by_file:
            imported = set(imports(file))
            for name in imports(file):
                imported |= self.imports.get(name, frozenset()) if name.startswith("tests.") else set()
            rank = next((i for i, modules in enumerate(steps) if imported & modules), None)
            if file.stem == f"test_{path.stem}":
                rank = 0
            if rank is not None:
                ranks[file] = rank
        near, far, farthest = (
            one_of_each_first(
                item for file in sorted(ranks) if ranks[file] == rank for item in self.by_file[file] if not method(item)
            )
            for rank in range(3)
        )
        of_methods = [item for items in self.by_file.values() for item in items if method(item) in reached]
        first = [item for item in of_methods if method(item) == module_of(path)]
        others = [item for item in of_methods if method(item) != module_of(path)]
        return [*one_of_each_first(first), *near, *far, *one_of_each_first(others), *farthest]


def method(item: pytest.Item) -> str | None:
    """The module of the method that a case of the contract is about."""
    parameters = getattr(item, "callspec", None) and item.callspec.params
    cls = getattr(item, "cls", None)
    return type(parameters["method"]).__module__ if cls and parameters and "method" in parameters else None


def one_of_each_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """In their order, but the first case of every test before all other cases."""
    seen: set[str] = set()
    first, others = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        (others if name in seen else first).append(item)
        seen.add(name)
    return first + others


# ---------------------------------------------------------------------- running them


class Faults:
    """The plugin of pytest that runs the collected cases once for each fault instead of once."""

    def __init__(self, faults: list[Fault], before: set[str], seconds: int):
        self.faults, self.before, self.seconds = faults, before, seconds
        self.failing: set[str] = set()
        self.tally = Counter[str]()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        now = [item for item in session.items if runs_now(item)]
        thinned = [item for item in session.items if item.nodeid in self.before and not runs_now(item)]
        earlier = [item for item in thinned if not item.get_closest_marker("slow")]  # these run in a job of their own
        print(f"{len(now)} cases now, {len(earlier)} more before, {len(self.faults)} faults", flush=True)
        tests, tests_before = Tests(now), Tests(earlier)
        for number, fault in enumerate(self.faults):
            begun, path = time.perf_counter(), SOURCE / fault.file
            outcome = self.found_by(path, fault, tests.matter_to(path))
            if outcome is None and earlier:
                missed = self.found_by(path, fault, tests_before.matter_to(path))
                outcome = f"LOST: {missed}" if missed not in (None, ABSENT, OUT_OF_TIME) else missed
            other = {None: "not found", ABSENT: ABSENT, OUT_OF_TIME: OUT_OF_TIME}
            lost = str(outcome).startswith("LOST") and "by the earlier tests alone"
            self.tally[lost or other.get(outcome, "found")] += 1
            seconds = time.perf_counter() - begun
            print(f"{number:3d} {fault}: {outcome or 'not found'} ({seconds:.0f} s)", flush=True)
        return True

    def found_by(self, path: Path, fault: Fault, items: list[pytest.Item]) -> str | None:
        """The first case that fails with the fault and does not without it."""
        while True:
            items = [item for item in items if item.nodeid not in self.failing]
            name = outcome_of(path, fault, items, self.seconds)
            failed = [item for item in items if item.nodeid == name]
            if not failed or outcome_of(path, None, failed, self.seconds) is None:
                return name
            self.failing.add(failed[0].nodeid)
            print(f"    fails without a fault: {name}", flush=True)


def runs_now(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(name) for name in ("survey", "long", "slow"))


def outcome_of(path: Path, fault: Fault | None, items: list[pytest.Item], limit: int) -> str | None:
    """The first case that fails with the fault, or why it was stopped; None if all pass."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            code = 0
            if fault is not None and put(path, fault) == 0:
                os.write(write, ABSENT.encode())
                items = []
            for number, item in enumerate(items):
                following = items[number + 1] if number + 1 < len(items) else None
                failed: list[str] = []
                for report in _reports(item, following):
                    failed += [report.nodeid] if report.failed else []
                if failed:
                    os.write(write, failed[0].encode())
                    code = 1
                    break
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as said:
        name = said.read()
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return OUT_OF_TIME if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else f"signal {status}"
    return name or (f"exit code {status}" if status else None)


def _reports(item: pytest.Item, following: pytest.Item | None) -> list[pytest.TestReport]:
    from _pytest.runner import runtestprotocol

    return runtestprotocol(item, log=False, nextitem=following)


def cases_of(checkout: Path) -> set[str]:
    """The cases that run in a checkout, by their names; or those of a file that `pytest --collect-only -q` wrote."""
    if checkout.is_file():
        return {line for line in checkout.read_text("utf-8").splitlines() if "::" in line}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-n", "0", "-p", "no:jaxtyping", *OPTIONS]
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        [*command, "-m", RUNS_NOW, *FOLDERS], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {line for line in done.stdout.splitlines() if "::" in line}


OPTIONS = ("-o", "addopts=--strict-markers", "-p", "no:cacheprovider")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=list(FOLDERS), help="folders or files of tests")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="which of them to begin with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folders", nargs="+", default=["."], help="files and folders of src/subquad")
    parser.add_argument("--seconds", type=int, default=60, help="of the processor, for one fault")
    parser.add_argument(
        "--before",
        type=Path,
        help="a checkout with earlier tests, or the list of its cases, for what these do not find",
    )
    arguments = parser.parse_args()
    before = cases_of(arguments.before) if arguments.before else set()
    faults = chosen(arguments.count, arguments.seed, arguments.folders)[arguments.first :]
    plugin = Faults(faults, before, arguments.seconds)
    os.chdir(ROOT)
    pytest.main(["-q", "-n", "0", "-s", "-p", "no:jaxtyping", *OPTIONS, *arguments.tests], plugins=[plugin])
    print(f"{len(faults)} faults: " + ", ".join(f"{count} {name}" for name, count in plugin.tally.items()))


if __name__ == "__main__":
    main()
