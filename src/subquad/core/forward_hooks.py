"""Forward hooks that are added to the modules of a model, each once, and removed again."""

from collections.abc import Callable
from typing import Any

from torch import nn

FIRST = "_subquad_first"  # on a model: what runs before its next forward pass, and removes itself


def add_pre_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Run a hook before each forward pass, with the keyword arguments, if the module does not have it yet."""
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook, with_kwargs=True)


def add_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Run a hook after each forward pass, also if that raised an error, if the module does not have it yet."""
    if hook not in module._forward_hooks.values():
        module.register_forward_hook(hook, with_kwargs=True, always_call=True)


def run_first(module: nn.Module) -> None:
    """Run what is to run before the next forward pass of a module."""
    action = vars(module).get(FIRST)
    if action is not None:
        action(module)


def remove_hooks(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Remove a hook from a module and from all modules in it."""
    for part in module.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            for number in [number for number, added in hooks.items() if added is hook]:
                del hooks[number]
                for marks in (
                    part._forward_hooks_with_kwargs,
                    part._forward_hooks_always_called,
                    part._forward_pre_hooks_with_kwargs,
                ):
                    marks.pop(number, None)
