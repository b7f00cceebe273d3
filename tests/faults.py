"""Put faults into the code, one at a time, and see which of them the tests find.

    python -m tests.faults tests/test_contract.py tests/methods tests/ops --count 60 --seed 0

A fault changes one place in a copy of `src/subquad`: a comparison, a sign, a number, a condition, an argument that is
left out, an assignment that is left out. After a change that makes tests fewer, `--before FOLDER` names a checkout of
the earlier ones: what these do not find is tried on those too, and must not be found there either. A fault that no test
finds may change nothing that can be seen: read it.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401  (imported before forking, as torch is by subquad)
import pytest
import transformers  # noqa: F401

import subquad as sq
from subquad import torch_ops

ROOT = Path(__file__).parents[1]
ROOMS = ("masks.py", "functional.py", "randomness.py", "ops", "methods", "nn")
LIMIT = 900  # seconds; a fault that makes the tests run on for ever is found
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


def chosen(count: int, seed: int, rooms: list[str]) -> list[Fault]:
    """Faults at random: as many of each file as of any other, as far as there are."""
    source = ROOT / "src" / "subquad"
    files = sorted(path for room in rooms for path in [source / room, *(source / room).rglob("*.py")] if path.is_file())
    draw, piles = random.Random(seed), []
    for path in files:
        pile = list(faults_of(path.relative_to(source), path.read_text()))
        piles.append(draw.sample(pile, len(pile)))
    draw.shuffle(piles)
    rounds = (pile[i] for i in range(max(map(len, piles))) for pile in piles if i < len(pile))
    return [fault for fault, _ in zip(rounds, range(count), strict=False)]


def tests_of(fault: Fault, files: list[str]) -> list[str]:
    """What to run: of a method's file the cases of this method alone, where the tests are those of every method."""
    names = [cls.name for cls in sq.METHODS.values() if cls.__module__.endswith(f"methods.{fault.file.stem}")]
    if fault.file.parts[0] != "methods" or not names:
        return files
    return [*files, "-k", " or ".join(part for name in names for part in (f"[{name}:", f"[{name}]", f"[{name}-"))]


def found_by(fault: Fault | None, source: Path, folder: Path, words: list[str]) -> str | None:
    """The first test that fails with this fault in the sources. Runs in a fork: what is imported here is there."""
    path = None if fault is None else source / "subquad" / fault.file
    original = "" if path is None else path.read_text()
    if path is not None:
        path.write_text(fault.put(original))
    log = source.parent / "log"
    try:
        process = os.fork()
        if process == 0:
            _run(source, folder, words, log)
        begun, status = time.monotonic(), None
        while status is None and time.monotonic() - begun < LIMIT:
            ended, code = os.waitpid(process, os.WNOHANG)
            status = code if ended else time.sleep(0.1)
        if status is None:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return "the limit of time"
    finally:
        if path is not None:
            path.write_text(original)
    if os.waitstatus_to_exitcode(status) in (0, 5):  # 5: no test was chosen
        return None
    said = [line for line in log.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return said[0].split(" - ")[0] if said else f"exit code {os.waitstatus_to_exitcode(status)}"


def _run(source: Path, folder: Path, words: list[str], log: Path) -> None:
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
        torch_ops.LIBRARY._destroy()  # else the operators of the copy are registered twice
        for name in [name for name in sys.modules if name.split(".")[0] in ("subquad", "tests")]:
            del sys.modules[name]
        sys.path[:0] = [str(source), str(folder)]
        sys.dont_write_bytecode = True
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
        code = pytest.main([*options, *words])
    finally:
        os._exit(int(code))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="of tests, in the order to run them")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="which of them to begin with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), help="files and folders of src/subquad")
    parser.add_argument("--before", type=Path, help="a checkout with earlier tests, for what these do not find")
    given = parser.parse_args()
    found = lost = 0
    with tempfile.TemporaryDirectory(prefix="subquad-faults-") as at:
        source = Path(at) / "src"
        shutil.copytree(ROOT / "src", source)
        for folder in filter(None, (ROOT, given.before)):
            if error := found_by(None, source, folder, [*given.files, "--collect-only"]):
                raise SystemExit(f"The tests of {folder} cannot be collected without a fault: {error}")
        faults = chosen(given.count, given.seed, given.rooms)[given.first :]
        for number, fault in enumerate(faults, given.first):
            begun = time.perf_counter()
            words = tests_of(fault, given.files)
            by = found_by(fault, source, ROOT, words)
            found += by is not None
            if by is None and given.before and (earlier := found_by(fault, source, given.before, words)):
                lost, by = lost + 1, f"LOST: {earlier}"
            print(f"{number:3d} {fault}: {by or 'not found'} ({time.perf_counter() - begun:.0f} s)", flush=True)
    print(f"{found} of {len(faults)} found" + (f", {lost} by the earlier tests alone" if given.before else ""))


if __name__ == "__main__":
    main()
