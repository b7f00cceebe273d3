"""Figures of the design of the tools that must not grow."""

import ast

import pytest

from tests.identifiers import SOURCE, python_files
from tests.targets import (
    BENCHMARKS,
    OVER_RANKS,
    TOOLS,
    added_arguments,
    clock_reads,
    lines,
    outside_measure,
    places,
    shared_names,
    table,
    typed_dicts,
)

TYPED_DICTS = 0  # in tools
ADDED_ARGUMENTS = 5  # in benchmarks
CLOCK_READS = 7  # in tools outside measure, for elapsed time that is displayed or recorded
SHARED_NAMES = 18  # such as `op.py` of every op and `command.py` of every command


@pytest.mark.parametrize(
    ("find", "files", "most", "remedy"),
    [
        (typed_dicts, python_files([TOOLS]), TYPED_DICTS, "a record is a frozen dataclass"),
        (added_arguments, python_files([BENCHMARKS]), ADDED_ARGUMENTS, "use `run` of benchmarks/sheet.py"),
        (clock_reads, outside_measure(), CLOCK_READS, "use measure/timing.py, or Deadline of measure/deadline.py"),
    ],
    ids=["TypedDict", "add_argument", "clocks"],
)
def test_a_figure_does_not_grow(find, files, most, remedy):
    found = places(find, files)
    assert len(found) <= most, f"{len(found)} places, but at most {most} are allowed; {remedy}:\n" + "\n".join(found)


def test_typed_dicts_are_found():
    tree = ast.parse(
        "from typing import TypedDict\nclass A(TypedDict, total=False): ...\nclass B(typing.TypedDict): ...\n"
        "C = TypedDict('C', {})\nclass D(dict): ...\nx: TypedDict"
    )
    assert sorted(typed_dicts(tree)) == [2, 3, 4]


def test_arguments_of_scripts_are_found():
    tree = ast.parse("parser.add_argument('--x')\nparser.add_argument_group('y').add_argument(\n'--z')\nadd_argument()")
    assert sorted(added_arguments(tree)) == [1, 2]


def test_clocks_are_found_under_any_name():
    tree = ast.parse(
        "import time\nfrom time import monotonic as now, sleep\nimport time as t\ntime.perf_counter()\nnow()\n"
        "f(clock=time.time)\nt.monotonic_ns()\ntime.sleep(1)\nsleep(1)\nself.time.time()\ntime.process_time()"
    )
    assert sorted(clock_reads(tree)) == [4, 5, 6, 7]


def test_shared_names_and_lines_are_counted(tmp_path):
    for name in ("a/run.py", "b/run.py", "b/plan.py", "a/__init__.py", "b/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("one\ntwo\n")
    files = python_files([tmp_path])
    assert shared_names(files) == {"run.py": [tmp_path / "a/run.py", tmp_path / "b/run.py"]}
    assert lines(files) == 10
    assert not shared_names([tmp_path / "lha.py", OVER_RANKS / "lha.py"])


def test_shared_names_do_not_grow():
    shared = shared_names(python_files([SOURCE]))
    assert len(shared) <= SHARED_NAMES, f"{sorted(shared)}; say in a new file's name what it holds"


def test_the_table_has_a_value_for_each_target():
    values = dict(table())
    assert values["TypedDict in tools"] == str(len(places(typed_dicts, python_files([TOOLS]))))
    assert values["pairs of folders of tools that import each other"] == "0"
    assert len(values) == 7
