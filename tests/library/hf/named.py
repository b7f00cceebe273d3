"""Small random models of the architectures that docs/models.md names, each with inputs of two lengths."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from tests.library.hf.models import TEXT, VOCAB, Case, need_the_interface, padded_ids

MARKS = {"bos_token_id": 1, "eos_token_id": 2}
DECODER = TEXT | MARKS | {"num_key_value_heads": 2}
BLOCK = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE = BLOCK | {"image_size": 32, "patch_size": 4}
LENGTH = 29  # tokens of the longer text


def encoder(cls: Callable[[Any], hf.PreTrainedModel], config: type, **options: Any) -> Case:
    """An encoder of texts, of which the second is padded on the right."""
    ids, mask = padded_ids(length=LENGTH)
    inputs = {"input_ids": ids, "attention_mask": mask}
    return Case(cls(config(**(TEXT | options))), inputs, mask.bool())


def later(name: str) -> tuple[Any, Any]:
    """The classes of an encoder and its config that the oldest transformers of ours do not have; skips without them."""
    if not hasattr(hf, f"{name}Model"):
        pytest.skip(f"transformers {hf.__version__} has no {name}Model")
    return getattr(hf, f"{name}Model"), getattr(hf, f"{name}Config")


def decoder(cls: Callable[[Any], hf.PreTrainedModel], config: type, **options: Any) -> Case:
    """A decoder of prompts, of which the second is padded on the left, with positions as `generate` counts them."""
    ids, mask = padded_ids("left", length=LENGTH)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return Case(cls(config(**(DECODER | options))), inputs, mask.bool())


def vision(cls: Callable[[Any], hf.PreTrainedModel], config: type, **options: Any) -> Case:
    """A model of images, of 64 patches each."""
    return Case(cls(config(**(IMAGE | options))), {"pixel_values": torch.randn(2, 3, 32, 32)})


def text_and_image(cls: Callable[[Any], hf.PreTrainedModel], config: type, text: dict[str, Any]) -> Case:
    """A model of texts, padded on the right, and of images; the text is embedded, and so is the image."""
    ids, mask = padded_ids(length=LENGTH)
    ids[torch.arange(2), mask.sum(1) - 1] = text["eos_token_id"]  # where CLIP reads the text's embedding
    settings = config(text_config=BLOCK | text, vision_config=IMAGE | {"projection_dim": 32})
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(2, 3, 32, 32)}
    return Case(cls(settings), inputs)


def whisper(part: Callable[[Any], nn.Module]) -> Case:
    """A model of speech with 20 frames."""
    config = hf.WhisperConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20,
        max_target_positions=30, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(2, 8, 40)}
    whole = hf.WhisperForConditionalGeneration(config)
    if part(whole) is whole:
        inputs["decoder_input_ids"] = padded_ids(length=9, pads=0)[0]
    return Case(part(whole), inputs)


def wav2vec2() -> Case:
    """A model of speech with 39 frames, of which the second item has fewer."""
    config = hf.Wav2Vec2Config(
        **BLOCK, conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer", mask_time_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 250:] = 0
    model = hf.Wav2Vec2Model(config)
    frames = model._get_feature_vector_attention_mask(39, mask)
    return Case(model, {"input_values": torch.randn(2, 400), "attention_mask": mask}, frames.bool())


def t5() -> Case:
    """T5's encoder."""
    config = hf.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0)
    ids, mask = padded_ids(length=LENGTH)
    return Case(hf.T5EncoderModel(config), {"input_ids": ids, "attention_mask": mask}, mask.bool())


class OwnAttention(nn.Module):
    """Attention with a bias by distance, in the model's own code, as models that bring their code with them have."""

    def __init__(self, config: Any):
        super().__init__()
        self.project = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        positions = torch.arange(x.shape[1])
        scores = query @ key.mT - 0.1 * (positions[:, None] - positions).abs()
        return scores.masked_fill(~mask[:, None].bool(), -1e9).softmax(-1) @ value


