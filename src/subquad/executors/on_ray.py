"""Works on the machines of a Ray cluster."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch

from subquad.errors import InputError
from subquad.executors.attempt import Failed, Place, attempt
from subquad.executors.base import Distributed, Lost, Work
from subquad.executors.processes import environment, pickled
from subquad.executors.resources import Resources

SMALLEST_STORE = 80_000_000  # bytes of shared memory for what Ray passes on: records are small


@dataclass(frozen=True)
class _Node:
    """A machine of the cluster."""

    name: str  # Ray's id of it
    has: dict[str, float]

    def room(self, wanted: dict[str, float]) -> int:
        """How many works with these resources fit on it."""
        return min(int(self.has.get(what, 0) / count) for what, count in wanted.items())


class Ray(Distributed):
    """Works as tasks of a Ray cluster, or of one that is started on this machine for the run.

    Args:
        address: of a cluster; None is the one that RAY_ADDRESS names, or else this machine alone.
        workers: the most works at once; None is as many as the cluster has room for.
        resources: what each work takes.
        device: what works compute on.
    """

    def __init__(self, address: str | None, workers: int | None, resources: Resources, device: str = "cpu"):
        super().__init__()
        self.address = address or os.environ.get("RAY_ADDRESS") or "local"
        self.workers, self.resources, self.device = workers, resources, device
        self.threads = torch.get_num_threads()
        self._tasks: dict[Any, tuple[str, str]] = {}  # by Ray's reference: the key, and the machine of a timed work
        self._room = 0

    def __enter__(self) -> Ray:
        import ray
        import ray.cloudpickle

        self._ray, local = ray, self.address == "local"
        own = {"num_cpus": self._local_cpus(), "object_store_memory": SMALLEST_STORE, "include_dashboard": False}
        self._check_there()
        try:
            # Ray prints to the terminal what it is about to do, and reports usage, unless it is told not to.
            with environment({"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}):
                ray.init(self.address, logging_level="ERROR", log_to_driver=False, **(own if local else {}))
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"no Ray cluster to use at --address {self.address}: {reason}") from error
        self._remote = ray.remote(max_retries=0)(attempt)
        return self

    def _check_there(self) -> None:
        """InputError where nothing listens at the address: Ray itself would try for minutes."""
        host, colon, port = self.address.removeprefix("ray://").rpartition(":")
        if not (colon and port.isdigit()):
            return
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise InputError(f"no Ray cluster to use at --address {self.address}: {error.strerror or error}") from None

    def close(self) -> None:
        """Leave the cluster; one that was started for the run ends."""
        self._ray.shutdown()

    @property
    def says(self) -> str:
        """What a report says of it."""
        return f"Ray, {self.resources}"

    @property
    def width(self) -> int:
        """How many works the machines have room for, and at most the workers that were asked for."""
        room = sum(node.room(self.resources.wanted) for node in self._nodes())
        return min(room, self.workers or room)

    @property
    def machines(self) -> int:
        """Machines that have room for a work."""
        return min(len(self._nodes()), self.workers or len(self._nodes()))

    def start(self, work: Work) -> None:
        """Hand a task to Ray; one that measures time to a machine without any of ours, with all of its cores."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        wanted, node, where = dict(self.resources.options), "", {}
        if work.timed:
            taken = {name for _, name in self._tasks.values()}
            chosen = next(node for node in self._nodes() if node.name not in taken)
            node, wanted["num_cpus"] = chosen.name, chosen.has["CPU"]
            where = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        threads = self.threads if work.timed else max(int(self.resources.cpus), 1)
        place = Place.like_here(self.device, threads, work.timed)
        call = pickled(work, self._ray.cloudpickle.dumps)
        self._tasks[self._remote.options(**wanted, **where).remote(call, place)] = work.key, node

    def ended(self) -> list[tuple[str, Any]]:
        """Wait until something ends."""
        ready, _ = self._ray.wait(list(self._tasks), num_returns=1)
        return [(self._tasks.pop(task)[0], self._outcome(task)) for task in ready]

    def drop(self) -> None:
        """Stop what runs."""
        for task in self._tasks:
            self._ray.cancel(task, force=True)
        self._tasks.clear()

    def _outcome(self, task: Any) -> Any:
        """What a task gave, or how its worker went."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(task)
        except errors.RayTaskError as error:  # before the work began: the package is not there, for example
            last = str(error).strip().splitlines()[-1]
            return Failed(type(error.cause).__name__, f"a worker could not start it: {last}", str(error), True)
        except errors.RayError as error:
            first = str(error).strip().partition(". ")[0].splitlines()[0]
            return Lost(f"{type(error).__name__}: {first}")

    def _nodes(self) -> list[_Node]:
        """The machines that have room for a work. InputError where there are none."""
        nodes = [_Node(node["NodeID"], node["Resources"]) for node in self._ray.nodes() if node["Alive"]]
        able = [node for node in nodes if node.room(self.resources.wanted)]
        if not able and not self.running:
            raise InputError(
                f"none of the {len(nodes)} machines of the Ray cluster has {self.resources} for a cell; give less in "
                "--resources"
            )
        return able

    def _local_cpus(self) -> int:
        """The cores that Ray may share out on this machine."""
        return max(int((self.workers or 0) * self.resources.cpus), 1) if self.workers else os.cpu_count() or 1
