"""Causal language models: what comes next, with any attention that does not look ahead."""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from subquad import hf
from subquad.core.versions import cache_in, name_of_cache
from subquad.methods import parse_method
from subquad.nn.memory import refuse_without_memory
from subquad.research.training.models.blocks import AttentionModel, InputPositions, Stack
from subquad.research.training.models.configuration import AttentionConfig
from subquad.research.training.models.encoder import item_losses, per_item_loss
from subquad.research.training.models.positional_encodings import counted
from subquad.research.training.models.segment_memory import Memory
from subquad.research.training.models.splitting import refuse_when_split, split

NAME_OF_CACHE = name_of_cache(create_causal_mask)  # in transformers' functions and outputs


@strict
class LanguageConfig(AttentionConfig):
    """A causal language model; by default of bytes.

    Attributes:
        vocab_size: symbols. By default the 256 bytes, the symbol before the first byte, and padding.
        tie_word_embeddings: whether the output reads the table of the input's embeddings.
        piece: tokens that are read at a time; 0 reads the whole input at once.
        memory: tokens before a piece whose hidden states every layer remembers, without a gradient (Transformer-XL).
    """

    model_type = "subquad-language"

    vocab_size: int = 258
    bos_token_id: int | None = 256
    pad_token_id: int | None = 257
    tie_word_embeddings: bool = True
    piece: int = 0
    memory: int = 0

    def validate_architecture(self) -> None:
        """Refuse sizes and words that no model can be made of."""
        super().validate_architecture()
        for name in ("piece", "memory"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}, but it must be at least 0")
        if self.memory and not self.piece:
            raise ValueError(f"memory={self.memory} needs pieces that it comes before: give piece, their length")
        if self.memory:
            for method in [self.method] if isinstance(self.method, str) else self.method:
                refuse_without_memory(parse_method(method))