class OwnCode(hf.PreTrainedModel):
    """A model of one layer of that attention."""

    config_class = hf.BertConfig

    def __init__(self, config: Any):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.attention = OwnAttention(config)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        x = self.attention(self.embeddings(input_ids), attention_mask)
        return hf.modeling_outputs.BaseModelOutput(last_hidden_state=x)


GLOBAL_AND_LOCAL = ["full_attention", "sliding_attention"]
MODERN = MARKS | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8, "layer_types": GLOBAL_AND_LOCAL}
GEMMA = {"head_dim": 8, "sliding_window": 6, "layer_types": GLOBAL_AND_LOCAL}
CLIP_TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 64, "projection_dim": 32, "pad_token_id": 0} | MARKS

# One entry for each line of docs/models.md, by its first column without what stands in brackets.
MODELS: dict[str, Callable[[], Case]] = {
    "BERT": lambda: encoder(hf.BertModel, hf.BertConfig),
    "XLM-RoBERTa": lambda: encoder(hf.XLMRobertaModel, hf.XLMRobertaConfig),
    "ModernBERT": lambda: encoder(hf.ModernBertModel, hf.ModernBertConfig, **MODERN),
    "nomic-bert": lambda: encoder(*later("NomicBert")),
    "GTE": lambda: encoder(*later("Gte")),
    "Jina v3": lambda: encoder(*later("JinaEmbeddingsV3"), **MARKS),
    "Jina v2": lambda: encoder(OwnCode, hf.BertConfig),
    "MPNet": lambda: encoder(hf.MPNetModel, hf.MPNetConfig),
    "DeBERTa": lambda: encoder(hf.DebertaV2Model, hf.DebertaV2Config),
    "T5": t5,
    "EmbeddingGemma": lambda: encoder(
        hf.Gemma3TextModel,
        hf.Gemma3TextConfig,
        **MARKS,
        **GEMMA,
        num_key_value_heads=2,
        use_bidirectional_attention=True,
    ),
    "Qwen3 Embedding": lambda: decoder(hf.Qwen3Model, hf.Qwen3Config, head_dim=8),
    "Qwen3": lambda: decoder(hf.Qwen3ForCausalLM, hf.Qwen3Config, head_dim=8),
    "Llama": lambda: decoder(hf.LlamaForCausalLM, hf.LlamaConfig),
    "Mistral": lambda: decoder(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=None),
    "Mistral with a window": lambda: decoder(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=6),
    "Gemma": lambda: decoder(hf.GemmaForCausalLM, hf.GemmaConfig, head_dim=8),
    "Gemma 2": lambda: decoder(hf.Gemma2ForCausalLM, hf.Gemma2Config, **GEMMA),
    "Gemma 3": lambda: decoder(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, **GEMMA),
    "Phi": lambda: decoder(hf.PhiForCausalLM, hf.PhiConfig, partial_rotary_factor=0.5),
    "Phi-3 and Phi-4": lambda: decoder(hf.Phi3ForCausalLM, hf.Phi3Config),
    "Whisper": lambda: whisper(lambda whole: whole),
    "Whisper's encoder": lambda: whisper(lambda whole: whole.model.encoder),
    "wav2vec 2.0": wav2vec2,
    "CLIP": lambda: text_and_image(hf.CLIPModel, hf.CLIPConfig, CLIP_TEXT),
    "SigLIP": lambda: text_and_image(hf.SiglipModel, hf.SiglipConfig, CLIP_TEXT),
    "ViT": lambda: vision(hf.ViTModel, hf.ViTConfig),
    "DINOv2": lambda: vision(hf.Dinov2Model, hf.Dinov2Config, mlp_ratio=2),
}


def build(name: str) -> Case:
    """A model on its own eager attention, in eval mode, always with the same weights and inputs."""
    torch.manual_seed(0)
    case = MODELS[name]()
    need_the_interface(case.model)
    for parameter in case.model.parameters():  # sharper attention than at initialisation: mistakes must show
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    if case.model._can_set_attn_implementation():
        case.model.set_attn_implementation("eager")  # as Gemma 2 caps its logits there alone
    case.model.eval()
    return case
