"""The process group of what a caller gives as one."""

from typing import Any

import torch.distributed as dist

MODES = "auto", "summary", "heads", "ring"


def group_of(group: Any, mode: str) -> Any:
    """The process group of a group, or of a mesh of one dimension; None: all processes.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the mode is unknown, the mesh has several dimensions, or this process is not in the group.
        TypeError: it is neither a group nor a mesh.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there is no process group; start the processes by torchrun and call torch.distributed.init_process_group()"
        )
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}, but it must be one of {', '.join(map(repr, MODES))}")
    if getattr(group, "ndim", 1) != 1:
        raise ValueError(f"the mesh has {group.ndim} dimensions, but tokens are split over one: give mesh['sp']")
    group = group.get_group() if hasattr(group, "get_group") else group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process {dist.get_rank()} is not in the group; make the sequence in the processes of the group alone"
        )
    if not (group is None or isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"the group is a {type(group).__name__}, but it must be a process group or mesh['sp']")
    return group
