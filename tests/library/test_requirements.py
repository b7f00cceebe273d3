"""Floors and tested versions come from the metadata of the installed package, which pyproject.toml becomes."""

import re
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from subquad.core import requirements, versions
from tests.test_releases import PYPROJECT


def metadata() -> list[str]:
    """The requirements as a build writes them."""
    project = PYPROJECT["project"]
    lines = list(project["dependencies"])
    for extra, declared in project["optional-dependencies"].items():
        for requirement in declared:
            named, _, marker = requirement.partition(";")
            lines.append(f"{named}; {marker} and extra == {extra!r}" if marker else f'{named}; extra == "{extra}"')
    return lines


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    """The requirements of pyproject.toml, whatever is installed; other lines if it is told some."""

    def say(lines):
        monkeypatch.setattr(requirements, "requires", lambda package: lines)
        requirements._declared.cache_clear()

    say(metadata())
    yield say
    requirements._declared.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    """Packages in versions that are not here."""

    def say(**found):
        monkeypatch.setattr(requirements, "installed_version", found.get)

    return say


def test_the_floors_are_those_of_the_project():
    project = PYPROJECT["project"]
    assert {f"{name}>={least}" for name, least in requirements.floors("hf").items()} == set(
        project["optional-dependencies"]["hf"]
    )
    assert {f"{name}>={least}" for name, least in requirements.floors().items()} == set(project["dependencies"])
    assert {"torch", "transformers", "triton"} == set(requirements.untested())


@pytest.mark.parametrize(("package", "extra", "target"), [("torch", "", "."), ("transformers", "hf", "'.[hf]'")])
def test_a_version_below_the_floor_is_refused(installed, package, extra, target):
    installed(**{package: "1.9.1+cu118"})
    least = requirements.floors(extra)[package]
    with pytest.raises(ImportError) as error:
        requirements.check([package], extra)
    assert str(error.value) == (
        f"{package} 1.9.1+cu118 is installed, but subquad needs {least} or later: pip install -c constraints.txt "
        f"{target} in a clone of subquad"
    )


@pytest.mark.parametrize(("package", "extra"), [("torch", ""), ("transformers", "hf")])
def test_a_version_newer_than_the_tested_ones_is_a_warning(installed, package, extra):
    installed(**{package: "99.0.0.dev1"})
    limit = requirements.untested()[package]
    with pytest.warns(UserWarning, match=rf"{package} 99\.0\.0\.dev1 is installed, .* before {limit} only") as caught:
        requirements.check([package], extra)
    assert len(caught) == 1


@pytest.mark.parametrize(("package", "extra"), [("torch", ""), ("transformers", "hf")])
def test_the_floor_itself_and_the_tested_versions_pass_silently(installed, package, extra):
    least, limit = requirements.floors(extra)[package], requirements.untested()[package]
    major, minor = limit.split(".")
    for version in (least, f"{least}.1+cpu", f"{least}+git123", f"{major}.{int(minor) - 1}.9"):
        installed(**{package: version})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            requirements.check([package], extra)


def test_every_line_is_read_as_packaging_reads_it():
    """`packaging` comes with transformers; the core must run without it."""
    packaging = pytest.importorskip("packaging.requirements", reason="the extra hf brings packaging")
    expected = set()
    for line in metadata():
        read = packaging.Requirement(line)
        extra = re.search(r"""extra == "([\w-]+)\"""", str(read.marker))
        expected |= {
            (read.name, each.operator, each.version, extra[1] if extra else "")
            for each in read.specifier
            if each.operator in (">=", "<")
        }
    assert len(expected) > 20
    assert set(requirements._declared()) == expected


def test_minor_versions_are_compared_as_numbers(installed, declared):
    declared(["torch>=2.9"])
    installed(torch="2.10.0")
    requirements.check(["torch"])
    declared(["torch>=2.10"])
    installed(torch="2.9.1")
    with pytest.raises(ImportError, match=r"torch 2\.9\.1 is installed, but subquad needs 2\.10 or later"):
        requirements.check(["torch"])


def test_without_metadata_nothing_is_refused(installed, monkeypatch):
    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(requirements, "requires", missing)
    requirements._declared.cache_clear()
    installed(torch="1.0")
    requirements.check(["torch"])
    assert requirements.floors() == requirements.untested() == {}


def test_a_package_from_a_source_tree_has_no_version_to_refuse(installed):
    installed()
    requirements.check(["torch"])


def test_a_package_that_is_not_there_is_named_with_its_extra():
    with pytest.raises(ModuleNotFoundError, match=r"no_such_package is not installed: pip install .* '\.\[hf\]'"):
        requirements.check(["no_such_package"], "hf")


OLD = """
import importlib.metadata as metadata
found = metadata.version
metadata.requires = lambda package: ["torch>=98.1", "torch<98.2; extra == 'tested'"]
metadata.version = lambda package: {version!r} if package == "torch" else found(package)
import subquad
"""


@pytest.mark.parametrize(
    ("version", "code", "message"),
    [
        ("98.0.1", 1, "ImportError: torch 98.0.1 is installed, but subquad needs 98.1 or later"),
        ("98.2.0", 0, "UserWarning: torch 98.2.0 is installed, but subquad was tested with versions before 98.2 only"),
        ("98.1.7", 0, ""),
    ],
)
def test_importing_subquad_checks_torch(version, code, message):
    done = subprocess.run([sys.executable, "-c", OLD.format(version=version)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (message in done.stderr) if message else not done.stderr
    assert done.stderr.count(version) == bool(message)


# ---------------------------------------------------------------------- what older versions lack


def test_the_module_of_what_versions_cost_is_short():
    with open(versions.__file__, encoding="utf-8") as file:
        assert len(file.readlines()) <= 300


def test_the_least_and_the_greatest_of_numbers_compile_as_one_graph():
    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def shapes(x):
        least, most = versions.sym_min(x.shape[0], 4), versions.sym_max(x.shape[0], 4)
        return x.new_zeros(least, most, versions.sym_min(3, 5), versions.sym_max(3, 5))

    assert shapes(torch.zeros(2)).shape == (2, 4, 3, 5)
    assert shapes(torch.zeros(6)).shape == (4, 6, 3, 5)


def test_an_exported_program_takes_either_side_of_a_least_number():
    class Cut(torch.nn.Module):
        def forward(self, x):
            return x.new_ones(versions.sym_min(x.shape[0], 4))

    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Cut(), (torch.ones(9),), dynamic_shapes=({0: batch},), strict=False).module()
    assert program(torch.ones(3)).shape == (3,)
    assert program(torch.ones(30)).shape == (4,)
