"""Exceptions to the rules, by model type: the class that stands for it and fields of its small config."""

from typing import Any

CLASSES: dict[str, str] = {
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}

RESNET: dict[str, Any] = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 24, 32, 40], "depths": [1] * 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]}
_FOUR_STAGES = {"num_hidden_layers": 4, "out_features": ["stage1", "stage2", "stage3", "stage4"], "out_indices": None}
_MOE = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}

# Also for sub-configs of these types.
CONFIGS: dict[str, dict[str, Any]] = {
    "autoformer": _SERIES | {"label_length": 2, "autocorrelation_factor": 1},
    "blip-2": {"image_token_index": 3},
    "bridgetower": {"hidden_size": 128, "contrastive_hidden_size": 32, "num_attention_heads": 2},
    "bridgetower_text_model": {"hidden_size": 128, "num_attention_heads": 2},
    "bridgetower_vision_model": {"hidden_size": 128},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGA": 6}},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: _ROPE | {"mrope_section": [2, 1, 1]} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"model_type": "dbrx", "kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8}},
    "deepseek_ocr2_text": _MOE | {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": _MOE,
    "depth_anything": {"backbone_config": _FOUR_STAGES},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots1": _MOE | {"moe_intermediate_size": 16},
    "dots3_note_audio_encoder": {"adapter_input_size": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|visual token 000000|>": 6}},
    "eomt": {"num_blocks": 1},
    "eomt_dinov3": {"num_blocks": 1},
    "ernie4_5_vl_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "esmc": {"num_key_value_heads": 4},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "glm4v_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}},
    "glm5_next_text": {"index_kpool": 2},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]]},
    "granite_speech5_encoder": {"num_key_value_heads": 4},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "oneformer": {"conv_dim": 32},
    "pp_doclayout_v2": {"class_thresholds": [0.5] * 20},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "mistral4": {"qk_nope_head_dim": 4},
    "kosmos-2": {"latent_query_num": 4},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "shieldgemma2": {"yes_token_index": 7, "no_token_index": 8},
    "swin": {"window_size": 4, "image_size": 128},
    "moonshine_streaming": {"num_key_value_heads": 4, "num_attention_heads": 4},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": 4},
    "nemotron3_diarization": {"num_key_value_heads": 4},
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "informer": _SERIES,
    "instructblip": {"image_token_index": 3},
    "instructblipvideo": {"video_token_index": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_vision_model": {
        "intermediate_size": 128,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    },
    "longcat_flash": {"head_dim": 4},
    "lw_detr_vit": {"image_size": 64},
    "mamba2": {"num_heads": 8},
    "mimi": {"upsample_groups": 32},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, 0]}},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "neomme": {"head_dim": 16},
    "omdet-turbo": {"vision_features_channels": [24, 32, 40]},
    "paddleocr_vl_text": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}},
    "patchtst": {"context_length": 16, "patch_length": 4, "patch_stride": 4},
    "prompt_depth_anything": {"backbone_config": _FOUR_STAGES},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 30},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 30},
    "sam2_hiera_det_model": {"hidden_size": 96, "global_attention_blocks": [4]},
    "step3p5": {"sliding_window": 5},
    "time_series_transformer": _SERIES,
    "tipsv2_dpt": {"backbone_config": _FOUR_STAGES},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "vjepa2": {"frames_per_clip": 4},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zoedepth": {"backbone_config": {"num_hidden_layers": 4}},
}
