"""A small config of any model type: the default config with its sizes shrunk by rules on field names."""

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.hf.survey.overrides import CONFIGS, RESNET

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 8, 32

# (pattern of a whole field name, its small value), first match wins. Only integers are replaced, and only by smaller ones.
RULES: list[tuple[str, int]] = [
    (r"num_feat_extract_layers|num_adapter_layers|vision_feature_layer.*|.*_feature_layers?|num_feature_levels|pad_.*", 10**9),
    (r"mm_tokens_per_image", 4),
    (r"attention_window", 6),
    (r"n_window", 4),
    (r"n_window_infer", 8),
    (r"base_channels", 32),
    (r"n_groups|mamba_n_groups", 1),
    (r"codebook_size", 64),
    (r"context_size", 5),
    (r"(.*_)?vocab_size(_per_layer_input)?|n_vocab|vocab_size_.*", 99),
    (r".*(key_value_heads|kv_heads|num_head_kv|n_head_kv|num_kv_heads)", KV_HEADS),
    (r"(.*_)?(num_attention_heads|attention_heads|num_heads|n_heads?|num_q_heads|nheads)", HEADS),
    (r"num_hidden_layers|num_layers|n_layers?|depth|(.*_)?(encoder|decoder|layer|hidden|block)_layers|(.*_)?num_(.*_)?layers|.*_depth|.*_n_layers?", 2),
    (r"qk_nope_head_dim", 8),
    (r"qk_rope_head_dim", 4),
    (r"qk_head_dim", 12),
    (r"v_head_dim", 6),
    (r"(kv|q|o|qk)_lora_rank|.*_low_rank_dim|.*_lora_rank", 16),
    (r"index_n_heads|index_num_heads", 2),
    (r"index_topk", 4),
    (r"(.*_)?(head_dim|attention_head_size|d_kv|d_head|head_size|dim_head|head_width)|key_value_proj_dim", HEAD_DIM),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|mlp_dim|ff_dim|n_inner|ffn_hidden_size|feed_forward_dim|intermediate_dim)(_mlp)?|mlp_size", 48),
    (r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|projection_dim|proj_dim|embedding_size|embedding_dim|word_embed_proj_dim|d_embed|emb_dim|hidden_size_per_layer_input|out_hidden_size|output_dim|classifier_proj_size|proj_size|output_proj_dims|feature_size|fpn_dim|mask_dim|codevector_dim|decoder_dim|model_dim|out_dim|emb_size|feature_dim|out_embed_dim|hidden_channels|embed_size|output_channels|condition_dim|upsample_groups)", WIDTH),
    (r"dim", WIDTH),
    (r"(.*_)?(max_position_embeddings|max_positions?|n_positions|n_ctx|max_seq_len(gth)?|max_sequence_length|max_target_positions|max_text_len(gth)?|seq_length|original_max_position_embeddings)", 64),
    (r"max_source_positions", 40),
    (r"(.*_)?(num_mel_bins|n_mels|mel_bins)|num_mel_features", 16),
    (r"num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_moe_experts|n_experts|moe_num_routed_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|num_selected_experts|top_k_experts|experts_per_token|moe_top_k", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"(n|num)_shared_experts|moe_num_shared_experts|first_k_dense_replace|moe_layer_start_index|num_dense_layers", 1),
    (r"(sliding|local_attention|attention)_window(_size)?|local_attention|window_size_left|attention_chunk_size|local_size|local_radius", 5),
    (r"(.*_)?(num_queries|num_query_tokens|num_object_queries|num_latents|num_query|resampler_n_latents)", 6),
    (r"(.*_)?image_size|pretrain_image_size|pretrained_img_size|img_size|crop_size", 32),
    (r"(.*_)?patch_size", 8),
    (r"num_frames|tubelets?_per_clip", 4),
    (r"num_codebooks|num_codebook", 3),
    (r"codebook_size|num_embeddings|num_codevectors_per_group|audio_vocab", 40),
]  # fmt: skip
_COMPILED = [(re.compile(pattern), value) for pattern, value in RULES]
_DEPTHS = re.compile(r"(.*_)?(depths?|layers|num_blocks|num_layers|layer_depths|blocks_per_stage|num_hidden_layers)")
_SPECIAL = re.compile(r"(.*)_(token_id|token_index|token_ids|idx|token|id)")
_LAYERS = re.compile(r"num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|depth|num_decoder_layers")


def small_config(model_type: str) -> PreTrainedConfig:
    """The type's default config with small sizes; `overrides.CONFIGS` has what no rule gives."""
    return shrink(CONFIG_MAPPING[model_type]())


