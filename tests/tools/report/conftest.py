import pytest
from markupsafe import Markup

from subquad.tools.compare import write
from subquad.tools.report import drawing, vector


@pytest.fixture
def unpainted(monkeypatch):
    """Figures are made but not painted, which takes most of the time: for tests of which plots there are."""
    monkeypatch.setattr(drawing, "png", lambda figure: b"\x89PNG")
    monkeypatch.setattr(vector, "svg", lambda figure, salt: Markup("<svg></svg>"))


@pytest.fixture
def undrawn(monkeypatch):
    """Comparisons are written without plots."""
    monkeypatch.setattr(write, "plots", lambda report: {})
    monkeypatch.setattr(write, "drawings", lambda report: {})
