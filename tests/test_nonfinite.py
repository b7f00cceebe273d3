import pytest

import subquad as sq
import tests.test_contract as every
from tests.contract import MethodContract
from tests.nonfinite_contract import NonfiniteContract

EXAMPLES, VARIANTS = (
    every.TestEveryMethod.methods[some] for some in (slice(len(sq.list_methods())), slice(len(sq.list_methods()), None))
)
OF_OTHER_CODE = (  # than their method's example
    "lsh:buckets=4,hash=random,tail=2",
    "lsh:buckets=3,selection=argmax",
    "lha:buckets=3,hidden=8,selection=argmax",
    "local:window=3,positions=relative",
    "mixed-heads:methods=local:window=3+clustered:clusters=5;bits=15;iterations=3",
    "performer:features=9,kind=relu",
    "performer:features=16,kind=favor++,norm=30.0",
    "linformer:k=5,sharing=key-value,start=random,ends=pooled",
    "linformer:k=5,projection=convolution",
    "nystrom:landmarks=5,convolution=4",
    "tilted-pool:segments=0,window=5",
    "learned-feature-map:features=12,window=0,sinks=2",
)


class TestEveryMethodOnNonfiniteNumbers(NonfiniteContract):
    methods = EXAMPLES
    pytest_generate_tests = MethodContract.pytest_generate_tests


class TestVariantsOnNonfiniteNumbers(NonfiniteContract):
    methods = tuple(map(sq.parse_method, OF_OTHER_CODE))
    pytest_generate_tests = MethodContract.pytest_generate_tests


@pytest.mark.long
class TestAllVariantsOnNonfiniteNumbers(NonfiniteContract):
    methods = tuple(VARIANTS)
    pytest_generate_tests = MethodContract.pytest_generate_tests
