"""Places for methods in a module: its transformers model, into its layers, or into its calls of SDPA."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from subquad import nn as layers_of_modules
from subquad.core.errors import InputError
from subquad.methods import Full, Method
from subquad.nn.interception import InterceptionLog, SdpaCalls, intercept
from subquad.nn.swapping import NAME
from subquad.tools.measure.module_calls import ModuleCall, holds_transformers_model, run_exactly

FULL = Full()
NOT_CALIBRATED = "not calibrated: its learned parameters are those that it starts with"


class AttentionCall(NamedTuple):
    """The sizes of one call of attention."""

    tokens: int  # queries
    is_causal: bool


class Assigned(NamedTuple):
    """A method as a module runs it: what `running` takes, or None with the reason; and what a reader must know."""

    methods: Any
    reason: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttentionSites(ABC):
    """The attention of a module that methods can replace.

    Attributes:
        module: any module.
        count: number of layers, or of calls of SDPA in a pass.
    """

    module: nn.Module
    count: int

    function: ClassVar[str]  # the library's function that puts methods there
    kind: ClassVar[str] = "layers"

    @abstractmethod
    def assign(self, method: Method) -> Assigned:
        """The places where a method can run, as far as is known before a pass."""

    @abstractmethod
    def running(self, methods: Any) -> Any:
        """Run what `assign` returned in the module, inside a `with` block; gives a log of the calls, or None."""

    @abstractmethod
    def observed(self) -> Any:
        """Collect an `AttentionCall` for every call of attention inside a `with` block."""

    def __str__(self) -> str:
        return f"{self.function} ({self.count} {self.kind if self.count > 1 else self.kind[:-1]})"


class TransformersLayers(AttentionSites):
    """The layers of a transformers model."""

    function = "sq.hf.swap"

    def assign(self, method: Method) -> Assigned:
        """The layers that can run the method, by number."""
        from subquad import hf

        numbers = [layer.number for layer in hf.find_layers(self.module)]
        return _assigned(dict.fromkeys(numbers, method), hf.refusals(self.module, method), method)

    @contextmanager
    def running(self, methods: Mapping[int, Method]) -> Iterator[None]:
        """Swap the methods in, and out again."""
        from subquad import hf

        hf.swap(self.module, dict(methods))
        try:
            yield
        finally:
            hf.restore(self.module)

    @contextmanager
    def observed(self) -> Iterator[list[AttentionCall]]:
        """Run exact attention by subquad, whose calls show their inputs."""
        from subquad import hf

        hf.swap(self.module, "full")
        try:
            with _observed_calls([part.get_submodule(hf.NAME) for part in _swapped(self.module, hf.NAME)]) as calls:
                yield calls
        finally:
            hf.restore(self.module)


class ModuleLayers(AttentionSites):
    """torch's `nn.MultiheadAttention` and timm's `Attention`."""

    function = "sq.nn.swap"

    @property
    def names(self) -> list[str]:
        """The names of the layers."""
        return list(layers_of_modules.describe(self.module).layers)

    def assign(self, method: Method) -> Assigned:
        """The layers that can run the method, by name."""
        return _assigned(dict.fromkeys(self.names, method), layers_of_modules.refusals(self.module, method), method)

    @contextmanager
    def running(self, methods: Mapping[str, Method]) -> Iterator[None]:
        """Swap the methods in, and out again. Layers without one keep their own attention."""
        if methods:
            layers_of_modules.swap(self.module, {escape(name): method for name, method in methods.items()})
        try:
            yield
        finally:
            layers_of_modules.restore(self.module)

    @contextmanager
    def observed(self) -> Iterator[list[AttentionCall]]:
        """Run exact attention by subquad, whose calls show their inputs."""
        with (
            self.running(dict.fromkeys(self.exact_able, FULL)),
            _observed_calls([part.get_submodule(NAME) for part in _swapped(self.module, NAME)]) as calls,
        ):
            yield calls

    @property
    def exact_able(self) -> list[str]:
        """The names of the layers that can run a method at all."""
        refused = layers_of_modules.refusals(self.module, FULL)
        return [name for name in self.names if name not in refused]


class SdpaCallSites(AttentionSites):
    """Calls of `scaled_dot_product_attention`, wherever they are."""

    function = "sq.intercept"
    kind = "calls"

    def assign(self, method: Method) -> Assigned:
        """Every call; those that cannot run the method show in the log of a pass."""
        try:
            with intercept(method):
                return Assigned(method)
        except ValueError as error:
            return Assigned(None, str(error))

    def running(self, methods: Method) -> Any:
        """Run the method in the calls; gives the log."""
        return intercept(methods)

    @contextmanager
    def observed(self) -> Iterator[list[AttentionCall]]:
        """Run the calls as they are."""
        calls: list[AttentionCall] = []

        def attend(query: Tensor, *args: Any, **options: Any) -> Tensor:
            longest = max(item.shape[-2] for item in query.unbind()) if query.is_nested else query.shape[-2]
            calls.append(AttentionCall(longest, bool(options.get("is_causal", False))))
            return F.scaled_dot_product_attention(query, *args, **options)

        with SdpaCalls(attend, lambda reason: None):
            yield calls


def attention_sites(module: nn.Module, call: ModuleCall) -> AttentionSites:
    """The places for methods in a module, from a pass over one input if its modules do not show them.

    Raises:
        TypeError: it is not a module, or holds several transformers models.
        ValueError: a transformers model whose attention cannot be replaced.
        InputError: nothing in it can be replaced, or all of its layers refuse every method.
    """
    if holds_transformers_model(module):
        from subquad import hf

        return TransformersLayers(module, len(hf.find_layers(module)))
    try:
        names = list(layers_of_modules.describe(module).layers)
    except ValueError:  # none of these layers
        names = []
    if names:
        refused = layers_of_modules.refusals(module, FULL)
        if len(refused) == len(names):
            raise InputError(f"no layer of this {type(module).__name__} can run a method: {refused[names[0]]}")
        return ModuleLayers(module, len(names))
    with intercept("full") as log:
        run_exactly(call, module)
    count = log.replaced + log.exact
    if not count:
        raise InputError(
            f"there is no attention in this {type(module).__name__} that a method can replace: it contains no "
            "transformers model (sq.hf.swap), no torch.nn.MultiheadAttention or timm Attention (sq.nn.swap), and it "
            "calls no torch.nn.functional.scaled_dot_product_attention (sq.intercept); layers of "
            "sq.nn.MultiheadAttention and calls of sq.attention keep their method: build the module with another "
            "method=, and compare the outputs"
        )
    return SdpaCallSites(module, count)


def outside(sites: AttentionSites, call: ModuleCall) -> str | None:
    """A sentence on the number of attention calls that no method reaches; None if all that can be seen are reached."""
    if isinstance(sites, SdpaCallSites):
        return None
    with sites.observed() as observed:
        call.run(sites.module)
    with intercept("full") as log:
        run_exactly(call, sites.module)
    total = log.replaced + log.exact
    if total <= len(observed):
        return None
    return (
        f"{total - len(observed)} of {total} calls of attention are outside of the layers that {sites.function} "
        "reaches, and stay exact."
    )


def after_pass(log: InterceptionLog | None) -> tuple[str | None, tuple[str, ...]]:
    """From the log of a pass with a method: why it ran nowhere, or None, and which calls stayed exact."""
    if log is None or not log.exact:
        return None, ()
    reason = next(row.reason for row in log.calls if row.reason is not None)
    if not log.replaced:
        return reason, ()
    return None, (f"{log.exact} of {log.exact + log.replaced} calls stay exact: {reason}",)


def _assigned(methods: dict[Any, Method], refused: Mapping[Any, str], method: Method) -> Assigned:
    able = {layer: each for layer, each in methods.items() if layer not in refused}
    reason = next(iter(refused.values()), None)
    if not able:
        return Assigned(None, reason)
    notes = [NOT_CALIBRATED] if method.traits.learned else []
    if refused:
        notes.append(f"{len(refused)} of {len(methods)} layers stay exact: {reason}")
    return Assigned(able, None, tuple(notes))


def _swapped(module: nn.Module, name: str) -> list[nn.Module]:
    return [part for part in module.modules() if name in part._modules]


@contextmanager
def _observed_calls(attached: list[nn.Module]) -> Iterator[list[AttentionCall]]:
    calls: list[AttentionCall] = []

    def hook(part: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        mask = options.get("mask")
        calls.append(AttentionCall(args[0].shape[2], mask is not None and mask.is_causal))

    handles = [part.register_forward_pre_hook(hook, with_kwargs=True) for part in attached]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
