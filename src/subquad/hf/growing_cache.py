"""`GrowingCache`: keys and values in buffers that grow by doubling.

`DynamicCache` makes a new tensor of all keys at each step. Here a layer writes the new keys into a buffer with room,
and returns a view of the filled part:

    buffer (B,G,C,D)    k k k k k k k n n · · · · · · ·
                        └──── live ───┘ └─ n: new ─┘      a windowed layer's live part starts further right

`keys` and `values` are views of the buffers, the live part, and nothing else records how much is filled. So what crops,
selects or replaces them, here or in transformers, needs no further care: keys that are not a view of the buffers are
moved into new ones when the next token comes. Tokens that are cropped leave room, which the next tokens take.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from subquad.core.versions import records_past
from subquad.core.whole_numbers import is_whole
from subquad.hf.unwrapping import AnyModel, transformers_model

_NEW = "make a new sq.hf.GrowingCache(model)"
_TWO = (
    "or an encoder-decoder was given this cache alone, and it needs two, "
    "transformers.EncoderDecoderCache(sq.hf.GrowingCache(model), sq.hf.GrowingCache(model))"
)


class GrowingLayer(DynamicLayer):
    """The keys and values of a layer that attends to all tokens; `length` as in `GrowingCache`."""

    def __init__(self, length: int = 0):
        super().__init__()
        self._length = length
        self._buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make empty keys and values like these."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add new keys and values; return all."""
        if _makes_new_tensors():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self._appended(key_states, value_states)
        return self.keys, self.values

    def check(self, key_states: Tensor, value_states: Tensor, index: int) -> None:
        """Raise ValueError if these cannot follow the keys and values of layer `index`."""
        if not self.is_initialized:
            return
        for kind, old, new in (("keys", self.keys, key_states), ("values", self.values, value_states)):
            (B, G, _, D), here = old.shape, (old.dtype, old.device)
            if new.shape[:2] != (B, G) or new.shape[3] != D or (new.dtype, new.device) != here:
                raise ValueError(
                    f"layer {index} of this cache has {kind} of {_described(old)}, but is given {_described(new)}: "
                    f"{_NEW} for each batch, model, dtype and device"
                )

    def reset(self) -> None:
        """Forget all tokens, and the buffers."""
        self.keys = self.values = self._buffers = None  # type: ignore[assignment]
        self.is_initialized = False
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace item i by item beam_idx[i], in the same buffers; only items that change are moved."""
        if _makes_new_tensors() or self._rows_filled() is None or len(beam_idx) != len(self.keys):
            super().reorder_cache(beam_idx)
            return
        source = beam_idx.to(self.keys.device)
        moved = (source != torch.arange(len(source), device=source.device)).nonzero()[:, 0]
        if len(moved):
            for x in (self.keys, self.values):
                x[moved] = x[source[moved]]

    def offload(self) -> None:
        """Raise ValueError: the room would stay on the device."""
        _refuse_offloading()

    def prefetch(self) -> None:
        """Raise ValueError, as `offload`."""
        _refuse_offloading()

    def __getstate__(self) -> dict[str, Any]:
        """The layer without its room, with keys and values of its own: what is copied and pickled."""
        state = self.__dict__ | {"_buffers": None}
        if self._buffers is not None and self.is_initialized:
            state |= {"keys": self.keys.clone(), "values": self.values.clone()}
        return state

    def _appended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The live keys and values followed by new ones, in the buffers; in new ones if these have no room."""
        live, new = self.keys.shape[2], key.shape[2]
        filled = self._rows_filled()
        if self._buffers is None or filled is None or filled + new > self._buffers[0].shape[2]:
            rows, filled = self._capacity(live, live + new), live
            self._buffers = _moved(self.keys, rows), _moved(self.values, rows)
        keys, values = self._buffers
        keys.narrow(2, filled, new).copy_(key)
        values.narrow(2, filled, new).copy_(value)
        start, rows = filled - live, live + new
        return keys.narrow(2, start, rows), values.narrow(2, start, rows)

    def _capacity(self, live: int, needed: int) -> int:
        """The rows of new buffers: without a length, as many as the first call needs, as it may be the only one."""
        return self._length if needed <= self._length else max(needed, 2 * live)

    def _rows_filled(self) -> int | None:
        """The row of the buffers at which the live part ends; None if it is not in them, or they are read-only."""
        if self._buffers is None or (self._buffers[0].is_inference() and not torch.is_inference_mode_enabled()):
            return None
        end = _end_in(self._buffers[0], self.keys)
        return end if end is not None and end == _end_in(self._buffers[1], self.values) else None


