"""The configs of the models: what all have in common, and what one kind adds."""

from typing import Any, Literal, get_args

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from subquad.methods import parse_method

Positions = Literal["learned", "sinusoidal", "layer-sinusoidal", "rotary", "none"]
POSITIONS = get_args(Positions)


@strict
class AttentionConfig(PreTrainedConfig):
    """A transformer's sizes, its positions, and the attention method of each layer.

    Attributes:
        method: the attention of every attention layer as the command line writes it ("i-clustered:clusters=25"), or a
            list with one for each, in the model's order. Groups of heads: "mixed-heads:methods=local+lha".
        positions: "learned" (a table, added to the input), "sinusoidal" (added to the input), "layer-sinusoidal" (added
            to every layer's queries and keys), "rotary" (turns them), or "none". The third and the fourth leave out
            heads whose method has relative positions of its own ("local:positions=relative").
        max_position_embeddings: the longest input, in tokens.
    """

    # `__init__` of transformers takes keywords that are not fields, such as `model_type` of a saved config; jaxtyping's
    # checks of dataclasses would refuse it.
    __no_type_check__ = True

    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.0
    positions: str = "rotary"
    max_position_embeddings: int = 512
    initializer_range: float = 0.02
    method: str | list[str] = "full"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Refuse sizes and words that no model can be made of."""
        if self.positions not in POSITIONS:
            raise ValueError(f"positions={self.positions!r}, but it must be one of {', '.join(POSITIONS)}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} does not divide into num_attention_heads={self.num_attention_heads}"
            )
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"positions={self.positions!r} need heads of even width, but theirs is {self.head_dim}")

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.hidden_size // self.num_attention_heads

    def method_of(self, layer: int) -> str:
        """The method of one attention layer; ValueError where a list ends before it."""
        if isinstance(self.method, str):
            return self.method
        if layer >= len(self.method):
            raise ValueError(
                f"method has {len(self.method)} methods, but the model has more attention layers than that"
            )
        return self.method[layer]

    def absolute_heads(self, layer: int) -> list[bool]:
        """True for each head of a layer whose queries and keys get positions: one without relative ones of its own."""
        method = parse_method(self.method_of(layer))
        heads = [True] * self.num_attention_heads
        dealt = method.deal(self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads)
        for part, (part_heads, _) in zip(method.parts, dealt, strict=True):
            heads[part_heads] = [not part.method.traits.relative] * (part_heads.stop - part_heads.start)
        return heads
