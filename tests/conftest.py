import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from jaxtyping import config as jaxtyping_config

from tests.covering import mark_long
from tests.shape_checks import ONE_OF, make_checks_late, sampled

# Before subquad. A GPU's machine may lack beartype: the tests of Triton's kernels run without shape checks.
with suppress(ModuleNotFoundError):
    make_checks_late()
jaxtyping_config.update("jaxtyping_disable", True)  # while tests are collected

# The conformance suite is code of tests: pytest explains its assertions, and shapes are not checked in its functions.
sys.meta_path.sort(key=lambda finder: type(finder).__name__ != "AssertionRewritingHook")

torch.set_num_threads(1)  # tests are tiny and run side by side: more threads would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also in the processes that tests start

# torch.manual_seed queues a seed for each kind of device that is not in use yet, with the formatted stack. Without such
# devices that is for nothing, and tests seed often.
if not torch.accelerator.is_available():
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = lambda seed: None

collect_ignore = ["other_package"]  # installed by tests, into environments of their own
CHECKED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("shapes_in_one_of", "check shapes in one of this many cases of a test (1: in all)", default=ONE_OF)


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is long
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_long(items)
    chosen = set(sampled([item.nodeid for item in items], int(config.getini("shapes_in_one_of"))))
    for item in items:
        item.stash[CHECKED] = item.nodeid in chosen


def pytest_collection_finish() -> None:
    """Exclude the objects that exist after collection from the search for garbage and from `gc.get_objects`.

    `swap` looks through these for models that share a config with a part, or contain it. So it does not find a model
    that is made while tests are collected.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def freeze_after_module() -> Iterator[None]:
    """Excludes what a module's tests leave for good too, such as imported modules and cached results.

    So `swap` does not find a model of an earlier module of tests either.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True, optionalhook=True)  # before pytest-xdist's own answer, where it is installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Lets neighbouring tests run in one process, which makes what a module's tests share only once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("data") and not os.environ.get("SUBQUAD_DATA"):
        pytest.skip("SUBQUAD_DATA is not set")
    jaxtyping_config.update("jaxtyping_disable", not item.stash[CHECKED])


@pytest.fixture
def shapes_are_checked(request: pytest.FixtureRequest) -> bool:
    """True if the annotations of shapes are checked in this test."""
    return request.node.stash[CHECKED]


@pytest.fixture
def unchecked() -> None:
    """No checks of shapes: for errors that they would come before, and for nested tensors of the strided layout."""
    jaxtyping_config.update("jaxtyping_disable", True)  # until the end of the test


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a run of tests have in common, for what takes long to make; with a lock there."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script of benchmarks/ by its name."""
    # As for a script, and for the processes that it starts.
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module


@pytest.fixture
def in_threads(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the scripts with several engines load and run rows in threads: processes would import everything again."""
    workers = script("engine_workers")

    class Thread(threading.Thread):
        exitcode = None

        def terminate(self) -> None:
            """Does nothing: the thread has ended after its last request."""

    class Worker(workers.Worker):
        def __init__(self, prepare: Callable[..., dict[Any, Any]] | None = None):
            self.connection, theirs = Pipe()
            self.process = Thread(target=workers.serve, args=(theirs, prepare), daemon=True)
            self.process.start()

    monkeypatch.setattr(script("engine_runs"), "Worker", Worker)
    with patch.dict(os.environ):  # which their process sets for itself
        yield


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs an imported script of benchmarks/ with the words of a command line; raises SystemExit if it fails."""

    def run(module: ModuleType, *words: str) -> None:
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{module.__name__}.py", *words])
        try:
            module.sheet.run(module.main)
        except SystemExit as end:
            if end.code:
                raise

    return run
