"""FSDP2: each process stores its share of the weights, gradients and optimizer states, and files contain all of them.

A checkpoint does not depend on how many processes wrote it: weights and optimizer states are gathered before they are
written, in the format of one process, and shared out after they are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from subquad.tools.runs import processes


def shard(model: nn.Module, device: str) -> None:
    """Share out the weights of a model, layer by layer, in place; its state is then loaded from whole tensors."""
    mesh = init_device_mesh(device, (processes.count(),))
    for part in model.modules():
        if isinstance(part, nn.ModuleList):
            for layer in part:
                if next(layer.parameters(), None) is not None:
                    fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.register_load_state_dict_pre_hook(_share_weights)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model in whole tensors, in every process; all of them call this. Tied weights stay one tensor."""
    state = model.state_dict(keep_vars=True)
    whole = {id(tensor): _whole(tensor.detach()) for tensor in state.values()}
    return {name: whole[id(tensor)] for name, tensor in state.items()}


class ShardedStates:
    """The states of an optimizer of shared weights, as its `state_dict` gives and takes them: whole.

    Only the process that writes asks for a `state_dict`, so all of them call `gather` before.
    """

    def __init__(self, optimizer: Optimizer):
        self._gathered: dict[str, Any] | None = None
        self._optimizer = optimizer
        optimizer.register_state_dict_post_hook(self._give)
        optimizer.register_load_state_dict_pre_hook(self._take)

    def gather(self) -> None:
        """Have the whole states ready for the next `state_dict`."""
        self._gathered = None
        local = self._optimizer.state_dict()
        states = {number: {name: _whole(x) for name, x in values.items()} for number, values in local["state"].items()}
        self._gathered = local | {"state": states}

    def _give(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        gathered, self._gathered = self._gathered, None
        return gathered

    def _take(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        shares = {
            number: {name: _share_like(x, weights[number]) for name, x in values.items()}
            for number, values in state["state"].items()
        }
        return state | {"state": shares}


def _share_weights(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, weight in module.named_parameters(remove_duplicate=False):
        if prefix + name in state:
            state[prefix + name] = _share_like(state[prefix + name], weight)


def _whole(x: Any) -> Any:
    return x.full_tensor().cpu() if isinstance(x, DTensor) else x


def _share_like(x: Any, weight: Tensor) -> Any:
    """This process's share of a tensor of the shape of a weight; anything else as it is."""
    if (
        not isinstance(x, Tensor)
        or isinstance(x, DTensor)
        or not isinstance(weight, DTensor)
        or x.shape != weight.shape
    ):
        return x
    with torch.no_grad():
        return distribute_tensor(x.to(weight.device), weight.device_mesh, weight.placements)
