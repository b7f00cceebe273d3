import pytest
import torch

import subquad as sq
from subquad.kernels import native

VARIANTS = native.variants() if native.refusal() is None else []
IMPLEMENTATIONS = ["reference", *VARIANTS]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """Every way to run an op here: plain PyTorch, and each instruction-set variant of the compiled kernels."""
    if request.param == "reference":
        with sq.use_backend("reference"):
            yield request.param
    else:
        with sq.use_backend("cpu"), native.use_variant(request.param):
            yield request.param


@pytest.fixture(params=VARIANTS)
def variant(request):
    """Each instruction-set variant of the compiled kernels."""
    with native.use_variant(request.param):
        yield request.param


@pytest.fixture
def poisoned():
    """torch.empty hands out NaNs: reading what was never written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
