"""The contents of a wheel and of a source distribution, with a C++ compiler and without. No network, no isolation."""

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from zipfile import ZipFile

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[1]
LIBRARY = "subquad/kernels/native/libsubquad.so"
SOURCES = {"abi.cpp", "kernels.cpp", "kernels.hpp"}
PAGES = ("base.html.j2", "parts.html.j2", "page.css", "page.js")
TEMPLATES = {f"subquad/tools/{command}/page.html.j2" for command in ("compare", "plan")}
DATA = {"subquad/py.typed", *(f"subquad/tools/report/{name}" for name in PAGES), *TEMPLATES}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the names are those of Linux"),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake outside pip's build environment"),
]


# Functions in sections of their own, so that all their calls are relocations, which can be read.
UNOPTIMISED = {"cmake.build-type": "Debug", "cmake.define.CMAKE_CXX_FLAGS_DEBUG": "-O0 -ffunction-sections"}
USED = {"avx512vpopcnt": "13KmeansScratch", "avx512bf16": "6Factor", "amxbf16": "6Factor"}  # in names, by the variant


def build(what: str, into: Path, **settings: str) -> Path:
    pytest.importorskip("scikit_build_core")
    code = f"from scikit_build_core import build; build.build_{what}({str(into)!r}, {settings!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    (built,) = into.glob("subquad-*")
    return built


def modules() -> set[str]:
    """The files of Python of the package, by their paths in it."""
    package = ROOT / "src" / "subquad"
    return {path.relative_to(package).as_posix() for path in package.rglob("*.py")}


def names_in(wheel: Path) -> set[str]:
    with ZipFile(wheel) as file:
        return set(file.namelist())


@pytest.fixture
def compiled(shared) -> Iterator[tuple[Path, Path]]:
    """A wheel and its build folder; unoptimised, which takes seconds, and leaves all inline functions to be seen.

    One for all processes of tests, of which one has it at a time.
    """
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    wheels, folder = shared / "wheel", shared / "build"
    with FileLock(shared / "build.lock"):
        made = next(wheels.glob("subquad-*"), None)
        yield made or build("wheel", wheels, **UNOPTIMISED, **{"build-dir": str(folder)}), folder


def test_another_isolated_build_in_the_same_folder_compiles_nothing_again(compiled, tmp_path):
    _, folder = compiled
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.cpp.o")}
    info = folder / ".skbuild-info.json"
    info.write_text(info.read_text().replace(sys.prefix, "/an/environment/that/is/gone"))
    cache = (folder / "CMakeCache.txt").stat().st_mtime_ns
    build("wheel", tmp_path, **UNOPTIMISED, **{"build-dir": str(folder)})
    assert (folder / "CMakeCache.txt").stat().st_mtime_ns != cache
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.cpp.o")} == before != {}


def test_one_wheel_serves_every_python(compiled):
    wheel, _ = compiled
    assert wheel.name.split("-", 2)[-1].startswith("py3-none-linux_")


def test_a_wheel_holds_the_library_and_no_sources_and_no_other_library(compiled):
    names = names_in(compiled[0])
    assert {LIBRARY, *DATA, "subquad/__init__.py"} <= names
    assert {name for name in names if ".so" in name} == {LIBRARY}
    assert not {name for name in names if name.endswith((".cpp", ".hpp", "CMakeLists.txt"))}
    assert all(name.startswith("subquad") for name in names)
    info = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    assert names - info - {LIBRARY, *DATA} == {f"subquad/{path}" for path in modules()}


def test_the_library_shows_its_own_functions_only(compiled, tmp_path):
    with ZipFile(compiled[0]) as file:
        path = file.extract(LIBRARY, tmp_path)
    shown = defined_in(Path(path), "-D")
    assert {"subquad_abi_version", "subquad_variants"} <= shown
    assert all(name.startswith("subquad_") for name in shown)


def test_no_function_of_one_variant_can_be_linked_into_another(compiled):
    """The linker keeps one of two inline functions of the same name: it could be one that this CPU cannot run."""
    objects = sorted(compiled[1].rglob("kernels.cpp.o"))
    symbols = {path.parent.name: defined_in(path) - {"DW.ref.__gxx_personality_v0"} for path in objects}
    assert len(symbols) == len(objects) > 1
    assert all(symbols.values())
    for one, other in combinations(symbols, 2):
        assert not symbols[one] & symbols[other], f"in {one} and {other}"


def test_a_variant_compiles_all_kernels_in_which_it_differs(compiled):
    """A kernel that is missing from the lists of `csrc/CMakeLists.txt` would be slower, and equal otherwise."""
    objects = {path.parent.name.removesuffix(".dir"): path for path in compiled[1].rglob("kernels.cpp.o")}
    graphs = {name.removeprefix("kernels_"): called_in(path) for name, path in objects.items()}
    slowest = graphs.get("baseline") or graphs["neon"]
    kernels = entries(slowest)
    assert len(kernels) > 20
    for variant, graph in graphs.items():
        used = USED.get(variant, "")
        expected = {name for name, entry in kernels.items() if any(used in each for each in reached(slowest, entry))}
        assert entries(graph).keys() == expected, variant


def test_the_runtime_of_openmp_is_asked_for_by_the_name_that_torch_brings(compiled):
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    (path,) = compiled[1].glob("libsubquad.so")
    done = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True)
    needed = {line.partition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "(NEEDED)" in line}
    assert {name for name in needed if "omp" in name} == {"libgomp.so.1"}


def test_without_a_compiler_a_wheel_of_python_alone_comes_out(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    wheel = build("wheel", tmp_path, **{"build-dir": str(tmp_path / "build")})
    assert wheel.name.endswith("-py3-none-any.whl")
    names = names_in(wheel)
    assert {*DATA, "subquad/kernels/native/__init__.py"} <= names
    assert not {name for name in names if name.endswith((".so", ".cpp", ".hpp"))}


def test_a_source_distribution_holds_all_that_a_build_needs(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"CMakeLists.txt", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= names
    assert {f"src/subquad/csrc/{name}" for name in SOURCES} <= names
    assert {f"src/{name}" for name in DATA} <= names
    assert not {name for name in names if name.endswith(".so") or name.startswith((".", "benchmarks"))}


def defined_in(path: Path, *options: str) -> set[str]:
    """The names that an object or library defines for others."""
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    command = ["nm", "--defined-only", "--extern-only", "--format=posix", *options, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


def called_in(path: Path) -> dict[str, set[str]]:
    """The names that each function and table of an object refers to, by its section."""
    if sys.platform != "linux" or shutil.which("objdump") is None:
        pytest.skip("no objdump of ELF files")
    listed = subprocess.run(["objdump", "-r", str(path)], capture_output=True, text=True, check=True).stdout
    records = (record.partition("]") for record in listed.split("RELOCATION RECORDS FOR [")[1:])
    return {
        section.removeprefix(".text."): {
            name.removeprefix(".text.") for name in re.findall(r"R_\w+ +(\S+?)(?:[-+]0x\w+)?$", lines, re.MULTILINE)
        }
        for section, _, lines in records
    }


def entries(graph: dict[str, set[str]]) -> dict[str, str]:
    """The functions of a variant's table, by the kernel."""
    table = next(names for section, names in graph.items() if section.startswith(".data.rel.ro"))
    return {re.fullmatch(r"_ZN\d+[a-z0-9]+L\d+([a-z_]+)ERK.*", name)[1]: name for name in table}


def reached(graph: dict[str, set[str]], entry: str) -> set[str]:
    """The function, and all that it calls."""
    found, left = {entry}, [entry]
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found
