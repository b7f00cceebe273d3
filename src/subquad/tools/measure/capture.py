"""Record what every attention layer of a swapped model is given. transformers is imported only for `recorded`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from subquad.kernels.tokens.rotary import Rotary
from subquad.masks import Mask
from subquad.methods import BoundMethod, Method
from subquad.methods.core.mixture import moves_queries
from subquad.tools.measure.group import ALONE, MeasuringGroup

EXACT_ALONE = ("softcap", "sinks")  # unsupported by methods: a call that has one is exact attention, and not recorded


@dataclass(frozen=True)
class LayerInputs:
    """One call of one layer's attention."""

    number: int
    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]  # mask, bias, scale, dropout_p, parallel
    rotary: Callable[[], Rotary | None] = lambda: None  # the layer's positions, for methods that need them

    def run(self, method: Method | BoundMethod) -> Tensor:
        """Run a method on the same inputs."""
        options = self.options
        if moves_queries(method.method if isinstance(method, BoundMethod) else method):
            options = options | {"rotary": self.rotary()}
        if isinstance(method, BoundMethod):
            return method(self.query, self.key, self.value, **options)
        gqa = self.query.shape[1] != self.key.shape[1]
        return method(self.query, self.key, self.value, **options | {"enable_gqa": gqa})


def without_padded_queries(
    *, mask: Mask, valid: Tensor | None, query_valid: Tensor | None, **options: Any
) -> dict[str, Any]:
    """The options of a layer's call as a method's arguments; padded queries, which the layer computes, are left out."""
    if valid is not None:
        mask = (
            mask & Mask.padding(keys=valid)
            if query_valid is None
            else mask & Mask.padding(keys=valid, queries=query_valid)
        )
    return {"mask": mask} | {name: value for name, value in options.items() if name not in EXACT_ALONE}


def _rotary_of(rotary: Callable[[], Any], items: Any) -> Rotary | None:
    """The rotary positions of the items of one call, which some models read by their lengths."""
    from subquad.hf.item_rotary import TwoRotaries

    made = rotary()
    return made.for_items(False if items is None else items) if isinstance(made, TwoRotaries) else made


@contextmanager
def recorded(model: Any, group: MeasuringGroup = ALONE) -> Iterator[list[LayerInputs]]:
    """Swap "full" into a model and collect the inputs of every attention call; afterwards the model is as before.

    Of a group, each process collects those of its own tokens.

    Raises:
        ValueError: a query, key or value holds NaN or infinity; names it and the layer.
    """
    from subquad import hf
    from subquad.hf.rotary_passes import extended_items
    from subquad.hf.rotary_trial import find_rotary
    from subquad.hf.swapping import swapped_out

    calls: list[LayerInputs] = []
    with swapped_out(model, parallel=group.ranks), ExitStack() as stack:
        for layer in hf.swap(model, "full", parallel=group.ranks).layers:

            @cache
            def rotary(layer: hf.Layer = layer) -> Any:
                return find_rotary(hf.transformers_model(model), [layer])[layer.module] if layer.causal else None

            def hook(
                module: nn.Module,
                args: tuple[Tensor, ...],
                options: dict[str, Any],
                layer: hf.Layer = layer,
                rotary: Callable[[], Any] = rotary,
            ) -> None:
                if any(options.get(name) is not None for name in EXACT_ALONE):
                    return
                for name, tensor in zip(("query", "key", "value"), args, strict=True):
                    if not torch.isfinite(tensor).all():
                        raise ValueError(f"the {name} of attention layer {layer.label} is not finite (NaN or infinity)")
                query, key, value = (a.detach() for a in args)
                options = without_padded_queries(**options)
                of_items = partial(_rotary_of, rotary, extended_items())
                calls.append(LayerInputs(layer.number, layer.name, query, key, value, options, of_items))

            attached = layer.module.get_submodule(hf.NAME)
            stack.callback(attached.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield calls