def shrink(config: PreTrainedConfig, overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """A copy of the config whose integers, lists of layers and sub-configs are small."""
    overrides = {**CONFIGS.get(config.model_type, {}), **(overrides or {})}
    declared = {f.name for f in dataclasses.fields(config)} - _GENERAL
    values = {k: v for k, v in vars(config).items() if k in declared}
    compressed = "kv_lora_rank" in values  # multi-head latent attention: the other widths follow from its own
    layer_count = next((v for k, v in values.items() if _LAYERS.fullmatch(k) and isinstance(v, int)), None)
    wanted = _wanted_layers(values)
    special = iter(range(3, 40))
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig) and value.model_type == "timm_backbone" and name not in overrides:
            small[name] = _sub_config(RESNET)  # timm is another library
        elif isinstance(value, PreTrainedConfig):
            small[name] = shrink(value, overrides.get(name) if isinstance(overrides.get(name), Mapping) else None)
        elif name in overrides or (compressed and name in ("head_dim", "qk_head_dim")):
            continue
        elif name == "head_dim" and value is None:
            small[name] = HEAD_DIM
        elif name == "embed_dim" and isinstance(values.get("num_heads"), list | tuple):
            small[name] = value  # a hierarchy, whose stages have widths and heads of their own
        elif name.endswith("config") and isinstance(value, Mapping) and value.get("model_type") in CONFIG_MAPPING:
            small[name] = shrink(CONFIG_MAPPING[value["model_type"]](**value), overrides.get(name))
        else:
            small[name] = _shrunk(name, value, layer_count, wanted, special)
    if (
        _has_rope_sections(config)
        and "rope_parameters" not in overrides
        and isinstance(small.get("rope_parameters"), Mapping | None)
    ):
        plain = {"rope_type": "default", "rope_theta": 10_000.0}
        small["rope_parameters"] = {"mrope_section": [2, 1, 1], **(small.get("rope_parameters") or plain)}
    if compressed and "num_key_value_heads" in small:
        small["num_key_value_heads"] = HEADS
    for name, value in overrides.items():
        if not isinstance(small.get(name), PreTrainedConfig) or not isinstance(value, Mapping):
            small[name] = _sub_config(value)
    return type(config)(**{k: v for k, v in small.items() if k in overrides or not _same(v, _default(config, k))})


_GENERAL = {f.name for f in dataclasses.fields(PreTrainedConfig)} - {"is_encoder_decoder", "pad_token_id"}


def _sub_config(value: Any) -> Any:
    if isinstance(value, Mapping) and "model_type" in value:
        rest = {k: v for k, v in value.items() if k != "model_type"}
        return shrink(CONFIG_MAPPING[value["model_type"]](), rest) if value["model_type"] in CONFIG_MAPPING else value
    return copy.deepcopy(value)


_DEFAULTS: dict[type, Any] = {}


def _default(config: PreTrainedConfig, name: str) -> Any:
    kind = type(config)
    if kind not in _DEFAULTS:
        try:
            _DEFAULTS[kind] = kind()
        except Exception:  # a config without defaults: everything is passed
            _DEFAULTS[kind] = None
    return vars(_DEFAULTS[kind]).get(name, _MISSING) if _DEFAULTS[kind] is not None else _MISSING


_MISSING = object()


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and not isinstance(a, PreTrainedConfig) and bool(a == b)


def _wanted_layers(values: Mapping[str, Any]) -> int:
    kinds = values.get("layer_types") or values.get("layers_block_type") or values.get("hybrid_override_pattern") or []
    return max(2, len(dict.fromkeys(kinds)))


def _shrunk(name: str, value: Any, layers: int | None, wanted: int, special: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return _small_int(name, value, wanted, special)
    if isinstance(value, list | tuple) and value:
        return type(value)(_small_list(name, list(value), layers, wanted))
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
        return _small_rope(value)
    return value


def _has_rope_sections(config: PreTrainedConfig) -> bool:
    """Whether the type splits its rotary frequencies over three axes, in sections that a config may leave unsaid."""
    return "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ())


def _small_int(name: str, value: int, wanted: int, special: Any) -> int:
    if re.fullmatch(r".*_token_(id|index|idx)|.*_(index|id)", name) and value >= 0:
        fixed = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return fixed[name] if name in fixed else min(value, 3) if name.startswith("decoder_start") else next(special)
    if _LAYERS.fullmatch(name) and value > wanted:
        return wanted
    for pattern, small in _COMPILED:
        if pattern.fullmatch(name):
            return min(value, small) if value > 0 else value
    return value


def _small_list(name: str, value: list[Any], layers: int | None, wanted: int) -> list[Any]:
    if layers and len(value) == layers and layers > wanted and not all(isinstance(v, list) for v in value):
        kinds = list(dict.fromkeys(v for v in value if isinstance(v, str | int | bool)))
        return (kinds + value[-wanted:])[:wanted] if len(kinds) <= wanted else value[:wanted]
    if _DEPTHS.fullmatch(name) and all(isinstance(v, int) for v in value):
        return [min(v, 2) for v in value]
    if name in ("conv_dim",):
        return [min(v, 32) for v in value]
    if name in ("image_size", "patch_size", "img_size") and all(isinstance(v, int) for v in value):
        return [min(v, 32 if "p" not in name else 8) for v in value]
    if name == "eos_token_id":
        return [2]
    return value


def _small_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    small = {k: _small_rope(v) if isinstance(v, Mapping) else v for k, v in rope.items()}
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = min(64, small["original_max_position_embeddings"])
    if isinstance(small.get("mrope_section"), list | tuple):
        small["mrope_section"] = [2, 1, 1]
    for factor in ("short_factor", "long_factor"):
        if isinstance(small.get(factor), list):
            small[factor] = small[factor][: HEAD_DIM // 2]
    return small
