"""NaN and infinity in every method; backends are compared only where a method runs compiled code."""

import pytest

import subquad as sq
import tests.library.test_contract as every
from subquad.testing import NonfiniteContract
from tests.library.backends import runs_compiled_code

EXAMPLES = every.TestEveryMethod.examples
VARIANTS = every.TestEveryMethod.methods[len(EXAMPLES) :]
OF_BACKENDS = (
    "test_every_backend_equals_the_reference",
    "test_a_mean_of_the_largest_numbers_is_finite_where_the_reference_is",
)


class OnNonfiniteNumbers(NonfiniteContract):
    def is_long(self, test: str, method: sq.Method) -> bool:
        return test in OF_BACKENDS and not runs_compiled_code(method)


class TestEveryMethodOnNonfiniteNumbers(OnNonfiniteNumbers):
    pytestmark = pytest.mark.covering
    methods = EXAMPLES


class TestVariantsOnNonfiniteNumbers(OnNonfiniteNumbers):
    pytestmark = pytest.mark.covering(strength=1)
    methods = every.TestEveryMethod.of_other_code


@pytest.mark.long
class TestAllVariantsOnNonfiniteNumbers(OnNonfiniteNumbers):
    methods = tuple(VARIANTS)


def test_methods_with_kernels_run_compiled_code():
    """So that the comparison of backends leaves none of them out."""
    assert {sq.METHODS[name] for name in ("clustered", "i-clustered", "lha", "linear", "local")} <= {
        type(method) for method in EXAMPLES if runs_compiled_code(method)
    }
    assert not runs_compiled_code(sq.Full())
