"""Conformance tests for attention methods, of subquad and of other packages. They need pytest.

    import subquad.testing
    from theirs import Mine

    class TestMine(subquad.testing.MethodContract):
        method = Mine(width=8)

pytest then runs every test that the traits of the method call for. `methods = [Mine(width=8), Mine(width=1)]` tests
several settings. The parts of the contract can be used alone: `CallContract`, `BatchContract`, `DecodingContract`,
`NonfiniteContract` and `TransformsContract`. `oracle` has exact attention written out, and inputs.
"""

try:
    import pytest
except ModuleNotFoundError:
    from subquad.core.errors import not_installed

    raise ModuleNotFoundError(not_installed("pytest", "test"), name="pytest") from None

PARTS = "batch_contract", "contract", "decoding_contract", "nonfinite_contract", "oracle", "transforms_contract"
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in PARTS))

from subquad.testing.batch_contract import BatchContract
from subquad.testing.contract import CallContract, Contract
from subquad.testing.decoding_contract import DecodingContract
from subquad.testing.nonfinite_contract import NonfiniteContract
from subquad.testing.transforms_contract import TransformsContract

__all__ = [
    "BatchContract",
    "CallContract",
    "Contract",
    "DecodingContract",
    "MethodContract",
    "NonfiniteContract",
    "TransformsContract",
]


class MethodContract(CallContract, BatchContract, DecodingContract, NonfiniteContract, TransformsContract):
    """Every promise of a method, one test each: see the module for how to run it."""
