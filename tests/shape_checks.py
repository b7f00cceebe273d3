"""Which tests check the shapes of the annotations, at every call that they make: it doubles the time of a call."""

from collections.abc import Iterable, Iterator
from zlib import crc32

ONE_OF = 6


def sampled(tests: Iterable[str], one_of: int = ONE_OF) -> Iterator[str]:
    """Yields the tests without parameters, and of those with parameters the first case and one case of six.

    The cases of a test run the same annotated functions. The choice depends on the names alone.
    """
    begun = set()
    for test in tests:
        name = test.partition("[")[0]
        if name not in begun or crc32(test.encode()) % one_of == 0:
            yield test
        begun.add(name)
