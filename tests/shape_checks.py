"""Choose the tests that check the shapes of the annotations at every call, which doubles the time of a call."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from inspect import isfunction
from types import FunctionType
from typing import Any, get_args
from zlib import crc32

import jaxtyping
import torch
from jaxtyping import _decorator

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


def has_arrays(annotation: Any) -> bool:
    """True if an annotation names the shape of a tensor, or is a string, which is not read."""
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    parts = annotation if isinstance(annotation, list) else get_args(annotation)
    return isinstance(annotation, str) or any(map(has_arrays, parts))


def make_checks_late() -> None:
    """Let jaxtyping make the checks of a function when it is first called with checks switched on.

    It would make them where a function is defined: of all functions of the package in each process, of which most are
    never called there, and of a function inside another one at every call of the outer one, checked or not. A function
    whose annotations name no shapes is given to beartype alone, which takes a fraction of the time.
    """
    at_once, settings, is_compiling = _decorator.jaxtyped, jaxtyping.config, torch.compiler.is_compiling

    from beartype import BeartypeConf, beartype  # here, because a GPU's machine may lack it

    def checked(fn: Callable[..., Any], typechecker: Callable[..., Any]) -> Callable[..., Any]:
        if any(map(has_arrays, fn.__annotations__.values())):
            return at_once(fn, typechecker=typechecker)
        return beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))(fn)

    def jaxtyped(fn: Any = _decorator._sentinel, *, typechecker: Any = _decorator._sentinel) -> Any:
        if not isfunction(fn) or not callable(typechecker):
            return at_once(fn, typechecker=typechecker)  # which calls this function for those of a class or a property
        with_checks: Callable[..., Any] | None = None

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal with_checks
            if settings.jaxtyping_disable:
                return fn(*args, **kwargs)
            if with_checks is None:
                if is_compiling():  # a traced function cannot make them
                    return fn(*args, **kwargs)
                with_checks = checked(fn, typechecker)
            return with_checks(*args, **kwargs)

        # With the globals of jaxtyping, for all that look whose frames they see.
        return wraps(fn)(FunctionType(call.__code__, vars(_decorator), closure=call.__closure__))

    _decorator.jaxtyped = jaxtyping.jaxtyped = jaxtyped
