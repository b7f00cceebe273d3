"""Shared code of the scripts with several engines: the checks of their options, and the processes that load rows."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine_workers import EngineError, Worker

import subquad as sq
from subquad.core.errors import InputError, as_input_error
from subquad.tools.data.texts import read_documents, standard_library


def check(engines: Iterable[str], packages: Iterable[str], methods: Iterable[str]) -> None:
    """Check the names of engines and methods.

    Raises:
        InputError: there is no such engine or method, or a method has no such setting.
    """
    unknown = sorted(set(engines) - set(packages))
    if unknown:
        raise InputError(f"no engine {unknown[0]}; there are {', '.join(packages)}")
    with as_input_error():
        for method in methods:
            sq.parse_method(method)


def installed(
    engines: Iterable[str], packages: Mapping[str, Sequence[str]], requirements: str
) -> tuple[list[str], list[str]]:
    """The engines whose packages are installed, and a line about each of the others, which is printed too."""
    available, lines = [], []
    for engine in engines:
        absent = [package for package in packages[engine] if installed_version(package) is None]
        if absent:
            install = f"pip install -c constraints.txt -r benchmarks/{requirements}"
            lines.append(f"{engine}: {', '.join(absent)} not installed: {install}")
            print(lines[-1], file=sys.stderr)
        else:
            available.append(engine)
    return available, lines


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def documents_of(text: Path | None) -> Any:
    """The documents of a file or folder; by default the standard library's documentation."""
    return standard_library() if text is None else read_documents([text])


def started(
    processes: Iterable[str], stack: ExitStack, prepare: Callable[..., dict[Any, Any]] | None = None
) -> dict[str, Worker]:
    """The processes, which end with the stack; `prepare` as in `Worker`."""
    workers = {process: Worker(prepare) for process in dict.fromkeys(processes)}
    for worker in workers.values():
        stack.callback(worker.close)
    return workers


def prepared(workers: Mapping[str, Any], job: Any, rows: Sequence[Any]) -> dict[Any, str]:
    """Have each process load its rows, one process after the other; the reasons of those that it cannot run."""
    failed: dict[Any, str] = {}
    for process, worker in workers.items():
        mine = [row for row in rows if row.process == process]
        if mine:
            print(f"loading {', '.join(map(str, mine))}", file=sys.stderr, flush=True)
            try:
                failed |= worker.ask("prepare", job, mine)
            except EngineError as error:
                failed |= dict.fromkeys(mine, str(error))
    return failed