class GrowingWindowLayer(GrowingLayer, DynamicSlidingWindowLayer):
    """The keys and values in the window of a layer: buffers of twice the window, replaced when their end is reached."""

    def __init__(self, sliding_window: int, length: int = 0):
        DynamicSlidingWindowLayer.__init__(self, sliding_window)
        self._length = min(length, self._rows())
        self._buffers = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make empty keys and values like these."""
        super().lazy_initialization(key_states, value_states)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)  # type: ignore[has-type]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add new keys and values; return those that the new tokens may see."""
        if _makes_new_tensors():
            return DynamicSlidingWindowLayer.update(self, key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[2]
        live, new = self.keys.shape[2], key_states.shape[2]
        if live + new > self._rows() and not records_past(self):  # a prompt: what is behind the window is not stored
            keys, values = torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)
            self._buffers = None
            self.keys, self.values = (x[:, :, 1 - self.sliding_window :].clone() for x in (keys, values))
            return keys, values
        keys, values = self._appended(key_states, value_states)
        if records_past(self):  # `crop` drops what is behind the window
            self.keys, self.values = keys, values
            visible = self.sliding_window - 1 + new
            return keys[:, :, -visible:], values[:, :, -visible:]
        kept = slice(1 - self.sliding_window, None)
        self.keys, self.values = keys[:, :, kept], values[:, :, kept]
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, given as a negative number, and while recording what is behind the window."""
        if self.is_initialized:
            super().crop(tokens_to_remove)

    def _capacity(self, live: int, needed: int) -> int:
        return max(self._length, needed, 2 * live if records_past(self) else min(2 * live, self._rows()))

    def _rows(self) -> int:
        return 2 * self.sliding_window


class GrowingCache(DynamicCache):
    """A cache like transformers' `DynamicCache` that does not copy all keys and values at each step.

        model.generate(**inputs, past_key_values=sq.hf.GrowingCache(model))

    It works in swapped models and in others, and with all that `generate` does with a cache; the outputs are those of
    `DynamicCache`. The keys and values of a layer are views of a buffer. A first call allocates what it needs; later,
    a buffer that is full is replaced by one of twice the size. So memory is up to twice that of the keys and values,
    and while one layer grows, three times in this layer. With `length`, the number of tokens that the cache will
    contain, buffers are allocated once, with exactly this room; more tokens than that make them grow as before. The
    buffers of a layer with a window have room for two windows.

    With gradients enabled, and inside torch.compile, keys are concatenated as by `DynamicCache`, so that gradients are
    right; generate under `torch.no_grad` or `torch.inference_mode`, as `generate` does. Copies by `copy.deepcopy`,
    `pickle` and `torch.save` contain the tokens without the room. Layers that keep something else than keys and values,
    as linear attention does, are those of `DynamicCache`.

    Encoder-decoders have two caches, for which transformers has a class:
    `transformers.EncoderDecoderCache(sq.hf.GrowingCache(model), sq.hf.GrowingCache(model))`.

    Args:
        model: the model that will use the cache.
        length: number of tokens to allocate, of prompt and continuation together.

    Raises:
        ValueError: `length` is not a whole number of at least 1, or no layer of the model keeps keys and values. Later:
            keys of another batch, model, dtype or device follow those in the cache, the model has more layers than the
            cache, the cache was in a call that stopped between two layers, an encoder-decoder uses it alone, or it is
            to be offloaded.
    """

    def __init__(self, model: AnyModel, *, length: int | None = None):
        if length is not None and not is_whole(length, 1):
            raise ValueError(
                f"`length` must be a whole number of at least 1 token, got {length!r}; leave it out if it is not known"
            )
        model = transformers_model(model)
        super().__init__(config=model.config)
        self.layers = [_growing(layer, length or 0) for layer in self.layers]  # type: ignore[has-type]
        kept = [index for index, layer in enumerate(self.layers) if isinstance(layer, CacheLayerMixin)]
        if not any(isinstance(layer, GrowingLayer) for layer in self.layers):
            raise ValueError(
                f"no layer of this {type(model).__name__} keeps keys and values that grow: generate with the cache "
                "that transformers makes"
            )
        self._first, self._last = kept[0], kept[-1]  # of the layers that count tokens
        self._stopped_by: str | None = None  # why the last call was refused, after some layers had kept its keys
        self._is_one_of_two = model.config.is_encoder_decoder

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Check the call, and return the sizes of the mask, which transformers requests before the first layer runs."""
        self._check()
        return super().get_mask_sizes(query_length, layer_idx)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens to a layer, and return those that it attends to."""
        if layer_idx >= len(self.layers):
            self._stopped_by = (
                f"this cache has {len(self.layers)} layers, but the model has a layer {layer_idx}: {_NEW} of this model"
            )
        if layer_idx == self._first or self._stopped_by is not None:
            self._check()
        layer = self.layers[layer_idx]
        if isinstance(layer, GrowingLayer):
            layer.check(key_states, value_states, layer_idx)
        return layer.update(key_states, value_states, *args, **kwargs)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Raise ValueError: nothing is offloaded."""
        _refuse_offloading()

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self._stopped_by = None

    def _check(self) -> None:
        """Raise ValueError if not all layers have the same tokens."""
        if self._stopped_by is not None:
            raise ValueError(self._stopped_by)
        if is_compiling():
            return
        first, last = (self.layers[index].get_seq_length() for index in (self._first, self._last))
        if first != last:
            causes = "an error stopped the last call between two layers, or a model with fewer layers was called"
            raise ValueError(
                f"layer {self._first} of this cache has {first} tokens, but layer {self._last} has {last}: {causes}"
                f"{f', {_TWO}' if self._is_one_of_two else ''}; {_NEW}"
            )


