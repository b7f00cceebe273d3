"""`StateCache`: generation from states of fixed size, in place of keys and values.

transformers gives a layer's new keys and values to the cache, takes back all of them, and attends. A state layer gives
back the new ones alone, marked with itself: the attention that they reach (`boundary.attend`) reads the mark and
advances the state. Nothing is kept on the model, so caches do not mix, whatever the order of their calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import ref

from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from subquad.core import versions
from subquad.core.forward_hooks import run_first
from subquad.hf.layers import STATE_MARK, Layer, attached_to
from subquad.hf.probe import find_layers
from subquad.hf.unwrapping import AnyModel, transformers_model
from subquad.masks import Mask
from subquad.methods import BoundMethod, Method

_NEW = "make a new sq.hf.StateCache(model)"
_SMALL = "it is small; move the model"


class StateLayer(versions.LayerOfCache, CacheLayerMixin):
    """The state of one layer's method, and how many tokens it has seen."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, layer: Layer):
        super().__init__()
        self.label, self._module = layer.label, ref(layer.module)
        self.reset()

    def reset(self) -> None:
        """Clear the state."""
        self.state: dict[str, Tensor] | None = None
        self.seen = 0
        self._on_its_way = False  # keys were handed out that no attention has taken yet
        self._stopped_by: str | None = None  # the error that kept the attention from taking them
        self._filled_by: tuple[Method, ref[nn.Module] | None] | None = None  # the method and its learned parameters

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys, marked, and the new values."""
        self.check()
        self._on_its_way = True
        self.seen += key_states.shape[-2]
        setattr(key_states, STATE_MARK, self)
        return key_states, value_states

    def attend(
        self, bound: BoundMethod, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | None
    ) -> Tensor:
        """The outputs of the tokens of `update`, which are added to the state."""
        self._check_method(bound)
        before = self.state or bound.init_state(len(query), like=query, value_dim=value.shape[3])
        out, self.state = bound.step(query, key, value, before, mask=mask, scale=scale)
        self._filled_by = bound.method, None if bound.learned is None else ref(bound.learned)
        self._on_its_way = False
        return out

    @property
    def items(self) -> int:
        """The batch size of the state; 0 before the first token."""
        return 0 if self.state is None else len(next(iter(self.state.values())))

    def check(self) -> None:
        """Raise ValueError if new tokens would be lost, or do not fit the state."""
        if is_compiling():
            _refuse(
                "used inside torch.compile",
                "it is replaced in Python at each step; use another cache, or do not compile",
            )
        module = self._module()
        attached = None if module is None else attached_to(module)
        if attached is None:
            raise ValueError(
                f"layer {self.label} does not run subquad's attention any more, so its state has no reader"
            )
        if self._stopped_by is not None:
            raise ValueError(
                f"an error stopped layer {self.label} at the last tokens of this cache, which has them in part now; "
                f"{_NEW}; the error was {self._stopped_by}"
            )
        if self._on_its_way:
            raise ValueError(
                f"the last keys that layer {self.label} gave to this StateCache did not come through its attention: it "
                "changed them on the way, or was interrupted; use another cache, or start with a new one"
            )
        self._check_method(attached.bound)

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Remember an error that occurred before the new tokens were in the state."""
        try:
            yield
        except Exception as error:
            self._stopped_by = f"{type(error).__name__}: {error}"
            raise

    def _check_method(self, bound: BoundMethod) -> None:
        if self._filled_by is not None:
            method, learned = self._filled_by
            if method != bound.method or (None if learned is None else learned()) is not bound.learned:
                now = "it with other learned parameters" if method == bound.method else str(bound.method)
                raise ValueError(
                    f"this cache was filled by {method}, but layer {self.label} runs {now} now: {_NEW} after swap"
                )
        elif not bound.method.traits.recurrent:
            raise ValueError(f"layer {self.label} runs {bound.method} now, which keeps no state: {_NEW} after swap")

    # ------------------------------------------------------------------ what transformers asks of a layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the method makes the state at the first tokens."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes for all keys, because other layers of the cache keep theirs and get the same mask."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """The number of tokens that the state has seen, including padding."""
        return self.seen

    def get_max_length(self) -> int:
        """Return that there is no limit."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace item i by item beam_idx[i]."""
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each item `repeats` times."""
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these items."""
        self._each(lambda x: x[indices])

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError: tokens cannot be removed from a sum."""
        if tokens_to_remove:
            _refuse("cropped", "tokens that are in a state cannot be taken out of it; use an ordinary cache")

    def offload(self) -> None:
        """Raise ValueError: a state is too small to be moved."""
        _refuse("offloaded", _SMALL)

    def prefetch(self) -> None:
        """Raise ValueError: a state is too small to be moved."""
        self.offload()

    def _each(self, change: Any) -> None:
        if self.state is not None:
            self.state = {name: change(tensor) for name, tensor in self.state.items()}


class StateCache(Cache):
    """A cache that keeps the state of each layer whose method is recurrent, in place of its keys and values.

        sq.hf.swap(model, "performer")
        model.generate(**inputs, past_key_values=sq.hf.StateCache(model))

    Memory and work of a token do not depend on how many were before. Layers that run another method ("full" in some
    layers, for example) keep keys and values in the same cache. Outputs are those of an ordinary cache to rounding.

    A cache is for one batch, like any other. Give `generate` the same one again to continue where it stopped.

    Raises:
        ValueError: the model is an encoder-decoder, no layer of it runs a recurrent method, or one that does caches
            more than keys and values. Later: what a state cannot do is asked for, such as taking tokens back, or the
            cache is used with another method, another batch, or without a new token.
    """

    def __init__(self, model: AnyModel):
        model = transformers_model(model)
        run_first(model)
        layers = find_layers(model)
        if model.config.is_encoder_decoder or any(layer.cross for layer in layers):
            raise ValueError(
                f"{type(model).__name__} has cross-attention, whose keys are the encoder's and stay: generate with the "
                "cache that transformers makes"
            )
        recurrent = [layer for layer in layers if layer.causal and _is_recurrent(layer)]
        if not recurrent:
            raise ValueError(
                f"no layer of this {type(model).__name__} runs a method with a state (trait `recurrent`): swap one in "
                "before, or generate with the cache that transformers makes"
            )
        held = DynamicCache(config=model.config).layers
        for layer in recurrent:
            held[_layer_index(layer, held)] = StateLayer(layer)
        super().__init__(layers=held)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Check the call, and return the mask sizes, which transformers requests before the first layer runs."""
        states = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        for layer in states:
            layer.check()
        if not query_length and states[0].seen:
            raise ValueError(f"this cache has already seen {states[0].seen} tokens and there is no new one: {_NEW}")
        if len({layer.get_seq_length() for layer in self.layers if isinstance(layer, StateLayer | DynamicLayer)}) > 1:
            raise ValueError(f"an error stopped the last tokens of this cache between two layers: {_NEW}")
        return super().get_mask_sizes(query_length, layer_idx)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass keys and values to a layer; another batch is refused before any layer keeps its keys."""
        items = {layer.items for layer in self.layers if isinstance(layer, StateLayer)} - {0}
        if items and items != {len(key_states)}:
            raise ValueError(
                f"this cache was filled with a batch of {items.pop()}, but now it is given one of {len(key_states)}: "
                f"{_NEW} for each batch"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Raise ValueError: nothing is offloaded."""
        _refuse("offloaded", _SMALL)

    def activate_past_recording(self) -> None:
        """Raise ValueError: assisted decoding removes tokens."""
        _refuse(
            "used for assisted decoding", "tokens that are in a state cannot be taken out of it; use an ordinary cache"
        )


def _layer_index(layer: Layer, held: list[object]) -> int:
    """The index of this layer in the cache."""
    index = getattr(layer.module, "layer_idx", None)
    if not isinstance(index, int) or index >= len(held) or type(held[index]) is not DynamicLayer:
        what = type(held[index]).__name__ if isinstance(index, int) and index < len(held) else "no layer"
        raise ValueError(f"layer {layer.label} keeps its keys in {what} of the cache, which a state cannot replace")
    return index


def _is_recurrent(layer: Layer) -> bool:
    attached = attached_to(layer.module)
    return attached is not None and attached.bound.method.traits.recurrent


def _refuse(what: str, why: str) -> NoReturn:
    """Raise for what a state cannot do."""
    raise ValueError(f"a StateCache cannot be {what}: {why}")