class CausalLanguageModel(AttentionModel, GenerationMixin):
    """Say at each place what comes next. Methods must be strictly causal; `hf.swap` refuses others with the reason.

    `generate` accepts transformers' caches if the methods support steps on one, and `sq.hf.StateCache(model)` if
    they are recurrent. Padding may be on either side: positions count real tokens.

    >>> import torch
    >>> from subquad.research.training.models import CausalLanguageModel, LanguageConfig
    >>> model = CausalLanguageModel(LanguageConfig(hidden_size=32, method="local:window=16")).eval()
    >>> text = torch.tensor([list(b"It was the best of")])
    >>> model.generate(text, max_new_tokens=5, do_sample=False).shape
    torch.Size([1, 23])
    """

    config_class = LanguageConfig
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012

    def __init__(self, config: LanguageConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.input_positions = InputPositions(config)
        self.stack = Stack(config, config.num_hidden_layers, causal=True)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.finish()

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of the symbols."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        """The layer that makes logits; with `tie_word_embeddings` its weight is that of the input's table."""
        return self.head

    def forward(
        self,
        input_ids: Int[Tensor, "B N"],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "B N"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        memory: Memory | None = None,
        cache: Cache | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, N, symbols) of the next symbol, and the mean over items of their mean cross-entropy with labels.

        `labels` are those of the places of `input_ids`, as transformers has them: the prediction at position i
        is compared with label i + 1; −100 is not a place. `attention_mask` (B, tokens before and new): which are real.

        With `config.piece` the input is read in pieces; each attends to the hidden states of the `config.memory`
        tokens before it, too. `memory` is a `Memory` of what was read in earlier calls, which this call adds to.
        `cache` is transformers' name for `past_key_values` since 5.24.

        Raises:
            ValueError: more tokens than there are learned positions; pieces or a memory together with a key-value
                cache, packed sequences, padding on the left, or a method that has as many keys as queries.
        """
        cache = past_key_values if cache is None else cache
        if memory is not None or self.config.piece:
            refuse_when_split("a model that reads pieces or has a memory")
            self._check_pieces(input_ids, attention_mask, position_ids, cache is not None or use_cache, memory)
            memory = Memory(self.config.memory) if memory is None else memory
            x = self._in_pieces(input_ids, attention_mask, memory)
        else:
            x, cache = self._at_once(input_ids, attention_mask, position_ids, cache, use_cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        here = split(input_ids.shape[1])
        logits = self.head(x if labels is not None else x[:, kept])
        loss = None if labels is None else per_item_loss(logits, shifted(labels), here)
        logits = logits if self.training else here.whole(logits)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{NAME_OF_CACHE: cache})

    def _at_once(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        use_cache: bool | None,
    ) -> tuple[Tensor, Cache | None]:
        """The hidden states of all tokens, and the cache behind them."""
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        before = cache.get_seq_length() if cache is not None else 0
        self._check_length(before + input_ids.shape[1])
        if position_ids is not None or cache is not None:
            refuse_when_split("`position_ids` or a key-value cache")
        positions = self._positions(input_ids, attention_mask, before) if position_ids is None else position_ids
        here = split(input_ids.shape[1])
        positions, attention_mask = here.shard(positions.expand(input_ids.shape)), here.shard(attention_mask)
        with here.attending():
            x = self.input_positions(self.embedding(here.shard(input_ids)), positions)
            mask = create_causal_mask(
                self.config, x, attention_mask, position_ids=position_ids, **{NAME_OF_CACHE: cache}
            )
            return self.stack(x, mask, positions, cache=cache), cache

    def _in_pieces(self, input_ids: Tensor, attention_mask: Tensor | None, memory: Memory) -> Tensor:
        """The hidden states of all tokens, each piece behind the memory of those before it."""
        self._check_length(memory.count + input_ids.shape[1])
        memory.padded |= attention_mask is not None
        valid = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        piece, hidden = self.config.piece or input_ids.shape[1], []
        for ids, here in zip(input_ids.split(piece, 1), valid.split(piece, 1), strict=True):
            remembered = memory.tokens
            positions, before = memory.placed(here)
            x = self.input_positions(self.embedding(ids), positions[:, remembered:])
            cache = Memory.as_cache(remembered, x)
            padding = before.long() if memory.padded else None
            mask = create_causal_mask(self.config, x, padding, **{NAME_OF_CACHE: cache})
            hidden.append(self.stack(x, mask, positions, memory=memory))
        return torch.cat(hidden, dim=1)

    def _check_pieces(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        caches: bool | None,
        memory: Memory | None,
    ) -> None:
        """ValueError for what pieces and a memory are not supported with."""
        if caches:
            raise ValueError("a model that reads pieces keeps a memory and no key-value cache: pass use_cache=False")
        if memory is not None:
            for bound in hf.bounds(self).values():
                refuse_without_memory(bound.method)
        several = memory is not None or input_ids.shape[1] > self.config.piece > 0
        if torch.compiler.is_compiling():
            return
        if attention_mask is not None and several and not bool(attention_mask[:, 0].all()):
            raise ValueError(
                "the padding is on the left, where it would move the pieces of an item: pad on the right, or give "
                "texts of one length"
            )
        if position_ids is not None:
            positions = self._positions(input_ids, attention_mask, 0 if memory is None else memory.count)
            if not bool((position_ids == positions).all()):
                raise ValueError("pieces and a memory count the tokens themselves; `position_ids` count them otherwise")

    def generate(self, *args: Any, **options: Any) -> Any:
        """Generate tokens, without a cache if a method does not support steps on one, such as LHA.

        Tokens are the same with and without. Such a method reads the whole text again for each of them.
        """
        if cache_in(options) is None and not self.takes_steps:
            options.setdefault("use_cache", False)
        return super().generate(*args, **options)

    @property
    def takes_steps(self) -> bool:
        """True if every layer's method supports steps on a key-value cache, which pieces do not."""
        if self.config.piece:
            return False
        traits = [bound.method.traits for bound in hf.bounds(self).values()]
        return all(t.cross or t.cached for t in traits)

    def _check_length(self, length: int | Tensor) -> None:
        """ValueError where a step on a cache goes past the last learned position."""
        table = self.input_positions.position_embeddings
        if table is not None and length > table.num_embeddings:
            raise ValueError(f"this is token {int(length)}, but the model has {table.num_embeddings} learned positions")

    def _positions(self, input_ids: Tensor, attention_mask: Tensor | None, before: int | Tensor) -> Tensor:
        """The place of each new token among the real ones of its item."""
        if attention_mask is not None and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        return counted(input_ids) + before


def shifted(labels: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """The target of each position: the label of the next one; the last has none."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def next_symbol_losses(
    logits: Float[Tensor, "B N V"], labels: Int[Tensor, "B N"]
) -> tuple[Float[Tensor, " B"], Int[Tensor, " B"]]:
    """`item_losses` of the symbols after the first: the prediction at position i is compared with label i + 1."""
    return item_losses(logits[:, :-1], labels[:, 1:])
