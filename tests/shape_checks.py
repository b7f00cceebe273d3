"""Which tests check the shapes of the annotations, at every call that they make: it doubles the time of a call."""

from collections.abc import Iterable, Iterator
from zlib import crc32

ONE_OF = 6
OF_WHOLE_RUNS = ("tests/research/training/", "tests/tools/workflows/", "tests/research/papers/", "tests/tools/cli/")


def sampled(tests: Iterable[str], one_of: int = ONE_OF) -> Iterator[str]:
    """Yields the tests without parameters, and of those with parameters the first case and one case of six.

    The cases of a test run the same annotated functions. Of whole runs, which call everything many times, the tests
    without parameters are sampled like cases. The choice depends on the names alone.
    """
    begun = set()
    for test in tests:
        name, has_parameters, _ = test.partition("[")
        first = name not in begun and (has_parameters or not test.startswith(OF_WHOLE_RUNS))
        if first or crc32(test.encode()) % one_of == 0:
            yield test
        begun.add(name)
