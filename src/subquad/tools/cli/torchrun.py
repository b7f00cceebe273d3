"""The processes of a command that torchrun started: the first of them prints and writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count as count_up
from typing import TYPE_CHECKING, Any

import typer

from subquad.tools.cli.progress import Reported, progress_bar
from subquad.tools.runs.processes import count, number

if TYPE_CHECKING:
    from subquad.tools.measure.group import MeasuringGroup

ALONE = ("calibrate", "inspect")  # commands that run in one process
WAIT = timedelta(minutes=10)  # for a rank that does not answer
FIRST = timedelta(seconds=3)  # in which the first rank reports what all have found
REPORTED = "reports why all end"  # a key of the store of the processes
_runs = count_up()  # of commands in this process


def check(command: str) -> None:
    """End a command that runs in one process where there are several; the first one reports it."""
    from subquad.core.errors import InputError

    if command in ALONE and count() > 1:
        with one_reports():
            raise InputError(
                f"subquad {command} runs in one process, but torchrun started {count()}: start it without torchrun; "
                "subquad bench, compare, plan and train split the tokens of an input over processes"
            )


@contextmanager
def one_reports() -> Iterator[None]:
    """Errors that all processes have in common are printed by the first; the others end with the same exit code."""
    from subquad.core.errors import InputError

    try:
        yield
    except InputError:
        if number():
            raise typer.Exit(2) from None
        raise


@contextmanager
def progress() -> Iterator[Reported]:
    """A bar, in the first process; the others are quiet."""
    if number():
        yield Reported(lambda what, done, total, left: None)
        return
    with progress_bar() as shown:
        yield shown


@contextmanager
def group(device: str) -> Iterator["MeasuringGroup"]:
    """The processes that split the tokens of every input; this one alone where torchrun started no others.

    An error that ends one of them ends all, and one reports why: the first if all have the same reason, otherwise
    the one that has it.
    """
    from subquad.tools.measure.group import ALONE, MeasuringGroup

    if count() == 1:
        yield ALONE
        return
    import torch.distributed as dist

    from subquad.distributed import Ranks
    from subquad.tools.runs.launcher import Stopped, stopped_by_launcher

    with one_reports():
        backend = _backend(device)
    everywhere, rank, ranks = next(dist.rendezvous("env://", timeout=WAIT))  # type: ignore[attr-defined]
    # Groups of this process that follow each other share no keys.
    store = dist.PrefixStore(f"subquad run {next(_runs)}", everywhere)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=WAIT)
    try:
        with stopped_by_launcher():
            yield MeasuringGroup(Ranks())
    except (Exception, KeyboardInterrupt, Stopped) as error:
        if _another_reports(store):
            raise typer.Exit(130 if isinstance(error, KeyboardInterrupt) else 2) from None
        _say(error)
    finally:
        dist.destroy_process_group()


def _backend(device: str) -> str:
    """The backend for messages between tensors of this device, which then is one of this process' own."""
    import torch

    from subquad.core.errors import InputError

    kind, _, which = device.partition(":")
    have = torch.cuda.device_count() if kind == "cuda" else 0
    if not have:  # where the device is checked, it is refused
        return "gloo"
    here, local = int(os.environ.get("LOCAL_WORLD_SIZE", count())), int(os.environ.get("LOCAL_RANK", number()))
    if which:
        raise InputError(f"--device {device} is one GPU, but torchrun started {count()} processes; give --device cuda")
    if here > have:
        gpus = f"{have} GPU{'s' * (have > 1)}"
        raise InputError(f"torchrun started {here} processes on this machine, which has {gpus}; start {have}")
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"


def _another_reports(store: Any) -> bool:
    """True if another process reports why all end, by their store. The first one is given a moment to do so."""
    import torch.distributed as dist

    with suppress(RuntimeError):  # it has ended with the process that had it
        if number():
            with suppress(dist.DistStoreError):
                store.wait([REPORTED], FIRST)
        return bool(store.add(REPORTED, 1) > 1)
    return True


def _say(error: Any) -> None:
    """Raise this process's error about the end of all."""
    from subquad.core.errors import InputError
    from subquad.distributed.failures import RankLost
    from subquad.tools.runs.launcher import Stopped

    again = "the same command resumes from here"
    if isinstance(error, RankLost):
        raise InputError(f"{error}; {again}") from error
    if isinstance(error, Stopped):
        raise InputError(f"the launcher stopped the run, because a process of {count()} has ended; {again}") from None
    if isinstance(error, InputError) and number():
        raise InputError(f"rank {number()}: {error}") from error
    raise error
