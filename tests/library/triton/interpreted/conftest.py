from tests.library.kernels.conftest import poisoned

__all__ = ["poisoned"]
