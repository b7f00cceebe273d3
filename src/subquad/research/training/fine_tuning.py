"""Pretrained models that are fine-tuned: their settings, their tokenizer, and a classifier made of one."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from subquad import hf
from subquad.core.errors import InputError, as_input_error
from subquad.hf.layers import NAME
from subquad.hf.model_files import from_pretrained, read_config, read_tokenizer
from subquad.hf.swap_record import read_record
from subquad.hf.swapping import check_training
from subquad.hf.weights import check_weights
from subquad.methods import parse_method
from subquad.research.training.model_settings import STRICT
from subquad.research.training.models import AttentionConfig

LONGEST = 512  # tokens of a text by default, where positions reach further


@dataclass(frozen=True, kw_only=True)
class PretrainedSettings:
    """A pretrained model that is fine-tuned; it has its own sizes, positions and dropout.

    Attributes:
        pretrained: hub id or folder of an encoder or a language model; a classification head is put on it.
        method: the method of every attention layer, or a list with one method per layer.
    """

    __pydantic_config__ = STRICT

    pretrained: str
    method: str | list[str] = "full"

    def __post_init__(self) -> None:
        if not self.method:
            raise ValueError(f"method={self.method!r} names no method")
        for method in [self.method] if isinstance(self.method, str) else self.method:
            parse_method(method)


def check_not_swapped(where: str) -> None:
    """InputError where a model was saved with methods in its layers, which a run without a method would remove."""
    plain = getattr(config := _config_of(where), NAME, None)
    if not plain:
        return
    with as_input_error(f"{where}: "):
        record = read_record(plain, config)
    names = list(dict.fromkeys(method.name for method in record.methods.values()))
    texts = [str(record.methods.get(number, "full")) for number in range(record.layers)]
    same = f"--method {shlex.quote(texts[0])}" if len(set(texts)) == 1 else f'--set "model.method={texts}"'
    raise InputError(
        f"{where} was saved with {' and '.join(names[:5])} in its layers; choose what to train it with: {same}, or "
        "--method full for exact attention"
    )


@cache
def tokenizer_of(where: str, length: int) -> Any:
    """The tokenizer of a model, which reads `length` tokens of a text, or by default what its positions reach."""
    tokenizer = read_tokenizer(where)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise InputError(f"{where}: its tokenizer has no token to fill batches up with (pad_token)")
    limits = [tokenizer.model_max_length, _positions(where), LONGEST]
    tokenizer.model_max_length = length or min(limit for limit in limits if limit)
    return tokenizer


def classifier(where: str, settings: PretrainedSettings, labels: Sequence[str], length: int) -> PreTrainedModel:
    """A pretrained model with a head for these labels, its positions long enough, and the methods in its layers.

    The head's weights are drawn from torch's generator, unless the folder has one for as many labels.

    Raises:
        InputError: no such model, or weights other than those of a head that are not in its file.
        ValueError: a layer that cannot run its method, or in training would leak the future with it; methods for
            another number of layers.
    """
    model, loading = from_pretrained(
        AutoModelForSequenceClassification,
        where,
        config=_config(where, labels),
        dtype=torch.float32,
        attn_implementation="eager",  # as `read_model`: a config may name one that is not here
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    hf.restore(model)
    check_weights(where, model, _without_head(model, loading))
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    model.config.pad_token_id = tokenizer_of(where, length).pad_token_id
    model.accepts_loss_kwargs = False  # its loss is a mean over the texts of a batch, whatever Trainer asks for
    reach = tokenizer_of(where, length).model_max_length
    if reach > (hf.position_limit(model) or reach):
        hf.extend_positions(model, reach)
    hf.swap(model, _by_layer(settings.method, len(hf.find_layers(model))), max_length=reach)
    check_training(model)
    return model


def outline(where: str) -> PreTrainedModel:
    """The model with other weights, for what its layers are."""
    with torch.random.fork_rng():
        return AutoModelForSequenceClassification.from_config(_config(where, ["a", "b"])).eval()


def _config_of(where: str) -> Any:
    config = read_config(where)
    if isinstance(config, AttentionConfig):
        raise InputError(
            f"{where} is a model of subquad train, but model.pretrained names a pretrained model of transformers; "
            "without model.pretrained, subquad train makes a model from its sizes"
        )
    return config


def _config(where: str, labels: Sequence[str]) -> Any:
    config = _config_of(where)
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{where} is an encoder-decoder ({config.model_type}); give an encoder or a language model")
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise InputError(f"{where}: transformers has no classifier for models of type {config.model_type!r}")
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = "single_label_classification"
    config.use_cache = False
    return config


def _positions(where: str) -> int | None:
    """The number of tokens that the positions of a model reach, by its config."""
    with torch.device("meta"):
        limit = hf.position_limit(outline(where))
    return limit or getattr(read_config(where), "max_position_embeddings", None)


def _without_head(model: Any, loading: dict[str, Any]) -> dict[str, Any]:
    """The report of loading, without the weights of the head and of its pooling, which may be new."""

    def is_of_the_body(name: str) -> bool:
        return name.startswith(f"{model.base_model_prefix}.") and ".pooler." not in name

    names: dict[str, Callable[[Any], str]] = {"missing_keys": str, "mismatched_keys": lambda key: key[0]}
    return loading | {kind: [key for key in loading[kind] if is_of_the_body(name(key))] for kind, name in names.items()}


def _by_layer(method: str | list[str], layers: int) -> Any:
    if isinstance(method, str):
        return method
    if len(method) != layers:
        raise ValueError(f"{len(method)} methods are given, but the model has {layers} attention layers")
    return dict(enumerate(method))
