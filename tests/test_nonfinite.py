import tests.test_contract as every
from tests.contract import MethodContract
from tests.nonfinite_contract import NonfiniteContract


class TestEveryMethodOnNonfiniteNumbers(NonfiniteContract):
    methods = every.TestEveryMethod.methods
    pytest_generate_tests = MethodContract.pytest_generate_tests
