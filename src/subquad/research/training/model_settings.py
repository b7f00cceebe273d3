"""The settings of a model that is trained: its sizes, positions and attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from pydantic import ConfigDict

from subquad.core.errors import check_least
from subquad.methods import parse_method
from subquad.research.training.models.configuration import AttentionConfig, Positions

STRICT = ConfigDict(extra="forbid", strict=False)
MOST_LAYERS = 10_000  # more are a slip of the keyboard, which would take hours to build


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model's sizes, positions and attention; the task adds what depends on it (symbols, classes).

    Attributes:
        method: the method of every attention layer, or a list with one method per layer.
        layers: number of blocks of an attention and a feed-forward layer.
        heads: number of heads of each attention layer.
        kv_heads: number of heads of keys and values; 0 means `heads`.
        width: width of the hidden states.
        feed_forward: width inside the feed-forward layers; 0 means four times `width`.
        dropout: dropout rate of embeddings and of the output of each layer.
        attention_dropout: dropout rate in attention; the method's page describes what is dropped.
        positions: "learned" or "sinusoidal" (added to the input), "layer-sinusoidal" (added to queries and keys),
            "rotary", "relative" (learned terms of the distance, which each of the model's methods must support, as
            `full` and `local` do), or "none".
        piece: for the task lm: number of tokens that are read at a time; 0 means the whole input.
        memory: for the task lm: number of tokens before a piece whose hidden states each layer remembers.
    """

    __pydantic_config__ = STRICT

    method: str | list[str] = "full"
    layers: int = 4
    heads: int = 4
    kv_heads: int = 0
    width: int = 128
    feed_forward: int = 0
    dropout: float = 0.1
    attention_dropout: float = 0.0
    positions: Literal[Positions, "relative"] = "rotary"
    piece: int = 0
    memory: int = 0

    def __post_init__(self) -> None:
        check_least(self, layers=1, heads=1, width=1)
        if self.layers > MOST_LAYERS:
            raise ValueError(f"layers={self.layers}, but it must be at most {MOST_LAYERS:,}")
        check_least(self, kv_heads=0, feed_forward=0, piece=0, memory=0)
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= (rate := getattr(self, name)) < 1.0:
                raise ValueError(f"{name}={rate}, but it must be at least 0 and less than 1")
        if not self.method:
            raise ValueError(f"method={self.method!r} names no method")
        for method in [self.method] if isinstance(self.method, str) else self.method:
            parse_method(method)
        if self.positions == "relative":
            method_text = self.method
            methods = (
                with_distances(method_text)
                if isinstance(method_text, str)
                else [with_distances(each) for each in method_text]
            )
            object.__setattr__(self, "method", methods)

    def config(self, kind: type[AttentionConfig], *, longest: int, **more: Any) -> AttentionConfig:
        """The config of a model of these sizes, for inputs of at most `longest` tokens.

        Raises:
            ValueError: sizes that do not go together.
        """
        kv_heads = self.kv_heads or self.heads
        if self.width % self.heads:
            raise ValueError(f"model.width={self.width} is not a multiple of model.heads={self.heads}")
        if self.heads % kv_heads:
            raise ValueError(f"model.heads={self.heads} is not a multiple of model.kv_heads={kv_heads}")
        sizes = {
            "hidden_size": self.width,
            "intermediate_size": self.feed_forward or 4 * self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": kv_heads,
            "hidden_dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "positions": "none" if self.positions == "relative" else self.positions,
            "max_position_embeddings": longest,
        }
        for name in ("piece", "memory"):
            if value := getattr(self, name):
                if not hasattr(kind, name):
                    raise ValueError(f"{name}={value} is for causal language models: the task lm")
                sizes[name] = value
        try:
            return kind(method=self.method, **sizes, **more)
        except StrictDataclassError as error:
            raise ValueError(str(error.__cause__)) from error


def with_distances(method: str) -> str:
    """The method with relative positions; ValueError where it has none."""
    parsed = parse_method(method)
    if parsed.traits.relative:
        return method
    if "positions" not in parsed.defaults():
        raise ValueError(f"positions='relative', but {parsed.name!r} has no relative positions; 'full' and 'local' do")
    return str(replace(parsed, positions="relative"))  # type: ignore[call-arg]
