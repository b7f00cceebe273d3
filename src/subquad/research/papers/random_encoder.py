"""A small random encoder with a tokenizer, labelled texts and plain text, in a folder: what smoke runs read."""

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from subquad.core import files

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = tuple(f"w{number}" for number in range(60))
LABELS = {"a": WORDS[:40], "b": WORDS[20:]}  # a text of a label is made of these
POSITIONS = 64
TEXT_WORDS = 40


def write_random_encoder(folder: Path) -> None:
    """`folder`/model, and `folder`/data with labelled texts and two plain ones; the same ones every time."""
    with files.whole_folder(folder / "model") as model:
        _write_model(model)
    draw = np.random.default_rng(0)
    for part, count in (("train", 24), ("test", 8)):
        _write_table(folder / "data" / "labelled" / f"{part}.csv", draw, count)
    for name in ("fit", "read"):
        _write_text(folder / "data" / f"{name}.txt", draw)


def _write_model(folder: Path) -> None:
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *WORDS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    core.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=POSITIONS, pad_token_id=0, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertModel(config)
    model.save_pretrained(folder)


def _write_table(path: Path, draw: np.random.Generator, count: int) -> None:
    text = StringIO()
    table = csv.writer(text)
    table.writerow(("text", "label"))
    for i in range(count):
        label = list(LABELS)[i % len(LABELS)]
        table.writerow((_words(draw, LABELS[label], TEXT_WORDS), label))
    files.write(path, text.getvalue())


def _write_text(path: Path, draw: np.random.Generator) -> None:
    files.write(path, "\n".join(_words(draw, WORDS, TEXT_WORDS) for _ in range(100)))


def _words(draw: np.random.Generator, vocabulary: Sequence[str], count: int) -> str:
    return " ".join(vocabulary[i] for i in draw.integers(0, len(vocabulary), count))
