import pytest

import subquad as sq
import tests.test_contract as every
from tests.contract import MethodContract
from tests.nonfinite_contract import NonfiniteContract


class TestEveryMethodOnNonfiniteNumbers(NonfiniteContract):
    methods = every.TestEveryMethod.methods[: len(sq.list_methods())]
    pytest_generate_tests = MethodContract.pytest_generate_tests


@pytest.mark.slow
class TestVariantsOnNonfiniteNumbers(NonfiniteContract):
    methods = every.TestEveryMethod.methods[len(sq.list_methods()) :]
    pytest_generate_tests = MethodContract.pytest_generate_tests
