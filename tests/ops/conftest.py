import pytest

import subquad as sq
from subquad.ops import native

IMPLEMENTATIONS = ["reference", *(native.variants() if native.refusal() is None else [])]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """Every way to run an op here: plain PyTorch, and each instruction-set variant of the compiled kernels."""
    if request.param == "reference":
        with sq.use_backend("reference"):
            yield request.param
    else:
        with sq.use_backend("cpu"), native.use_variant(request.param):
            yield request.param
