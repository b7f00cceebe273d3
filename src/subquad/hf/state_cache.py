"""`StateCache`: generation from states of fixed size."""

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from subquad.hf.layers import Layer, find_layers
from subquad.hf.state_layer import StateLayer, refuse
from subquad.hf.swapping import bounds


class StateCache(Cache):
    """A cache that keeps the state of each layer whose method is recurrent, in place of its keys and values.

        sq.hf.swap(model, "performer")
        model.generate(**inputs, past_key_values=sq.hf.StateCache(model))

    Memory and work of a token do not depend on how many were before. Layers that run another method ("full" in some
    layers, say) keep their keys and values in the same cache. Outputs are those of an ordinary cache, to rounding.

    A cache is for one batch, like any other. Give `generate` the same one again to go on where it stopped.

    Raises:
        ValueError: the model is an encoder-decoder, no layer of it runs a recurrent method, or one that does caches
            more than keys and values. Later: what a state cannot do is asked for, such as taking tokens back.
    """

    def __init__(self, model: PreTrainedModel):
        layers = find_layers(model)
        if model.config.is_encoder_decoder or any(layer.cross for layer in layers):
            raise ValueError(
                f"{type(model).__name__} has cross-attention, whose keys are the encoder's and stay: generate with the "
                "cache that transformers makes"
            )
        recurrent = {n for n, bound in bounds(model).items() if bound.method.traits.recurrent and layers[n].causal}
        if not recurrent:
            raise ValueError(
                f"no layer of this {type(model).__name__} runs a method with a state (trait `recurrent`): swap one in "
                "before, or generate with the cache that transformers makes"
            )
        held = DynamicCache(config=model.config).layers
        for number in sorted(recurrent):
            held[_place(layers[number], held)] = StateLayer()
        super().__init__(layers=held)

    def activate_past_recording(self) -> None:
        """ValueError: assisted decoding takes tokens back."""
        refuse(
            "used for assisted decoding", "tokens that are in a state cannot be taken out of it; use an ordinary cache"
        )


def _place(layer: Layer, held: list[object]) -> int:
    """Where the cache keeps this layer."""
    place = getattr(layer.module, "layer_idx", None)
    if not isinstance(place, int) or place >= len(held) or type(held[place]) is not DynamicLayer:
        what = type(held[place]).__name__ if isinstance(place, int) and place < len(held) else "no layer"
        raise ValueError(f"layer {layer.label} keeps its keys in {what} of the cache, which a state cannot replace")
    return place
