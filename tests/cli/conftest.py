from tests.workflows.conftest import model

__all__ = ["model"]
