import pytest

from subquad.report import drawing


@pytest.fixture
def unpainted(monkeypatch):
    """Figures are made but not painted, which takes most of the time: for tests of which plots there are."""
    monkeypatch.setattr(drawing, "png", lambda figure: b"\x89PNG")
