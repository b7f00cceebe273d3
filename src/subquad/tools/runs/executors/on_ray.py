"""Works on the machines of a Ray cluster."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch

from subquad.core.errors import InputError
from subquad.tools.measure.deadline import Deadline
from subquad.tools.runs.executors.attempt import JobFailure, WorkerEnvironment, attempt
from subquad.tools.runs.executors.executor import LostWorker, WorkerExecutor
from subquad.tools.runs.executors.job_resources import JobResources
from subquad.tools.runs.executors.worker_processes import environment_variables, pickled
from subquad.tools.runs.jobs import Job

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # else Ray prints that it reports usage, and does
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it prints what it is about to do
    "RAY_worker_niceness": "0",  # else its workers run with 15, and whatever else runs lengthens the times they measure
}
SMALLEST_STORE = 80_000_000  # bytes of shared memory for what Ray passes on: records are small
NAMED = ("local", "auto")  # addresses that Ray knows by name: a cluster of its own, and the one of this machine
PATIENCE = 40.0  # seconds without an answer from the head after which a run ends; after 60, Ray ends the process itself


@dataclass(frozen=True)
class _Node:
    """A machine of the cluster."""

    name: str  # Ray's id of it
    has: dict[str, float]

    def room(self, wanted: dict[str, float]) -> int:
        """The number of jobs with these resources that fit on it."""
        return min(int(self.has.get(what, 0) / count) for what, count in wanted.items())


class RayExecutor(WorkerExecutor):
    """Works as tasks of a Ray cluster, or of one that is started on this machine for the run.

    Args:
        address: the address of a cluster; None is the one that RAY_ADDRESS names, or else this machine alone.
        workers: the most jobs at once; None is as many as the cluster has room for.
        resources: the resources of each job.
        device: the device that jobs compute on.
    """

    def __init__(self, address: str | None, workers: int | None, resources: JobResources, device: str = "cpu"):
        super().__init__()
        self.address = address or os.environ.get("RAY_ADDRESS") or "local"
        self.workers, self.resources, self.device = workers, resources, device
        self.threads = torch.get_num_threads()
        self._tasks: dict[Any, tuple[str, str]] = {}  # by Ray's reference: the key, and the machine of a timed job
        self._head: tuple[str, int] | None = None  # where the head of the cluster listens; not known of a Ray client
        self._known: list[_Node] = []
        self._quiet = ExitStack()
        self._had_room: JobResources | None = None  # what some machine had room for

    def __enter__(self) -> RayExecutor:
        import ray
        import ray.cloudpickle

        self._ray, local = ray, self.address == "local"
        local_options = {
            "num_cpus": self._local_cpus(),
            "object_store_memory": SMALLEST_STORE,
            "include_dashboard": False,
        }
        self._check_address()
        try:
            with environment_variables(RAY_ENVIRONMENT), _same_sigterm():
                ray.init(self.address, logging_level="ERROR", log_to_driver=False, **(local_options if local else {}))
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"no Ray cluster to use at --address {self.address}: {reason}") from error
        self._remote = ray.remote(max_retries=0)(attempt)
        if not self.address.startswith("ray://"):
            self._head = _host_and_port(ray.get_runtime_context().gcs_address)
        self._quiet.enter_context(redirect_stdout(sys.stderr))  # Ray reports lost workers in addition to the results
        return self

    def _check_address(self) -> None:
        """InputError where nothing listens at the address: Ray itself would try for minutes."""
        if self.address in NAMED:
            return
        location = _host_and_port(self.address.removeprefix("ray://"))
        if location is None:
            raise InputError(f"--address {self.address!r} is not of the form HOST:PORT, such as 10.0.0.1:6379")
        if reason := _unreachable(location):
            raise InputError(f"no Ray cluster to use at --address {self.address}: {reason}")

    def close(self) -> None:
        """Leave the cluster; one that was started for the run ends."""
        self._ray.shutdown()
        self._quiet.close()

    def check_device(self, device: str) -> None:
        """InputError for a device that cannot be; other machines may have GPUs that this one lacks."""
        if device != "cuda":
            super().check_device(device)

    @property
    def description(self) -> str:
        """The description in reports."""
        return f"Ray, {self.resources}"

    @property
    def width(self) -> int:
        """The number of jobs that the machines have room for, and at most the workers that were asked for."""
        room = sum(node.room(self.resources.wanted) for node in self._nodes())
        return min(room, self.workers or room)

    @property
    def machines(self) -> int:
        """Machines that have room for a job."""
        return min(len(self._nodes()), self.workers or len(self._nodes()))

    def start(self, job: Job[Any]) -> None:
        """Hand a task to Ray; one that measures time to a machine without any of ours, with all of its cores."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        wanted, node, where = dict(self.resources.options), "", {}
        if job.timed:
            taken, nodes = {name for _, name in self._tasks.values()}, self._nodes()
            chosen = next((node for node in nodes if node.name not in taken), nodes[0])
            node, wanted["num_cpus"] = chosen.name, chosen.has["CPU"]
            where = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        threads = self.threads if job.timed else max(int(self.resources.cpus), 1)
        environment = WorkerEnvironment.current(self.device, threads, job.timed)
        call = pickled(job, self._ray.cloudpickle.dumps)
        self._tasks[self._remote.options(**wanted, **where).remote(call, environment)] = job.key, node

    def ended(self) -> list[tuple[str, Any]]:
        """Wait until something ends. InputError where the cluster goes meanwhile."""
        ready: list[Any] = []
        silence = Deadline(PATIENCE)
        while not ready:
            try:
                ready, _ = self._ray.wait(list(self._tasks), num_returns=1, timeout=PATIENCE / 8)
            except (ConnectionError, self._ray.exceptions.RaySystemError) as error:
                raise self._lost_cluster() from error
            if not _unreachable(self._head):
                silence = Deadline(PATIENCE)
            elif silence.left < 0:
                raise self._lost_cluster()
        return [(self._tasks.pop(task)[0], self._outcome(task)) for task in ready]

    def drop(self) -> None:
        """Stop what runs."""
        for task in self._tasks:
            self._ray.cancel(task, force=True)
        self._tasks.clear()

    def _outcome(self, task: Any) -> Any:
        """The result of a task, or how its worker went."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(task)
        except errors.RayTaskError as error:  # before the job began: the package is not there, for example
            last = str(error).strip().splitlines()[-1]
            return JobFailure(type(error.cause).__name__, f"a worker could not start it: {last}", str(error), True)
        except errors.RayError as error:
            first = str(error).strip().partition(". ")[0].splitlines()[0]
            return LostWorker(f"{type(error).__name__}: {first}")

    def _lost_cluster(self) -> InputError:
        """The error that ends a run whose cluster is gone."""
        return InputError("the Ray cluster does not answer any more; what is finished is kept")

    def _nodes(self) -> list[_Node]:
        """The machines that have room for a job. InputError where there are none."""
        if not _unreachable(self._head):  # else Ray would wait for it, and end this process
            alive = (node for node in self._ray.nodes() if node["Alive"])
            self._known = [_Node(node["NodeID"], node["Resources"]) for node in alive]
        nodes = self._known
        able = [node for node in nodes if node.room(self.resources.wanted)]
        if not able and not self.running:
            raise self._no_room(nodes)
        self._had_room = self.resources if able else self._had_room
        return able

    def _no_room(self, nodes: list[_Node]) -> InputError:
        """The error where no machine can take a job: none ever could, or those that could are gone."""
        if self._had_room == self.resources:
            return InputError(
                f"every machine of the Ray cluster with {self.resources} for a cell is gone; what is finished is kept"
            )
        largest = max((JobResources.of_machine(node.has) for node in nodes), default=JobResources(0.0), key=_size)
        return InputError(
            f"a cell takes {self.resources}, but the largest machine of the Ray cluster has {largest}: give less in "
            "--resources"
        )

    def _local_cpus(self) -> int:
        """The cores that Ray may share out on this machine."""
        return max(int((self.workers or 0) * self.resources.cpus), 1) if self.workers else os.cpu_count() or 1


def _size(has: JobResources) -> tuple[float, ...]:
    """By what machines are compared."""
    return has.gpus, has.cpus, float(has.memory)


@contextmanager
def _same_sigterm() -> Iterator[None]:
    """In the block, Ray replaces what this process does on SIGTERM; afterwards it does what it did before."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _host_and_port(address: str) -> tuple[str, int] | None:
    """The parts of HOST:PORT; None for another text."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


def _unreachable(location: tuple[str, int] | None) -> str:
    """The reason why nothing answers at a host and port; empty if something does, or no location is known."""
    try:
        if location is not None:
            socket.create_connection(location, timeout=10).close()
    except (OSError, OverflowError) as error:  # a port past 65,535 overflows
        return getattr(error, "strerror", None) or str(error)
    return ""
