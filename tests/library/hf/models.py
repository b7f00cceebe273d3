"""Small random models of every architecture family that the boundary is tested on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from subquad.core.requirements import release

VOCAB = 60
ON_THE_INTERFACE_SINCE = {"modernbert": (5, 7), "swin": (5, 9), "t5": (5, 15)}  # by the model type
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


@dataclass
class Case:
    """A model, inputs for it, and where its outputs are real: bool (B,N), None = everywhere."""

    model: hf.PreTrainedModel
    inputs: dict[str, Tensor]
    valid: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def output(self) -> Tensor:
        """The main output at real positions, flat."""
        result = self.model(**self.inputs, **self.options)
        tensor = result.logits if "logits" in result else result.last_hidden_state
        return tensor if self.valid is None else tensor[self.valid]


def padded_ids(side: str = "right", batch: int = 2, length: int = 17, pads: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCAB, (batch, length), generator=generator)
    mask = torch.ones(batch, length, dtype=torch.long)
    if pads:
        where = slice(length - pads, None) if side == "right" else slice(0, pads)
        mask[-1, where] = 0
        ids[-1, where] = 0
    return ids, mask


def _text(cls: type, config: Any, side: str = "right") -> Case:
    ids, mask = padded_ids(side)
    return Case(cls(config), {"input_ids": ids, "attention_mask": mask}, mask.bool())


def _seq2seq(cls: type, config: Any) -> Case:
    ids, mask = padded_ids()
    decoder, decoder_mask = padded_ids(length=9, pads=2)
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder}
    return Case(cls(config), inputs | {"decoder_attention_mask": decoder_mask}, decoder_mask.bool())


def _bert() -> Case:
    return _text(hf.BertModel, hf.BertConfig(**TEXT))


def _bert_decoder() -> Case:
    return _text(hf.BertLMHeadModel, hf.BertConfig(**TEXT, is_decoder=True))


def _roberta() -> Case:
    return _text(hf.RobertaModel, hf.RobertaConfig(**TEXT))


def _distilbert() -> Case:
    config = hf.DistilBertConfig(vocab_size=VOCAB, dim=32, n_layers=2, n_heads=4, hidden_dim=48, pad_token_id=0)
    return _text(hf.DistilBertModel, config)


def _modernbert() -> Case:
    layers = ["full_attention", "sliding_attention", "sliding_attention"]
    config = hf.ModernBertConfig(
        **(TEXT | {"num_hidden_layers": 3}), local_attention=8, layer_types=layers,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    return _text(hf.ModernBertModel, config)


def _vit() -> Case:
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
    )
    return Case(hf.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)})


def _wav2vec2() -> Case:
    config = hf.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, conv_dim=(16, 16),
        conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer", mask_time_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 250:] = 0
    model = hf.Wav2Vec2Model(config)
    frames = model._get_feature_vector_attention_mask(39, mask)
    return Case(model, {"input_values": torch.randn(2, 400), "attention_mask": mask}, frames.bool())


def _whisper() -> Case:
    config = hf.WhisperConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20,
        max_target_positions=30, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    decoder, _ = padded_ids(length=9, pads=0)
    inputs = {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": decoder}
    return Case(hf.WhisperForConditionalGeneration(config), inputs)


def _t5() -> Case:
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, relative_attention_num_buckets=8,
    )  # fmt: skip
    return _seq2seq(hf.T5ForConditionalGeneration, config)


def _mpnet() -> Case:
    case = _text(hf.MPNetModel, hf.MPNetConfig(**TEXT | {"pad_token_id": 1}))
    case.inputs["input_ids"][~case.inputs["attention_mask"].bool()] = 1
    case.model.encoder.relative_attention_bias.weight.data.normal_()  # as large as in published models, trebled
    return case


def _bart() -> Case:
    config = hf.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    return _seq2seq(hf.BartForConditionalGeneration, config)


def _llama() -> Case:
    config = hf.LlamaConfig(**TEXT, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    return _text(hf.LlamaForCausalLM, config, side="left")


def _mistral() -> Case:
    config = hf.MistralConfig(**TEXT, num_key_value_heads=2, sliding_window=5, bos_token_id=1, eos_token_id=2)
    return _text(hf.MistralForCausalLM, config, side="left")


def _gemma3() -> Case:
    config = hf.Gemma3TextConfig(
        **(TEXT | {"num_hidden_layers": 4}), num_key_value_heads=2, head_dim=8, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _text(hf.Gemma3ForCausalLM, config, side="left")


def _gpt2() -> Case:
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    return _text(hf.GPT2LMHeadModel, config, side="left")


def _opt() -> Case:
    config = hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
        max_position_embeddings=64, word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _text(hf.OPTForCausalLM, config, side="left")


def _qwen3() -> Case:
    config = hf.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8, bos_token_id=1, eos_token_id=2)
    return _text(hf.Qwen3ForCausalLM, config, side="left")


def _phi() -> Case:
    config = hf.PhiConfig(**TEXT, partial_rotary_factor=0.5, bos_token_id=1, eos_token_id=2)
    return _text(hf.PhiForCausalLM, config, side="left")


BUILDERS: dict[str, Callable[[], Case]] = {
    "bert": _bert,
    "bert-decoder": _bert_decoder,
    "roberta": _roberta,
    "distilbert": _distilbert,
    "modernbert": _modernbert,
    "vit": _vit,
    "wav2vec2": _wav2vec2,
    "whisper": _whisper,
    "t5": _t5,
    "mpnet": _mpnet,
    "bart": _bart,
    "llama": _llama,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "opt": _opt,
    "qwen3": _qwen3,
    "phi": _phi,
}
ENCODERS = ("bert", "roberta", "distilbert", "vit", "wav2vec2")


def build(name: str) -> Case:
    """A fresh model on its own eager attention, in eval mode, always with the same weights and inputs."""
    torch.manual_seed(0)
    case = BUILDERS[name]()
    need_the_interface(case.model)
    for parameter in case.model.parameters():  # sharper attention than at initialisation: mistakes must show
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    for part in case.model.modules():
        if isinstance(part, hf.PreTrainedModel):  # before transformers 5.20, a model leaves out the stacks of T5
            part.set_attn_implementation("eager")
    case.model.eval()
    return case


def need_transformers(*since: int, what: str) -> None:
    """Skip with a transformers before the release `since`, of which `what` is true."""
    if release(hf.__version__) < since:
        pytest.skip(f"transformers {hf.__version__} {what}")


def need_the_interface(model: hf.PreTrainedModel) -> None:
    """Skip with a transformers in which a model computes its attention itself, so that `swap` refuses it."""
    since = ON_THE_INTERFACE_SINCE.get(model.config.model_type)
    if since is not None:
        need_transformers(*since, what=f"computes the attention of {type(model).__name__} itself")


def need_recording(windows: bool) -> None:
    """Skip where transformers' caches cannot go back after several calls; in 5.17, those with windows cannot.

    A windowed layer of 5.17 returns more keys than it tells masks of.
    """
    layer, key = DynamicSlidingWindowLayer(4), torch.zeros(1, 1, 3, 1)
    if not hasattr(layer, "activate_past_recording"):
        pytest.skip(f"the caches of transformers {hf.__version__} do not record their past")
    layer.activate_past_recording()
    told = [(layer.get_mask_sizes(3)[0], layer.update(key, key)[0].shape[2]) for _ in range(4)]
    if windows and any(size != returned for size, returned in told):
        pytest.skip(f"the windows of transformers {hf.__version__} cannot record their past in several calls")
