"""Shared code of the scripts with several engines: the checks of their options, and the processes that load rows."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from engine_workers import EngineError, Worker

import subquad as sq
from subquad.core.errors import InputError
from subquad.tools.data.texts import read_documents, standard_library


def run_checked(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, run: Callable[[argparse.Namespace], None]
) -> None:
    """Run on `--threads` threads; mistakes in the options are errors of the parser."""
    torch.set_num_threads(arguments.threads)
    try:
        for method in arguments.methods:
            sq.parse_method(method)
        run(arguments)
    except (InputError, ValueError) as error:
        parser.error(str(error))


def check_engines(parser: argparse.ArgumentParser, engines: Iterable[str], packages: Mapping[str, Any]) -> None:
    """End with an error of the parser where there is no such engine."""
    unknown = sorted(set(engines) - set(packages))
    if unknown:
        parser.error(f"no engine {unknown[0]}; there are {', '.join(packages)}")


def installed(engines: Iterable[str], missing: Callable[[str], str | None]) -> tuple[list[str], list[str]]:
    """The engines that are installed, and a line about each of the others, which is printed too."""
    reasons = {engine: missing(engine) for engine in engines}
    absent = [reason for reason in reasons.values() if reason is not None]
    for line in absent:
        print(line, file=sys.stderr)
    return [engine for engine, reason in reasons.items() if reason is None], absent


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