def _refuse_offloading() -> NoReturn:
    raise ValueError(
        "a GrowingCache cannot be offloaded: use transformers' DynamicCache(config=model.config, offloading=True)"
    )


def _growing(layer: Any, length: int) -> Any:
    if type(layer) is DynamicLayer:
        return GrowingLayer(length)
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingWindowLayer(layer.sliding_window, length)
    return layer


def _makes_new_tensors() -> bool:
    """True if keys that were handed out must stay as they are: for a backward pass, and in compiled graphs."""
    return torch.is_grad_enabled() or is_compiling()


def _moved(x: Tensor, rows: int) -> Tensor:
    """A new buffer that starts with the rows of x."""
    buffer = x.new_empty(*x.shape[:2], rows, x.shape[3])
    buffer.narrow(2, 0, x.shape[2]).copy_(x)
    return buffer


def _end_in(buffer: Tensor, view: Tensor) -> int | None:
    """The row of the buffer at which a view of it ends; None if it is not a view of whole rows."""
    if (
        view.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
        or view.stride() != buffer.stride()
        or view.shape[:2] != buffer.shape[:2]
    ):
        return None
    return view.storage_offset() // max(view.shape[3], 1) + view.shape[2]


def _described(x: Tensor) -> str:
    B, G, _, D = x.shape
    return f"{B} item{'s' * (B != 1)}, {G} head{'s' * (G != 1)} of {D} in {x.dtype} on {x.device}"
