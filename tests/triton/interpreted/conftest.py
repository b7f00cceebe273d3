from tests.ops.conftest import poisoned

__all__ = ["poisoned"]
