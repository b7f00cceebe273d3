"""Executors for the cells of a long run: in this process, in processes of this machine, or on a Ray cluster."""

from importlib.util import find_spec

from subquad.core.errors import InputError, not_installed
from subquad.core.spelling import instead
from subquad.tools.runs.executors.executor import Executor, LocalExecutor, WorkerError
from subquad.tools.runs.executors.job_resources import read_resources
from subquad.tools.runs.executors.worker_processes import ProcessExecutor

__all__ = ["EXECUTORS", "LOCAL", "Executor", "LocalExecutor", "ProcessExecutor", "WorkerError", "make_executor"]

EXECUTORS = ("here", "processes", "ray")
LOCAL = LocalExecutor()
MOST_WORKERS = 10_000


def make_executor(
    name: str = "here",
    *,
    workers: int | None = None,
    address: str | None = None,
    resources: str | None = None,
    device: str = "cpu",
) -> Executor:
    """The executor that the options of a command ask for; workers start when it is entered, or used.

    Raises:
        InputError: an unknown name, options that another executor has, a number of workers that cannot be, a numbered
            device, or Ray is not installed.
    """
    if name not in EXECUTORS:
        raise InputError(f"no executor {name!r}{instead(name, EXECUTORS, '')}")
    for option, value, takes in (
        ("--workers", workers, ("processes", "ray")),
        ("--address", address, ("ray",)),
        ("--resources", resources, ("ray",)),
    ):
        if value is not None and name not in takes:
            raise InputError(f"{option} {value} is for --executor {' or '.join(takes)}, but the executor is {name!r}")
    if name == "here":
        return LOCAL
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise InputError(f"workers {workers} must be at least 1 and at most {MOST_WORKERS:,}")
    if ":" in device:
        raise InputError(f"--device {device} names one GPU, but each worker gets its own: give --device cuda")
    if name == "processes":
        return ProcessExecutor(workers, device)
    if find_spec("ray") is None:
        raise InputError(not_installed("ray", "ray"))
    from subquad.tools.runs.executors.on_ray import RayExecutor

    return RayExecutor(address, workers, read_resources(resources, device), device)
