import pytest

import subquad as sq
import tests.test_contract as every
from tests.contract import MethodContract
from tests.nonfinite_contract import NonfiniteContract

EXAMPLES, VARIANTS = (
    every.TestEveryMethod.methods[some] for some in (slice(len(sq.list_methods())), slice(len(sq.list_methods()), None))
)


class TestEveryMethodOnNonfiniteNumbers(NonfiniteContract):
    methods = EXAMPLES
    pytest_generate_tests = MethodContract.pytest_generate_tests


class TestVariantsOnNonfiniteNumbers(NonfiniteContract):
    methods = tuple(map(sq.parse_method, every.OF_OTHER_CODE))
    pytest_generate_tests = MethodContract.pytest_generate_tests


@pytest.mark.long
class TestAllVariantsOnNonfiniteNumbers(NonfiniteContract):
    methods = tuple(VARIANTS)
    pytest_generate_tests = MethodContract.pytest_generate_tests
