"""The sources of an example input: the model, its config and forward signature, the sizes asked for."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

PADDINGS = ("none", "right", "left")


@dataclass
class Form:
    """The model and the sizes of the inputs wanted, with the tensors that rules are written in."""

    model: PreTrainedModel
    batch: int
    length: int
    padding: str
    seed: int
    image_tokens: int = 0  # in front of each text
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def config(self) -> PreTrainedConfig:
        """The model's config."""
        return self.model.config

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The named parameters of the model's forward pass."""
        arguments = inspect.signature(self.model.forward).parameters.values()
        return {p.name: p for p in arguments if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is an int somewhere in the config (nested ones after the outer one's).

        Raises:
            ValueError: none is, and there is no default.
        """
        for name in names:
            for config in configs(self.config):
                value = _get(config, name)
                value = value[0] if isinstance(value, list | tuple) and value else value
                value = value.get("height") if isinstance(value, dict) else value
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        if default is None:
            raise self.missing(f"its config has none of {', '.join(names)}")
        return default

    def missing(self, what: str) -> ValueError:
        """The error for a model whose inputs cannot be built."""
        return ValueError(f"no example inputs for {type(self.model).__name__} ({self.config.model_type}): {what}")

    # ------------------------------------------------------------------ tensors

    def floats(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from low to high − 1."""
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def ids(self, length: int, vocabulary: int | None = None) -> Tensor:
        """Token ids that mean nothing special; padded positions hold the padding token."""
        plain = self._plain_ids(vocabulary or self.vocabulary)
        ids = plain[self.integers(0, len(plain), self.batch, length)]
        mask = self.mask(length)
        pad = self.pad_token
        return ids if mask is None else ids.masked_fill(mask == 0, pad if 0 <= pad < self.vocabulary else 0)

    def mask(self, length: int) -> Tensor | None:
        """1 at real positions, 0 at the padded ones of the last item; None where no padding is asked for."""
        if self.padding == "none":
            return None
        mask = self.ones(length)
        pads = length // 2
        mask[-1, slice(0, pads) if self.padding == "left" else slice(length - pads, None)] = 0
        return mask

    def full_mask(self, length: int) -> Tensor:
        """The padding mask, or ones where the form asks for no padding."""
        mask = self.mask(length)
        return self.ones(length) if mask is None else mask

    def ones(self, length: int) -> Tensor:
        """The mask of texts without padding."""
        return torch.ones(self.batch, length, dtype=torch.long)

    # ------------------------------------------------------------------ the vocabulary

    @cached_property
    def vocabulary(self) -> int:
        """The number of ids that the input embeddings know."""
        try:
            embeddings = self.model.get_input_embeddings()
        except (NotImplementedError, AttributeError):
            embeddings = None
        size = getattr(embeddings, "num_embeddings", None)
        known = self.number("vocab_size", default=size or 0) if not isinstance(embeddings, nn.Embedding) else size
        if not known:
            raise self.missing("it has no vocabulary")
        return int(known)

    @property
    def pad_token(self) -> int:
        """The id at padded positions."""
        return next((v for c in configs(self.config) if isinstance(v := _get(c, "pad_token_id"), int)), 0)

    def _plain_ids(self, vocabulary: int) -> Tensor:
        special = {i for name, i in special_ids(self.config)}
        plain = [i for i in range(min(vocabulary, 1000)) if i not in special]
        return torch.tensor(plain or [0])


def configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The config and those inside it, outermost first."""
    level = [config]
    while level:
        yield from level
        level = [v for c in level for v in vars(c).values() if isinstance(v, PreTrainedConfig)]


def special_ids(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """(field name, id) of every token with a meaning of its own."""
    for each in configs(config):
        for name, value in vars(each).items():
            if name.endswith(("_token_id", "_token_index", "_token_idx", "_token_ids", "_token")):
                for single in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(single, int) and not isinstance(single, bool):
                        yield name, single


def _get(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except (AttributeError, ValueError):  # a value that differs from layer to layer
        return None
