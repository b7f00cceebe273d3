"""Building blocks of the models: attention through transformers' interface, pre-norm blocks, stacks of them.

Attention goes through the same interface as in transformers' own models, and `finish` puts the config's methods into it
with `sq.hf.swap`. So swapping, inspecting, comparing and calibrating work on these models as on pretrained ones, and a
saved model comes back with its methods and what they learned.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import ModelOutput

from subquad import hf
from subquad.core.versions import loading_shared_modules
from subquad.hf.layers import attached_to
from subquad.hf.positions import reach_of
from subquad.hf.saved import asks_for_ours
from subquad.hf.swap_record import read_record
from subquad.hf.swapping import check_training
from subquad.kernels.attention.projections import Projections
from subquad.kernels.tokens.rotary import Rotary
from subquad.methods.core.current_shard import in_use
from subquad.research.training.models.configuration import AttentionConfig
from subquad.research.training.models.positional_encodings import frequencies, rotate, sinusoid
from subquad.research.training.models.segment_memory import Memory
from subquad.research.training.models.splitting import ModelSplit


@dataclass
class Prediction(ModelOutput):
    """The loss, where there are labels, and logits: (B, classes), (B, N, symbols) or (B, rows, channels)."""

    loss: Tensor | None = None
    logits: Tensor | None = None


class SelfOrCrossAttention(nn.Module):
    """Multi-head attention by whatever runs in the model: `hf.swap` finds it through the interface's name.

    `number` is that among all attention layers of the model, `layer_idx` that among the causal ones: a cache's.
    """

    hands_hidden = True  # to attention functions of subquad, for methods that read the layer's input
    splits_tokens = True  # its models give each rank of `splitting.over` its tokens, in `sq.distributed.use`

    def __init__(
        self, config: AttentionConfig, number: int, *, causal: bool = False, cross: bool = False, layer_idx: int = 0
    ):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.is_causal, self.is_cross_attention = causal, cross
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads or self.num_heads
        self.head_dim = config.head_dim
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        width, keys = config.hidden_size, self.num_key_value_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, size) for size in (width, keys, keys))
        self.o_proj = nn.Linear(width, width)
        self.placed = [] if cross else config.absolute_heads(number)  # heads with positions in their queries and keys

    def forward(
        self,
        hidden: Float[Tensor, "B N W"],
        attention_mask: Tensor | None,
        positions: Int[Tensor, "B _tokens"],
        *,
        source: Float[Tensor, "B M W"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B N W"]:
        """Self-attention, or attention to `source` where there is one.

        Without cross-attention, `source` is a memory and `hidden` behind it, and `positions` are those of both.
        """
        source = hidden if source is None else source
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project, x in ((self.q_proj, hidden), (self.k_proj, source), (self.v_proj, source))
        )
        if not self.is_cross_attention:
            query, key = (
                self._with_positions(query, positions[:, -query.shape[2] :]),
                self._with_positions(key, positions),
            )
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, sdpa_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        options: dict[str, Any] = {"scaling": self.head_dim**-0.5, "is_causal": self.is_causal}
        if attached_to(self) is not None:
            options["hidden"] = hidden
        out, _ = attend(self, query, key, value, attention_mask, dropout=dropout, **options)
        return self.o_proj(out.flatten(2))

    @property
    def rotary(self) -> Rotary | None:
        """The rotary positions of queries and keys, which `sq.hf.swap` reads where a method needs them."""
        return Rotary(frequencies(self.head_dim)) if self.config.positions == "rotary" else None

    def _with_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys with their positions, in the heads that have no relative ones of their own."""
        if self.config.positions == "rotary":
            placed = rotate(x, positions)
        elif self.config.positions == "layer-sinusoidal":
            placed = x + sinusoid(positions, self.head_dim)[:, None].to(x.dtype)
        else:
            return x
        if all(self.placed):
            return placed
        heads = torch.tensor(self.placed[:: len(self.placed) // x.shape[1]], device=x.device)
        return torch.where(heads[:, None, None], placed, x)


class Block(nn.Module):
    """Pre-norm: x + attention(norm x), then attention to a source where there is one, then x + feed-forward(norm x)."""

    def __init__(
        self, config: AttentionConfig, first: int, *, causal: bool = False, cross: bool = False, index: int = 0
    ):
        super().__init__()
        width, self.index = config.hidden_size, index
        self.norm = nn.LayerNorm(width)
        self.attention = SelfOrCrossAttention(config, first, causal=causal, layer_idx=index)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross_attention = SelfOrCrossAttention(config, first + 1, cross=True) if cross else None
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, config.intermediate_size), nn.GELU(), nn.Linear(config.intermediate_size, width)
        )
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        positions: Tensor,
        *,
        source: Tensor | None = None,
        cache: Cache | None = None,
        memory: Memory | None = None,
        across: ModelSplit | None = None,
    ) -> Tensor:
        """One block; with a memory, what it read before comes before the keys, and `positions` are those of both.

        `across` is the split of tokens and source, where those are split over ranks.
        """
        remembered = None if memory is None else self.norm(memory.behind(self.index, x))
        hidden = self.norm(x) if remembered is None else remembered[:, -x.shape[1] :]
        attended = self.attention(hidden, attention_mask, positions, source=remembered, cache=cache)
        x = x + self.dropout(attended)
        if self.cross_norm is not None and self.cross_attention is not None:
            with (across or ModelSplit(None)).attending():
                attended = self.cross_attention(self.cross_norm(x), None, positions, source=source)
            x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Stack(nn.Module):
    """Blocks one after the other, with a norm at the end.

    `first` is the number of its first attention layer in the model; a block has one, or two with cross-attention.
    """

    def __init__(
        self, config: AttentionConfig, layers: int, *, first: int = 0, causal: bool = False, cross: bool = False
    ):
        super().__init__()
        each = 2 if cross else 1
        self.blocks = nn.ModuleList(
            Block(config, first + each * i, causal=causal, cross=cross, index=i) for i in range(layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, x: Tensor, attention_mask: Tensor | None, positions: Tensor, **more: Any) -> Tensor:
        """All blocks."""
        for block in self.blocks:
            x = block(x, attention_mask, positions, **more)
        return self.norm(x)


class InputPositions(nn.Module):
    """The positions that are added to a model's input: a learned table, sinusoids, or nothing; then dropout."""

    def __init__(self, config: AttentionConfig):
        super().__init__()
        self.kind = config.positions
        self.dropout = nn.Dropout(config.hidden_dropout)
        table = nn.Embedding(config.max_position_embeddings, config.hidden_size) if self.kind == "learned" else None
        self.position_embeddings = table  # by this name `hf.position_limit` and `hf.extend_positions` find it

    def forward(self, x: Float[Tensor, "B N W"], positions: Int[Tensor, "B N"]) -> Float[Tensor, "B N W"]:
        """Add them."""
        if (table := self.position_embeddings) is not None:
            sequence, longest = in_use(), reach_of(table)
            tokens = positions.shape[1] if sequence is None else sequence.tokens
            if tokens > longest:
                raise ValueError(f"the input has {tokens} positions, but the model has {longest} learned ones")
            x = x + table(positions)
        elif self.kind == "sinusoidal":
            x = x + sinusoid(positions, x.shape[-1]).to(x.dtype)
        return self.dropout(x)


@loading_shared_modules
class AttentionModel(PreTrainedModel):
    """The base class of the models: it starts the weights and puts the config's methods into the layers."""

    config_class = AttentionConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _supports_attention_backend = True
    declares_attention = True  # each layer declares whether it is causal or cross-attention: nothing to try
    accepts_loss_kwargs = False  # losses are means over items, never over the tokens of several batches

    def finish(self) -> None:
        """At the end of a model's `__init__`: start the weights, then put the methods into the layers.

        A saved model's config records what ran in it when it was saved; that comes back.
        """
        self.post_init()
        config = self._layer_config()
        is_saved = getattr(config, hf.NAME, None) is not None
        if is_saved:
            methods: Any = read_record(getattr(config, hf.NAME), config).methods
        else:
            count = len(hf.find_layers(self))
            if not isinstance(config.method, str) and len(config.method) != count:
                raise ValueError(f"{len(config.method)} methods are given, but the model has {count} attention layers")
            methods = {number: config.method_of(number) for number in range(count)}
        # `from_pretrained` builds a model without storage; what a method learns starts from computed values.
        with torch.device("cpu" if self.device.type == "meta" else self.device):
            hf.swap(self, methods, max_length=config.max_position_embeddings)
        if not is_saved:
            check_training(self)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save the model; after `hf.restore`, it is saved and loaded with exact attention."""
        if hasattr(self.config, hf.NAME):
            return super().save_pretrained(*args, **kwargs)
        hf.swap(self, "full")
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            hf.restore(self)

    def _layer_config(self) -> AttentionConfig:
        """Give the model a copy of its config, because a swap writes into it: another model of the same is another."""
        shared, copied = self.config, copy.deepcopy(self.config)
        if asks_for_ours(copied):  # that of a swapped model, where this one has nothing attached yet
            copied._attn_implementation = "sdpa"
        for module in self.modules():
            if getattr(module, "config", None) is shared:
                module.config = copied
        return copied

    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights of `initializer_range`; a method's learned parameters start as the method defines.

        transformers empties the buffers that are in no file, and calls this to restore them.
        """
        if isinstance(module, Projections):
            module.derive(module.key.device)
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm | nn.Conv1d):
            super()._init_weights(module)
