"""The error of a rank when another one does not answer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

PATIENCE = 2.0  # seconds in which others may report that they wait too


class RankLost(RuntimeError):
    """Another rank does not answer; the message is one line."""


@contextmanager
def answered(group: Any) -> Iterator[None]:
    """Raise `RankLost` where the backend reports that a rank is gone; ValueError where there is no backend."""
    try:
        yield
    except RuntimeError as error:
        if "No backend type" in str(error):
            raise ValueError(
                f"the process group has no backend for these tensors ({error}); give one to init_process_group, such "
                "as backend='cpu:gloo,cuda:nccl'"
            ) from error
        raise RankLost(waited_in_vain(group, error)) from error


def waited_in_vain(group: Any, error: Exception) -> str:
    """One line that names this rank, and those that do not wait as well as far as that can be found out."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    missing = _missing(group, rank, ranks)
    those = f"rank {_listed(missing)}" if missing else "the others"
    one = "it" if len(missing) == 1 else "one of them"
    return (
        f"rank {rank} of {ranks} waited for {those} in vain: {one} has ended, hangs, or makes another call "
        f"({str(error).splitlines()[0]})"
    )


def _missing(group: Any, rank: int, ranks: int) -> list[int]:
    """The ranks that do not wait; none where that is not known. Ranks that wait tell each other by the store."""
    try:
        store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
        key = "subquad waits {}".format
        numbers = [rank if group is None else dist.get_global_rank(group, rank) for rank in range(ranks)]
        store.set(key(numbers[rank]), "1")
        end, missing = time.monotonic() + PATIENCE, list(range(ranks))
        while missing and time.monotonic() < end:
            missing = [other for other in missing if not store.check([key(numbers[other])])]
            time.sleep(PATIENCE / 20)
    except (RuntimeError, ValueError):  # the store has ended with the process that had it
        return []
    return missing


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (" and others" if len(numbers) > 5 else "")
