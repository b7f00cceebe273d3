"""Tests of the executor that options ask for, and of refusals in one line."""

import os
from multiprocessing.process import BaseProcess

import pytest
import torch

from subquad.core.errors import InputError
from subquad.tools.runs import executors
from subquad.tools.runs.executors import LOCAL, ProcessExecutor, make_executor, worker_processes
from subquad.tools.runs.executors.job_resources import JobResources, read_resources
from subquad.tools.runs.executors.on_ray import RayExecutor
from tests.tools.executors.jobs import squares


def test_the_default_is_this_process():
    assert make_executor() is LOCAL
    assert LOCAL.description == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "rays"}, "no executor 'rays'; did you mean 'ray'"),
        ({"workers": 2}, "--workers 2 is for --executor processes or ray, but the executor is 'here'"),
        ({"name": "processes", "address": "auto"}, "--address auto is for --executor ray, but the executor is 'proc"),
        ({"name": "processes", "resources": "cpus=2"}, "--resources cpus=2 is for --executor ray"),
        ({"name": "processes", "workers": 0}, "workers 0 must be at least 1"),
        ({"name": "ray", "workers": 10**6}, "workers 1000000 must be at least 1 and at most 10,000"),
        ({"name": "ray", "device": "cuda:1"}, "--device cuda:1 names one GPU, but each worker gets its own"),
        ({"name": "ray", "resources": "cores=2"}, "--resources has no 'cores'"),
        ({"name": "ray", "resources": "cpus=0"}, "--resources cpus=0: it must be a number, more than 0"),
        ({"name": "ray", "resources": "gpus=1.5"}, "--resources gpus=1.5: it must be a whole number, or a part of one"),
        ({"name": "ray", "resources": "cpus=1,cpus=2"}, "--resources cpus=1,cpus=2: cpus is given twice"),
        ({"name": "ray", "resources": "gpus=two"}, "--resources gpus=two: it must be a number, at least 0"),
        ({"name": "ray", "resources": "memory=much"}, "--resources memory=much: write it as 500MB or 8GB"),
    ],
)
def test_options_that_do_not_go_together(options, message, monkeypatch):
    monkeypatch.setattr(executors, "find_spec", lambda name: object())
    with pytest.raises(InputError, match=f"^{message}"):
        make_executor(**options)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(executors, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"ray is not installed: pip install .*'\.\[ray\]'"):
        make_executor("ray")


def test_resources_are_read():
    assert read_resources("cpus=2, memory=8GB", "cpu") == JobResources(2.0, 0.0, 8 * 10**9)
    assert read_resources(None, "cuda") == JobResources(1.0, 1.0)
    assert str(read_resources("gpus=0.5,memory=500MB", "cuda")) == "cpus=1,gpus=0.5,memory=0.5GB"


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs, which this process sees under the names 2 and 5."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5,7")  # there is none with the name 7
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_there_are_as_many_workers_as_gpus(two_gpus):
    assert ProcessExecutor(None, "cuda").width == 2
    assert ProcessExecutor(1, "cuda").description == "1 process"
    with pytest.raises(InputError, match="3 workers need a GPU each, but there are 2: give fewer --workers"):
        ProcessExecutor(3, "cuda")


def test_each_worker_sees_one_gpu_which_its_successor_takes_over(two_gpus, monkeypatch):
    seen = []

    class Process(BaseProcess):
        def __init__(self, **given):
            pass

        def start(self):
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])

        def kill(self):
            pass

        join = kill

    monkeypatch.setattr(worker_processes.SPAWN, "Process", Process)
    with ProcessExecutor(None, "cuda") as executor:
        for work in squares(2):
            executor.start(work)
        executor._end(executor._workers[1])
        executor.start(squares(3)[2])
    assert seen == ["2", "5", "5"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2, 5,7"


def test_the_machine_of_the_command_needs_no_gpu_where_others_have_them(monkeypatch):
    def none(*_, **__):
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(torch, "zeros", none)
    RayExecutor(None, None, JobResources(gpus=1.0), "cuda").check_device("cuda")
    for executor in (LOCAL, ProcessExecutor(1)):
        with pytest.raises(InputError, match="no device 'cuda' here"):
            executor.check_device("cuda")
