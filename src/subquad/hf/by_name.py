"""Methods that are asked for by name: `attn_implementation="subquad:clustered-tail"`, wherever transformers takes it.

    AutoModel.from_pretrained(name, attn_implementation="subquad")
    SentenceTransformer(name, model_kwargs={"attn_implementation": "subquad:clustered-tail"})
    model.set_attn_implementation("subquad:clustered-tail:clusters=64,topk=96")

A name stands for one method in all layers, and the model is the one that `swap` makes of it. A name reaches a model
before the model has layers or weights, and a trial needs both, so the swap is made before the first forward pass, under
the name itself: the config keeps it. A model calls `get_correct_attn_implementation` when it is built and when its
attention is set, so this is where names are read, and where a model is told to swap before it runs.

A part of a model may be called first, as `generate` calls an encoder. The swap is made in the outermost model that has
this name everywhere. If configs in a model have different names, each part that is a model itself is swapped alone.
"""

import functools
import gc
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from subquad.core.forward_hooks import FIRST
from subquad.core.versions import set_attention_in_parts
from subquad.hf.attention_names import method_of, name_of, names_method
from subquad.hf.boundary import register_boundary
from subquad.hf.call_checks import is_unchecked, refuse_weights, run_before_call, stop_checking
from subquad.hf.layers import NAME, Attached, check_interface, uses_interface
from subquad.hf.probe import find_layers_by_class
from subquad.hf.saved import configs_of
from subquad.hf.swapping import restore, swap_layers
from subquad.methods import Method

VERIFY = "SUBQUAD_VERIFY"  # an environment variable: "0" leaves the comparisons of the trial out
START = ("subquad", "subquad:clustered-tail", "subquad:clustered-tail:clusters=64,topk=96", "subquad:by-length")

_MARK = "_subquad_reads_names"  # on a method of `PreTrainedModel` after it was wrapped
_LOCK = threading.RLock()  # a trial changes the configs that other threads' forward passes read


def register(method: str | Method) -> str:
    """Tell transformers about a method, and return the name to give as `attn_implementation`.

    Models accept the name of any method without this. It is for programs that look a name up themselves.

    Args:
        method: a method object, its text (`"local:window=64"`), or the name itself (`"subquad:local:window=64"`).

    Raises:
        ValueError: there is no such method or setting, or the method has learned parameters.

    >>> import subquad as sq
    >>> sq.hf.register(sq.Clustered(clusters=25))
    'subquad:clustered:clusters=25'
    """
    name = name_of(method)
    method_of(name)
    register_boundary(name)
    return name


def read_names() -> None:
    """Make transformers models understand the names of methods, and register those to start with."""
    for name in START:
        register(name)
    check, change = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation
    if hasattr(check, _MARK):
        return

    @functools.wraps(check)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if names_method(requested_attention):
            register(str(requested_attention))
            check_interface(self)  # else transformers fails in its own way, or runs the model's own attention
        if names_method(requested_attention) or _attached_by_name(self):
            run_before_call(self, _settle)
        return check(self, requested_attention, *args, **kwargs)

    @functools.wraps(change)
    def set_attn_implementation(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        if names_method(attn_implementation):
            method_of(attn_implementation)
            check_interface(self)  # else transformers leaves parts as they are whose attention cannot be set
        ours = names_method(attn_implementation) or _concerns(self)
        change(self, attn_implementation, *args, **kwargs)
        if ours:
            set_attention_in_parts(self, change, attn_implementation)
            for part in self.modules():  # `change` asks for the attention of those with another class of configs only
                if isinstance(part, PreTrainedModel):
                    run_before_call(part, _settle)

    setattr(get_correct_attn_implementation, _MARK, True)
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.set_attn_implementation = set_attn_implementation


@torch.compiler.disable(
    reason="methods are attached in the first forward pass: call the model once before compiling it"
)  # type: ignore[untyped-decorator]
def _settle(model: PreTrainedModel) -> None:
    """Swap in the method that a model's config names, or restore the model if its config names another attention."""
    if is_unchecked():  # a forward pass of a trial
        return
    with _LOCK:
        if FIRST not in vars(model):  # another thread was here
            return
        name = model.config._attn_implementation
        whole = _outermost(model, name) if _is_uniform(model, name) else None
        if whole is not None and not _is_attached(whole, name):
            _swap(whole, name)
        elif whole is None and not names_method(name) and _attached_by_name(model):
            _restore_but_names(model)
        if whole is None and not any(isinstance(part, Attached) for part in model.modules()):
            stop_checking(model)  # a part of it was restored by itself, and what is around it was still checked
        for part in [model] if whole is None else whole.modules():
            vars(part).pop(FIRST, None)


def _swap(model: PreTrainedModel, name: str) -> None:
    # As if it was called outside of the forward pass: what is made here is used in training too, outputs are compared
    # in the model's own dtype, and the trial runs the model's Python code.
    alone = torch.inference_mode(False), torch.autocast(model.device.type, enabled=False)
    with alone[0], alone[1], torch.compiler.set_stance("force_eager"):
        refuse_weights(configs_of(model))
        layers = find_layers_by_class(model, compare=_verify(os.environ))
        swap_layers(model, layers, method_of(name), implementation=name)


def _verify(environment: Mapping[str, str]) -> bool:
    """True if models are verified before a swap by name."""
    value = environment.get(VERIFY, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{VERIFY}={value!r}, but it must be 0 or 1")
    return value == "1"


def _is_uniform(model: nn.Module, name: Any) -> bool:
    """True if all configs in a model ask for the method of this name."""
    return names_method(name) and all(config._attn_implementation == name for config, _ in configs_of(model))


def _is_attached(model: nn.Module, name: str) -> bool:
    """True if the method of this name runs in all layers of a model."""
    attached = [getattr(module, NAME, None) for module in model.modules() if uses_interface(module)]
    return bool(attached) and all(isinstance(each, Attached) and each.implementation == name for each in attached)


def _concerns(model: nn.Module) -> bool:
    """True if a config in a model names a method, or a layer has one."""
    named = any(names_method(config._attn_implementation) for config, _ in configs_of(model))
    return named or any(isinstance(getattr(part, NAME, None), Attached) for part in model.modules())


def _attached_by_name(model: nn.Module) -> bool:
    """True if a method runs in a layer of a model because it was asked for by name."""
    return any(isinstance(part, Attached) and names_method(part.implementation) for part in model.modules())


def _outermost(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The largest model that contains this one, or is it, and asks for one method everywhere.

    A module does not know what contains it, so this looks through all modules that exist, once per swap.
    """
    models = [model]
    for thing in gc.get_objects():
        if not issubclass(type(thing), PreTrainedModel) or thing is model or not hasattr(thing, "config"):
            continue
        if any(part is model for part in thing.modules()) and _is_uniform(thing, name):
            models.append(thing)
    return max(models, key=lambda each: sum(1 for _ in each.modules()))


def _restore_but_names(model: PreTrainedModel) -> None:
    """Restore a model's own attention, but keep the names that its configs have since."""
    names = {id(config): config._attn_implementation for config, _ in configs_of(model)}
    restore(model)
    for config, _ in configs_of(model):
        config._attn_implementation_internal = names.get(id(config), config._attn_implementation)
