"""Word timestamps of a swapped Whisper, which are made from the weights of the decoder's cross-attention.

To get these weights, transformers writes "eager" into the model's config and asks all layers for weights. In a swapped
model the methods stay where no weights are needed, in the encoder and in the decoder's self-attention; cross-attention
runs exact and returns its weights. `call_checks` restores the config, in the first call of the model or of its encoder;
if generation ends before that, the config is restored here.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from subquad.hf.call_checks import refuse_other_implementations
from subquad.hf.layers import Attached

_MARK = "_subquad_timestamps"  # on `generate` after it was wrapped


def support_word_timestamps() -> None:
    """Make Whisper's `generate` keep swapped methods when it makes word timestamps."""
    generate = WhisperGenerationMixin.generate
    if hasattr(generate, _MARK):
        return
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def generate_with_methods(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not signature.bind(self, *args, **kwargs).arguments.get("return_token_timestamps"):
            return generate(self, *args, **kwargs)
        with _for_timestamps(self):
            return generate(self, *args, **kwargs)

    setattr(generate_with_methods, _MARK, True)
    WhisperGenerationMixin.generate = generate_with_methods


@contextmanager
def _for_timestamps(model: nn.Module) -> Iterator[None]:
    refuse_other_implementations(model)  # before transformers sets its own
    attached = [part for part in model.modules() if isinstance(part, Attached)]
    try:
        for layer in attached:
            layer.for_timestamps = True
        yield
    finally:
        refuse_other_implementations(model)  # it restores the config while word timestamps are made
        for layer in attached:
            layer.for_timestamps = False
