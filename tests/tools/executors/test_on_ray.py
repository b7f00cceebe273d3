"""The reports of the executor on Ray about a cluster that is not there, too small or gone; with a fake Ray."""

import socket
from types import SimpleNamespace

import pytest

from subquad.core.errors import InputError
from subquad.tools.runs.executors import on_ray
from subquad.tools.runs.executors.job_resources import JobResources
from subquad.tools.runs.executors.on_ray import RayExecutor


class Silent(Exception):
    """Ray's error of a system that is gone."""


class FakeRay:
    """Tasks never end, and machines are those that it is told."""

    exceptions = SimpleNamespace(RaySystemError=Silent)

    def __init__(self, *machines):
        self.machines, self.waited, self.error = machines, 0, None

    def nodes(self):
        return [{"NodeID": f"{i}", "Alive": True, "Resources": has} for i, has in enumerate(self.machines)]

    def wait(self, tasks, num_returns, timeout):
        self.waited += 1
        if self.error:
            raise self.error
        return [], tasks


@pytest.fixture
def port():
    """A port at which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def executor(fake, head=None, **given):
    made = RayExecutor("local", None, JobResources(**given))
    made._ray, made._head, made._tasks = fake, head, {"task": ("a", "")}
    return made


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://", "10.0.0.1:", ":6379", "cluster"])
def test_an_address_has_a_host_and_a_port(address):
    with pytest.raises(InputError, match=r"is not of the form HOST:PORT, such as 10\.0\.0\.1:6379$"):
        RayExecutor(address, None, JobResources())._check_address()


def test_an_address_where_nothing_listens_is_named_at_once(port):
    RayExecutor(f"127.0.0.1:{port}", None, JobResources())._check_address()
    for bad in ("127.0.0.1:1", "127.0.0.1:99999"):
        with pytest.raises(InputError, match=f"^no Ray cluster to use at --address {bad}: \\w"):
            RayExecutor(bad, None, JobResources())._check_address()


def test_machines_that_are_too_small_are_named_with_what_they_have():
    fake = FakeRay({"CPU": 4.0, "memory": 8e9}, {"CPU": 2.0, "GPU": 1.0, "memory": 4e9})
    assert executor(fake).width == 6
    with pytest.raises(
        InputError, match=r"^a cell takes cpus=8, but the largest machine of the Ray cluster has cpus=2,gpus=1,memory=4"
    ):
        executor(fake, cpus=8.0).width  # noqa: B018


def test_machines_that_are_gone_are_not_called_too_small():
    one = executor(FakeRay({"CPU": 4.0}))
    assert one.width == 4
    one._ray = FakeRay()
    with pytest.raises(InputError, match=r"^every machine of the Ray cluster with cpus=1 for a cell is gone; what is"):
        one.width  # noqa: B018


def test_a_run_whose_head_is_silent_ends_in_time(monkeypatch, port):
    monkeypatch.setattr(on_ray, "PATIENCE", 0.05)
    fake = FakeRay({"CPU": 1.0})
    with pytest.raises(InputError, match=r"^the Ray cluster does not answer any more; what is finished is kept$"):
        executor(fake, head=("127.0.0.1", 1)).ended()
    assert fake.waited > 1
    fake.wait = lambda tasks, num_returns, timeout: (tasks, []) if fake.waited > 50 else _count(fake, tasks)
    one = executor(fake, head=("127.0.0.1", port))
    monkeypatch.setattr(RayExecutor, "_outcome", lambda self, task: 7)
    assert one.ended() == [("a", 7)]  # a head that answers may take its time


def _count(fake, tasks):
    fake.waited += 1
    return [], tasks


def test_machines_are_not_asked_for_while_the_head_is_silent(port):
    fake = FakeRay({"CPU": 2.0})
    one = executor(fake, head=("127.0.0.1", port))
    assert one.width == 2
    one._head, fake.nodes = ("127.0.0.1", 1), None  # Ray would wait, and then end the process
    assert one.width == 2


@pytest.mark.parametrize("error", [ConnectionError("lost"), Silent("gone")])
def test_errors_of_a_lost_connection_are_one_line(error):
    fake = FakeRay({"CPU": 1.0})
    fake.error = error
    with pytest.raises(InputError, match=r"^the Ray cluster does not answer any more"):
        executor(fake).ended()
