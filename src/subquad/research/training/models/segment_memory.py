"""The memory of a model: what each of its blocks read before, for Dai et al. 2019, "Transformer-XL"."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache

from subquad.nn.memory import preceded, remember


class Memory:
    """The inputs of each block of a model, of the last `length` tokens, without a gradient.

    A forward pass that is given a memory adds its own tokens to it.

    >>> import torch
    >>> from subquad.research.training.models import CausalLanguageModel, LanguageConfig, Memory
    >>> model = CausalLanguageModel(LanguageConfig(hidden_size=32, memory=8, piece=8)).eval()
    >>> memory, text = Memory(8), torch.tensor([list(b"It was the best of times")])
    >>> parts = [model(part, memory=memory).logits for part in text.split(8, dim=1)]
    >>> torch.allclose(torch.cat(parts, 1), model(text).logits, atol=1e-5)
    True
    """

    def __init__(self, length: int):
        self.length, self.count = length, 0  # the largest number of tokens in it, and how many it has seen
        self.padded = False  # whether some of those may have been padding
        self.states: dict[int, Float[Tensor, "B R W"]] = {}  # by block
        self.positions: Int[Tensor, "B R"] | None = None  # the positions of the tokens in the memory
        self.valid: Bool[Tensor, "B R"] | None = None  # which of them are not padding
        self.seen: Int[Tensor, "B 1"] | None = None  # real tokens so far

    @property
    def tokens(self) -> int:
        """The number of tokens in the memory."""
        return 0 if self.positions is None else self.positions.shape[1]

    def placed(self, valid: Bool[Tensor, "B N"]) -> tuple[Int[Tensor, "B M"], Bool[Tensor, "B M"]]:
        """The positions of the tokens in the memory and of new ones behind them, and which of all are real.

        From then on the new tokens are in the memory, for the next forward pass.

        Raises:
            ValueError: the memory is of another batch or device.
        """
        before = torch.zeros(len(valid), 1, dtype=torch.int64, device=valid.device) if self.seen is None else self.seen
        if len(before) != len(valid):
            raise ValueError(f"`memory` has {len(before)} items but `input_ids` has {len(valid)}; they must match")
        positions = before + (valid.long().cumsum(1) - 1).clamp(min=0)
        if self.positions is not None and self.valid is not None:
            positions, valid = torch.cat([self.positions, positions], dim=1), torch.cat([self.valid, valid], dim=1)
        first = max(positions.shape[1] - self.length, 0)
        new = positions.shape[1] - self.tokens
        self.count, self.seen = self.count + new, before + valid[:, -new:].sum(1, keepdim=True)
        self.positions, self.valid = positions[:, first:], valid[:, first:]
        return positions, valid

    def behind(self, block: int, x: Float[Tensor, "B N W"]) -> Float[Tensor, "B M W"]:
        """Return what a block read before, followed by its new input, which is remembered.

        Raises:
            ValueError: the memory is of another batch, width or device.
            TypeError: it is of another dtype.
        """
        before = self.states.get(block)
        source = x if before is None else preceded(x, before, name="hidden states")
        self.states[block] = remember(source, length=self.length)
        return source

    @staticmethod
    def as_cache(tokens: int, x: Tensor) -> Cache | None:
        """A cache of this number of tokens as transformers' mask functions read it; None without a token."""
        if tokens == 0:
            return None
        cache, nothing = DynamicCache(), x.new_empty(1, 1, tokens, 1)
        cache.update(nothing, nothing, 0)
        return cache
