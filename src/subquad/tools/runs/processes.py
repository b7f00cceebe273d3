"""The processes of a run that `torchrun` or `accelerate launch` started; alone, there is one."""

import os
from typing import TypeVar

import torch

T = TypeVar("T")


def count() -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def number() -> int:
    """The number of this process; only process 0 prints and writes."""
    return int(os.environ.get("RANK", "0"))


def joined() -> bool:
    """True if the processes can talk to each other, which Trainer's arguments bring about."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def wait() -> None:
    """Wait until all processes are here."""
    if joined():
        torch.distributed.barrier()


def leave() -> None:
    """Part from the others, all at once: one that goes while another still talks to it can take that one down."""
    wait()
    if joined():
        torch.distributed.destroy_process_group()


def agreed(value: T) -> T:
    """Return process 0's value in all processes."""
    if not joined():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]
