import math
from dataclasses import replace
from pathlib import Path

import pytest
from markupsafe import Markup

import tests.libraries  # noqa: F401
from subquad.tools.calibrate import fitted as calibrated
from subquad.tools.calibrate import run as fitting
from subquad.tools.compare import recommend
from subquad.tools.compare import run as compare
from subquad.tools.report import drawing, vector
from tests.tools.workflows import tiny

PNG, SVG = drawing.png, vector.svg
FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs of commands are a job of their own."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def unpainted(monkeypatch):
    """Plots are made but not painted, which is most of the time of a tiny run; `tests/tools/report` looks at them."""
    monkeypatch.setattr(drawing, "png", lambda figure: b"\x89PNG")
    monkeypatch.setattr(vector, "svg", lambda figure, salt: Markup("<svg></svg>"))


@pytest.fixture(autouse=True)
def without_16_bit_products(monkeypatch):
    """Comparisons add no rows in bf16, on whatever processor the tests run, unless a test asks for them."""
    for name in ("has_products", "has_tiles"):
        monkeypatch.setattr(compare, name, lambda device, dtype: False)


@pytest.fixture
def undisturbed(monkeypatch):
    """Other work on the machine that runs the tests leaves no length without a recommendation."""
    monkeypatch.setattr(recommend, "TOO_NOISY", math.inf)


@pytest.fixture
def faster_at(monkeypatch, undisturbed):
    """Let every method be faster than exact attention at these lengths, and at no other."""

    def put(*lengths: int) -> None:
        monkeypatch.setattr(recommend, "is_faster", lambda method, length: int(length) in lengths)

    return put


@pytest.fixture
def painted(unpainted, monkeypatch):
    monkeypatch.setattr(drawing, "png", PNG)
    monkeypatch.setattr(vector, "svg", SVG)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a tiny model, by name; made once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def folder(name):
        if name not in made:
            made[name] = tiny.save(name, root / name)
        return str(made[name])

    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder of text files."""
    folder = tmp_path_factory.mktemp("text")
    for i, document in enumerate(tiny.documents()):
        (folder / f"{i}.txt").write_text(document)
    return folder


@pytest.fixture
def other_text(tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    for i, document in enumerate(tiny.documents(count=4)):
        (folder / f"{i}.txt").write_text(document[::-1])
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Three steps of fitting, counted."""
    begun = []

    def few(settings, *rest):
        begun.append(settings.method)
        return fitting.fit(replace(settings, steps=3), *rest)

    monkeypatch.setattr(calibrated, "fit", few)
    return begun


@pytest.fixture
def short(monkeypatch):
    """Let the command measure at short lengths only."""
    prepare = compare.prepare

    def prepare_short(settings, *rest):
        lengths = (96,) if settings.max_length is None else None
        return prepare(replace(settings, lengths=lengths, op_lengths=(32, 64), passages=6), *rest)

    monkeypatch.setattr(compare, "prepare", prepare_short)
