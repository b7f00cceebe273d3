"""Small random models of the families that generate, and their forward passes behind one interface."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

import subquad as sq
from tests.library.hf.models import VOCAB, need_the_interface
from tests.library.hf.named import DECODER, MARKS
from tests.library.hf.prompts import generated

LONGEST = 2048  # tokens of learned positions
FRAMES = 150  # that decoders of speech read
GLOBAL_AND_LOCAL = ["full_attention", "sliding_attention"]
SIZES = DECODER | {"max_position_embeddings": LONGEST}
ENCODER_DECODER = MARKS | {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
    "decoder_start_token_id": 2,
}  # fmt: skip


def llama() -> hf.PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, head_dim=16))


def gpt2() -> hf.PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST, "pad_token_id": 0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **MARKS))


def qwen3() -> hf.PreTrainedModel:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=20))


def gemma3() -> hf.PreTrainedModel:
    options = {"head_dim": 16, "sliding_window": 40, "layer_types": GLOBAL_AND_LOCAL}
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES | {"num_key_value_heads": 1}, **options))


def gemma2() -> hf.PreTrainedModel:
    options = {"head_dim": 8, "sliding_window": 24, "layer_types": GLOBAL_AND_LOCAL, "attn_logit_softcapping": 3.0}
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, **options))


def phi() -> hf.PreTrainedModel:
    return hf.PhiForCausalLM(hf.PhiConfig(**SIZES | {"num_key_value_heads": 4}, partial_rotary_factor=0.5))


def phi3() -> hf.PreTrainedModel:
    return hf.Phi3ForCausalLM(hf.Phi3Config(**SIZES))


def opt() -> hf.PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": VOCAB}
    options = {"max_position_embeddings": LONGEST, "word_embed_proj_dim": 32, "pad_token_id": 0}
    return hf.OPTForCausalLM(hf.OPTConfig(**sizes, **options, **MARKS))


def mistral() -> hf.PreTrainedModel:
    return hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=37))


def gpt_oss() -> hf.PreTrainedModel:
    options = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 21, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES, **options, rope_parameters=rope))
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_()
    return model


def whisper() -> hf.PreTrainedModel:
    options = {"num_mel_bins": 8, "max_source_positions": FRAMES, "max_target_positions": LONGEST}
    quiet = {"suppress_tokens": None, "begin_suppress_tokens": None}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**ENCODER_DECODER, **options, **quiet))


def t5() -> hf.PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0))


def bart() -> hf.PreTrainedModel:
    options = {"max_position_embeddings": LONGEST, "forced_eos_token_id": None}
    return hf.BartForConditionalGeneration(hf.BartConfig(**ENCODER_DECODER, **options))


DECODERS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "llama": llama,
    "gpt2": gpt2,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "gemma2": gemma2,
    "phi": phi,
    "phi3": phi3,
    "opt": opt,
    "mistral": mistral,
    "gpt-oss": gpt_oss,
}
ENCODER_DECODERS: dict[str, Callable[[], hf.PreTrainedModel]] = {"whisper": whisper, "t5": t5, "bart": bart}
FAMILIES = DECODERS | ENCODER_DECODERS
EXACT = ("full", "full:kernel=subquad")
BY_HALVES = "clustered-tail"  # exact on BLOCK tokens, and in each step that follows
EXACT_ALONE = ("gemma2", "gpt-oss", "mistral", "t5")  # capped logits, sinks, windows in all layers, a position bias
DECODER_SELF_ATTENTION = "*decoder.*self_attn"


@dataclass(frozen=True)
class Subject:
    """A model that generates. `memory` is what its decoder reads besides the tokens, for a batch."""

    name: str
    model: hf.PreTrainedModel
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def reads_memory(self) -> bool:
        """True if the family is a decoder that reads an encoder's output."""
        return self.name in ENCODER_DECODERS

    def __call__(self, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
        """The logits of these tokens, which follow those of the cache; `mask` is over all tokens."""
        prefix = "decoder_" if self.reads_memory else ""
        inputs: dict[str, Any] = {prefix + "input_ids": ids, "past_key_values": cache, "use_cache": True}
        if mask is not None:
            inputs[prefix + "attention_mask"] = mask
            if not self.reads_memory and self.name != "opt":  # OPT counts by itself
                inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return self.model(**of_batch(self.memory, len(ids)), **inputs).logits

    def cache(self, kind: str = "dynamic", length: int = 0) -> Any:
        """A new cache: "dynamic", "growing", or "static" for `length` tokens."""
        config = self.model.config.get_text_config(decoder=True)

        def make(kind: str) -> Any:
            if kind == "growing":
                return sq.hf.GrowingCache(self.model)
            return hf.StaticCache(config, length) if kind == "static" else hf.DynamicCache(config=config)

        other = "dynamic" if kind == "static" else kind  # cross-attention fills it at once
        return hf.EncoderDecoderCache(make(kind), make(other)) if self.reads_memory else make(kind)

    def generated(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """The tokens that the model generates, and the logits of each step."""
        prefix = "decoder_" if self.reads_memory else ""
        return generated(self.model, ids, mask, prefix, **of_batch(self.memory, len(ids)), **options)

    def to(self, dtype: torch.dtype) -> "Subject":
        """A copy with weights and memory rounded to bf16, in another dtype."""
        model = copy.deepcopy(self.model).to(torch.bfloat16).to(dtype)
        memory = {
            key: BaseModelOutput(value[0].to(torch.bfloat16).to(dtype)) if isinstance(value, BaseModelOutput) else value
            for key, value in self.memory.items()
        }
        return Subject(self.name, model, memory)

    def swapped(self, method: str) -> "Subject":
        """The model with a method, which is swapped into it once in a process."""
        return Subject(self.name, _swapped(self.name, method), self.memory)


def of_batch(memory: dict[str, Any], batch: int) -> dict[str, Any]:
    """The first items of what an encoder gave."""
    return {
        key: BaseModelOutput(value[0][:batch]) if isinstance(value, BaseModelOutput) else value[:batch]
        for key, value in memory.items()
    }


def model(name: str) -> hf.PreTrainedModel:
    """A fresh model on its own eager attention, in eval mode, always with the same weights."""
    torch.manual_seed(0)
    made = FAMILIES[name]()
    for parameter in made.parameters():  # sharper attention than at initialisation: mistakes must show
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    made.set_attn_implementation("eager")
    made.generation_config.eos_token_id = None
    return made.eval()


def subject(name: str, batch: int = 6) -> Subject:
    """A model with its own attention, and what an encoder gave for a batch, of which the second item is padded."""
    made = _own(name)
    need_the_interface(made)
    if name not in ENCODER_DECODERS:
        return Subject(name, made)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        if name == "whisper":
            features = torch.randn(batch, 8, 2 * FRAMES, generator=generator)
            return Subject(name, made, {"encoder_outputs": BaseModelOutput(made.get_encoder()(features)[0])})
        ids = torch.randint(5, VOCAB, (batch, 45), generator=generator)
        mask = torch.ones_like(ids)
        mask[1::2, 20:] = 0
        encoded = made.get_encoder()(input_ids=ids, attention_mask=mask)[0]
    return Subject(name, made, {"encoder_outputs": BaseModelOutput(encoded), "attention_mask": mask})


@cache
def _own(name: str) -> hf.PreTrainedModel:
    return model(name)


@cache
def _swapped(name: str, method: str) -> hf.PreTrainedModel:
    made = model(name)
    in_decoder = name in ENCODER_DECODERS and method not in EXACT
    sq.hf.swap(made, {DECODER_SELF_ATTENTION: method} if in_decoder else method)
    return made


def methods_of(name: str) -> list[str]:
    """The methods whose steps are exact that a family takes, one of a kind."""
    return [*EXACT] if name in EXACT_ALONE else [*EXACT, BY_HALVES]
