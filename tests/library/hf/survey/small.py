"""A small config of any model type: the default config with its sizes shrunk by rules on field names."""

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.library.hf.survey.overrides import CONFIGS, RESNET

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 8, 32

KEEP = 10**9

# (field names, their small value), first match wins: "*_x" is x and every name that ends with _x. Only integers are
# replaced, and only by smaller ones.
RULES: list[tuple[str, int]] = [
    ("num_feat_extract_layers num_adapter_layers num_feature_levels vision_feature_layer *_feature_layer", KEEP),
    ("*_vocab_size n_vocab vocab_size_per_layer_input *_vocab_size_per_layer_input", 99),
    ("codebook_size", 64),
    ("*_key_value_heads *_kv_heads num_kv_heads num_head_kv n_head_kv kv_n_heads", KV_HEADS),
    ("*_num_attention_heads *_attention_heads *_num_heads *_n_heads *_n_head num_q_heads index_num_heads", HEADS),
    ("*_num_hidden_layers *_num_layers *_n_layers *_n_layer *_layers *_depth", 2),
    ("qk_nope_head_dim", 8),
    ("qk_rope_head_dim index_topk mm_tokens_per_image n_window", 4),
    ("qk_head_dim", 12),
    ("v_head_dim attention_window", 6),
    ("n_window_infer", 8),
    ("*_lora_rank *_low_rank_dim", 16),
    ("*_head_dim *_attention_head_size *_d_kv *_d_head *_head_size *_dim_head key_value_proj_dim", HEAD_DIM),
    ("*_intermediate_size *_ffn_dim *_d_ff *_mlp_dim *_ff_dim *_n_inner *_ffn_hidden_size *_intermediate_dim", 48),
    ("intermediate_size_mlp *_feed_forward_dim mlp_size", 48),
    ("*_hidden_size *_hidden_dim *_d_model *_n_embd *_embed_dim *_embedding_size *_embedding_dim dim", WIDTH),
    ("*_projection_dim *_proj_dim *_proj_size output_proj_dims *_output_dim *_out_dim out_embed_dim *_d_embed", WIDTH),
    ("*_embed_size upsample_groups", WIDTH),
    ("*_emb_dim *_emb_size *_feature_size *_feature_dim *_fpn_dim *_mask_dim codevector_dim *_decoder_dim", WIDTH),
    ("*_model_dim *_hidden_channels *_output_channels hidden_size_per_layer_input condition_dim", WIDTH),
    ("base_channels", 32),
    ("num_pos_feats", 16),
    ("*_max_position_embeddings *_max_positions *_n_positions *_n_ctx *_max_seq_len *_max_seq_length", 64),
    ("*_max_sequence_length *_max_target_positions *_max_text_len *_seq_length", 64),
    ("max_source_positions", 40),
    ("*_num_mel_bins *_n_mels *_mel_bins num_mel_features", 16),
    ("*_num_experts *_num_local_experts n_routed_experts moe_num_routed_experts n_experts", 4),
    ("*_num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k num_selected_experts top_k_experts", 2),
    ("n_group topk_group num_expert_group n_groups mamba_n_groups n_shared_experts num_shared_experts", 1),
    ("moe_num_shared_experts first_k_dense_replace moe_layer_start_index num_dense_layers", 1),
    ("sliding_window sliding_window_size local_attention local_attention_window window_size_left", 5),
    ("attention_window_size attention_chunk_size local_size local_radius context_size", 5),
    ("*_num_queries *_num_query_tokens *_num_object_queries *_num_latents *_num_query resampler_n_latents", 6),
    ("*_image_size pretrained_img_size img_size crop_size", 32),
    ("*_patch_size", 8),
    ("num_frames", 4),
    ("num_codebooks", 3),
    ("num_embeddings num_codevectors_per_group", 40),
]  # fmt: skip
_DEPTHS = re.compile(r"(.*_)?(depths?|layers|num_blocks|num_layers|layer_depths|blocks_per_stage|num_hidden_layers)")
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
    made = type(config)(**{k: v for k, v in small.items() if k in overrides or not _same(v, _default(config, k))})
    stages = getattr(config, "out_features", None)
    if stages and "out_features" not in overrides and {*stages} <= {*made.stage_names}:  # what a detector's neck reads
        made.out_features = stages
    return made


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
    """Tell whether the type splits its rotary frequencies over three axes, in sections that a config may omit."""
    return "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ())


def _small_int(name: str, value: int, wanted: int, special: Any) -> int:
    if re.fullmatch(r".*_token_(id|index|idx)|.*_(index|id)", name) and value >= 0:
        fixed = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return fixed[name] if name in fixed else min(value, 3) if name.startswith("decoder_start") else next(special)
    if _LAYERS.fullmatch(name) and value > wanted:
        return wanted
    return min(value, _small_size(name)) if value > 0 else value


def _small_size(name: str) -> int:
    for names, small in RULES:
        if any(name == n or (n[0] == "*" and (name == n[2:] or name.endswith(n[1:]))) for n in names.split()):
            return small
    return KEEP


def _small_list(name: str, value: list[Any], layers: int | None, wanted: int) -> list[Any]:
    if layers and len(value) == layers and layers > wanted and not all(isinstance(v, list) for v in value):
        kinds = list(dict.fromkeys(v for v in value if isinstance(v, str | int | bool)))
        return (kinds + value[-wanted:])[:wanted] if len(kinds) <= wanted else value[:wanted]
    if _DEPTHS.fullmatch(name) and all(isinstance(v, int) for v in value):
        return [min(v, 2) for v in value]
    if name == "decoder_in_channels":
        return [WIDTH] * len(value)
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
