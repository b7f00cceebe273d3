"""Differences of a saved model from its original: settings that changed, and how far its embeddings are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad import hf
from subquad.tools.measure.fidelity import cosine
from subquad.tools.models.dtypes import short_name

LIMITS = ("max_seq_length", "model_max_length")  # of a SentenceTransformer, and of a tokenizer
POSITIONS = "positions"
CHARACTERS = 8  # of a text, per token that is wanted of it; what is too long is cut
TEXTS, FEWEST_TEXTS, TOKENS = 8, 3, 8192  # whose embeddings are compared, and their tokens together

_OF_TOKENIZERS = ("padding_side", "truncation_side")
_OF_SENTENCE_TRANSFORMERS = ("prompts", "default_prompt_name", "similarity_fn_name")


def text_settings(model: Any, tokenizer: Any = None) -> dict[str, Any]:
    """Everything of a text model, other than weights and methods, that decides about its outputs.

    `tokenizer` is that of a model of transformers; a SentenceTransformer holds its own.
    """
    inner = hf.transformers_model(model)
    settings: dict[str, Any] = {
        "dtype": short_name(inner.dtype),
        POSITIONS: hf.position_limit(inner) or hf.rotary_limit(inner),
    }
    if model is not inner:
        tokenizer = model.tokenizer
        settings[LIMITS[0]] = model.max_seq_length
        settings |= {name: getattr(model, name, None) for name in _OF_SENTENCE_TRANSFORMERS}
        for number, module in enumerate(model):
            name = f"{number}_{type(module).__name__}"
            config = module.get_config_dict() if hasattr(module, "get_config_dict") else {}
            settings[name] = {key: value for key, value in config.items() if key not in LIMITS}
    elif tokenizer is not None:
        settings[LIMITS[1]] = tokenizer.model_max_length
    return settings | {name: getattr(tokenizer, name, None) for name in _OF_TOKENIZERS}


def longest_text(settings: Mapping[str, Any]) -> int | None:
    """The tokens of the longest text that is read whole by a model with these settings; None if there is no limit."""
    limits = [settings.get(name) for name in (*LIMITS, POSITIONS)]
    return min((int(limit) for limit in limits if limit is not None), default=None)


def limit_name(settings: Mapping[str, Any]) -> str:
    """The setting that limits a text."""
    named = {name: settings[name] for name in (*LIMITS, POSITIONS) if settings.get(name) is not None}
    return min(named, key=lambda name: named[name])


def differing_settings(original: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """A line for each setting that differs, with both values; that of the longest text has its consequence too."""
    lines = []
    for name in dict.fromkeys((*original, *saved)):
        before, after = original.get(name), saved.get(name)
        if before == after:
            continue
        line = f"{name} {_shown(before)} → {_shown(after)}"
        if name in LIMITS:
            line += f": embeddings of texts over {_shown(before)} tokens differ from the original's"
        lines.append(line)
    return lines


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


# ---------------------------------------------------------------------- embeddings


class EmbeddedTexts:
    """Texts with the embeddings that a SentenceTransformer makes of them before it is changed.

    Args:
        model: the SentenceTransformer.
        documents: returns the documents that the texts are cut from.
        limit: the tokens of the longest text that it reads whole; None if there is no limit.
        tokens: the length of the longest texts that are of interest.
    """

    def __init__(self, model: Any, documents: Callable[[], Sequence[str]], limit: int | None, tokens: int):
        text = "\n\n".join(documents())
        self.limit = limit
        within = tokens if limit is None else min(limit, tokens)
        prompt = (getattr(model, "prompts", None) or {}).get(getattr(model, "default_prompt_name", None)) or ""
        self._texts = texts_of(text, model.tokenizer, within, prompt)
        if within < tokens:
            longer = texts_of(text, model.tokenizer, tokens, prompt)
            self._texts |= {one: count for one, count in longer.items() if count > within}
        self._embeddings = embedded(model, list(self._texts)) if self._texts else torch.empty(0)

    def compared(self, model: Any) -> list[str]:
        """Sentences on the cosines to the original's embeddings: of texts within its limit, and of longer ones."""
        if not self._texts:
            return []
        cosines = cosine(embedded(model, list(self._texts)), self._embeddings)
        counts = list(self._texts.values())
        is_long = torch.tensor([self.limit is not None and count > self.limit for count in counts])
        lines = []
        for chosen in (~is_long, is_long):
            if chosen.any():
                tokens = [count for count, one in zip(counts, chosen.tolist(), strict=True) if one]
                sizes = f"{min(tokens):,} to {max(tokens):,}" if min(tokens) < max(tokens) else f"{max(tokens):,}"
                lines.append(
                    f"Cosine to the original model's embeddings, on {len(tokens)} texts of {sizes} tokens: "
                    f"{cosines[chosen].mean():.4f} on average, {cosines[chosen].min():.4f} at least."
                )
        return lines


def texts_of(text: str, tokenizer: Any, tokens: int, prompt: str = "") -> dict[str, int]:
    """Texts of at most `tokens` tokens behind a prompt, spread over a text, with their numbers of tokens."""

    def counted(part: str) -> int:
        return len(tokenizer(prompt + part, truncation=False, verbose=False)["input_ids"])

    count = max(FEWEST_TEXTS, min(TEXTS, TOKENS // tokens))
    size = CHARACTERS * tokens
    texts = {}
    for number in range(count):
        start = number * max(len(text) - size, 0) // count
        ids = tokenizer(text[start : start + size], add_special_tokens=False, verbose=False)["input_ids"][:tokens]
        while ids and (beyond := counted(tokenizer.decode(ids)) - tokens) > 0:
            ids = ids[:-beyond]
        if ids:
            one = tokenizer.decode(ids)
            texts[one] = counted(one)
    return texts


def embedded(model: Any, texts: list[str]) -> Tensor:
    """The embeddings of a SentenceTransformer, in fp32."""
    embeddings: Tensor = model.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    return embeddings.float().cpu()
