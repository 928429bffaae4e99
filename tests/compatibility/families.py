"""Families of models that transformers can build, each in miniature.

`small(family)` shrinks a family's default configuration: it sets the fields in `SIZES`, also in nested configurations,
and the family's own values in `HINTS`. `head(family)` is the class that is tried for a family; `heads(family)` are all
its classes. `build(model)` is a model of a class, and `inputs_of` makes what it takes.
"""

import dataclasses
import inspect
import itertools
import re
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from tests import forms

DECODERS = ("CAUSAL_LM",)
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "Dense decoders": (
        DECODERS,
        "apertus arcee biogpt bloom codegen cohere cohere2 ctrl cwm diffllama doge ernie4_5 exaone4 falcon gemma gemma2"
        " gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj granite helium hunyuan_v1_dense"
        " jais2 llama minicpm3 ministral mistral modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 openai-gpt"
        " opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2 vaultgemma xglm xlm xlnet",
    ),
    "Mixtures of experts": (
        (*DECODERS, "SEQ_TO_SEQ_CAUSAL_LM"),
        "afmoe aria_text cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1 ernie4_5_moe"
        " exaone_moe flex_olmo glm4_moe gpt_oss granitemoe granitemoeshared hunyuan_v1_moe jetmoe llama4_text"
        " longcat_flash minimax minimax_m2 mixtral nllb-moe olmoe phimoe qwen2_moe qwen3_moe solar_open"
        " switch_transformers",
    ),
    "Hybrids": (
        DECODERS,
        "bamba falcon_h1 falcon_mamba gemma3n_text granitemoehybrid jamba lfm2 lfm2_moe mamba mamba2 nemotron_h"
        " olmo_hybrid qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2",
    ),
    "Encoders": (
        ("MASKED_LM", "SEQUENCE_CLASSIFICATION", ""),
        "albert bert big_bird camembert canine convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm"
        " eurobert flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm longformer megatron-bert mobilebert"
        " modernbert mpnet mra nomic_bert nystromformer rembert roberta roberta-prelayernorm roc_bert roformer"
        " squeezebert tapas xlm-roberta xlm-roberta-xl xmod yoso",
    ),
    "Encoders with decoders": (
        ("SEQ_TO_SEQ_CAUSAL_LM",),
        "bart bigbird_pegasus blenderbot blenderbot-small fsmt led longt5 m2m_100 marian mbart mt5 mvp pegasus"
        " pegasus_x plbart prophetnet t5 t5gemma umt5",
    ),
    "Vision": (
        ("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION", ""),
        "beit clip convnext convnextv2 data2vec-vision deit dinov2 dinov2_with_registers dinov3_vit ijepa poolformer"
        " pvt segformer siglip swin swinv2 timesformer videomae vit vit_mae vit_msn vivit",
    ),
    "Audio": (
        ("SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION", ""),
        "audio-spectrogram-transformer data2vec-audio hubert moonshine parakeet_ctc sew speech_to_text unispeech"
        " unispeech-sat wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm whisper",
    ),
    "Images and sound with text": (
        ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", ""),
        "aya_vision blip gemma3 idefics3 internvl llava llava_next mistral3 paligemma qwen2_5_vl qwen2_audio qwen2_vl"
        " smolvlm vilt vipllava voxtral",
    ),
}
FAMILIES: dict[str, str] = {family: kind for kind, (_, names) in KINDS.items() for family in names.split()}
"""The kind of every family."""

PUBLISHED = (
    *(f"qwen3 in {form}" for form in forms.FORMS if not re.search("DeepSeek|fp4 pairs|early|symmetric|4 and 8", form)),
    *(f"deepseek_v3 in {form}" for form in ("fp8 blocks, float32", "fp4 pairs", "compressed 4 bits", "awq")),
    *("deepseek_v4 in fp8 of DeepSeek-V4", "gpt_oss in mxfp4"),
    *(f"qwen3_moe in {form}" for form in ("fp8 blocks", "compressed fp8", "gptq 4 bits, ordered", "awq")),
)
"""Families whose checkpoints are tried in the forms of `tests.forms`, too."""

OTHER_HEADS = (
    *("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION"),
    *("QUESTION_ANSWERING", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "CTC", "IMAGE_TEXT_TO_TEXT", ""),
)
"""The mappings of transformers that `heads` reads; "" is the model without a head (embeddings)."""


def heads(family: str, kinds: tuple[str, ...] = OTHER_HEADS) -> list[str]:
    """Return the names of a family's classes in these mappings of transformers, in order."""
    found = []
    for kind in kinds:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES" if kind else "MODEL_MAPPING_NAMES")
        names = mapping.get(family, ())
        found += [names] if isinstance(names, str) else list(names)
    return list(dict.fromkeys(found))


def head(family: str) -> str:
    """Return the name of the class that is tried for a family, or for one in `PUBLISHED`."""
    family = family.partition(" in ")[0]
    return heads(family, KINDS[FAMILIES[family]][0])[0]


# Sizes, by the names of fields

_NAMES: dict[Any, str] = {
    96: "vocab_size vocab_size_per_layer_input shape_vocab_size pronunciation_vocab_size src_vocab_size tgt_vocab_size"
    " num_hash_buckets",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions"
    " max_encoder_position_embeddings max_decoder_position_embeddings",
    32: "hidden_size d_model n_embd dim emb_dim embedding_size embed_dim embedding_dim word_embed_proj_dim hidden_dim"
    " attention_hidden_size projection_dim out_hidden_size decoder_hidden_size output_dim classifier_proj_size"
    " shape_embed_dim pronunciation_embed_dim",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dff mlp_dim ffn_hidden_size"
    " moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size"
    " decoder_intermediate_size intermediate_size_mlp",
    16: "q_lora_rank kv_lora_rank hidden_size_per_layer_input image_size num_mel_bins num_conv_pos_embeddings"
    " max_2d_position_embeddings mamba_dt_rank codevector_dim proj_codevector_dim",
    8: "head_dim d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim linear_key_head_dim linear_value_head_dim"
    " mamba_d_state state_size laurel_rank rotary_dim",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads"
    " num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads patch_size mamba_n_heads"
    " n_mamba_heads sliding_window mamba_chunk_size chunk_size linear_num_key_heads decoder_num_attention_heads"
    " num_conv_pos_embedding_groups mm_tokens_per_image num_decoder_attention_heads",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth"
    " num_key_value_heads num_experts_per_tok moe_k moe_topk n_shared_experts decoder_num_hidden_layers"
    " num_codevector_groups tubelet_size num_frames max_window_layers",
    1: "n_group topk_group mamba_n_groups num_shared_experts moe_num_shared_experts num_mem_blocks",
    0: "layerdrop encoder_layerdrop decoder_layerdrop mask_time_prob mask_feature_prob num_kv_shared_layers"
    " first_k_dense_replace drop_path_rate",
}
SIZES: dict[str, Any] = {name: value for value, names in _NAMES.items() for name in names.split()} | {
    "apply_spec_augment": False,
    "use_mamba_kernels": False,
}
_UNSET = ("head_dim", "num_key_value_heads")  # set although some families derive them
TEXT = range(3, 64)
"""Token ids of ordinary tokens; smaller ones may be special."""
ROWS = 2
"""Texts, images or sounds of `inputs_of`."""

_STAGES = {"depths": [1, 1], "hidden_sizes": [16, 32], "num_encoder_blocks": 2}
_WAVES = {"conv_dim": [16, 16], "conv_stride": [8, 8], "conv_kernel": [10, 8], "hidden_size": 32}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
HINTS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 24, "frequency_stride": 4, "time_stride": 4},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "clip_vision_model": {"patch_size": 4},
    "convnext": _STAGES | {"num_stages": 2, "image_size": 32},
    "convnextv2": _STAGES | {"num_stages": 2, "image_size": 32},
    "data2vec-audio": _WAVES | {"conv_pos_kernel_size": 3},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4},
    "deepseek_v32": {"num_key_value_heads": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 96, "pad_token_id": 1, "mask_token_id": 64},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"]},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
        "altup_num_inputs": 2,
    },
    "hubert": _WAVES,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "led": {"attention_window": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"num_key_value_heads": 4, "zero_expert_num": 2},
    "longformer": {"attention_window": 4},
    "mamba2": {"num_heads": 8},
    "minicpm3": {"num_key_value_heads": 4},
    "moonshine": {
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "parakeet_encoder": {"subsampling_conv_channels": 16},
    "poolformer": _STAGES | {"patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1], "image_size": 32},
    "pvt": _STAGES
    | {
        "image_size": 32,
        "patch_sizes": [4, 2],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "sequence_reduction_ratios": [2, 1],
    },
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "segformer": _STAGES
    | {
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "sr_ratios": [2, 1],
        "image_size": 32,
    },
    "sew": _WAVES,
    "speech_to_text": {"conv_channels": 32, "input_feat_per_channel": 16},
    "swin": _STAGES | {"num_heads": [2, 4], "window_size": 2, "embed_dim": 16},
    "swinv2": _STAGES | {"num_heads": [2, 4], "window_size": 2, "embed_dim": 16, "pretrained_window_sizes": [0, 0]},
    "tapas": {"type_vocab_sizes": [3, 8, 8, 2, 8, 8, 10]},
    "unispeech": _WAVES,
    "unispeech-sat": _WAVES,
    "vivit": {"tubelet_size": [2, 4, 4]},
    "wav2vec2": _WAVES,
    "wav2vec2-bert": {"feature_projection_input_dim": 16, "vocab_size": 96},
    "wav2vec2-conformer": _WAVES | {"vocab_size": 96},
    "wavlm": _WAVES,
    "aya_vision": {"downsample_factor": 2},
    "idefics3": {"scale_factor": 2},
    "internvl": {"vision_config": {"image_size": [16, 16], "patch_size": [4, 4]}},
    "llava_next": {"image_grid_pinpoints": [[16, 16]]},
    "qwen2_5_vl": {"vision_config": {"fullatt_block_indexes": [1], "window_size": 16}},
    "qwen2_5_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_vl_text": {"rope_parameters": _SECTIONS},
    "qwen3_vl_text": {"rope_parameters": _SECTIONS},
    "qwen3_vl_vision": {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    "smolvlm": {"scale_factor": 2},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "voxtral": {"audio_token_id": 64, "audio_config": {"intermediate_size": 128}},
    "xlstm": {"chunk_size": 64, "hidden_size": 128},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
}
"""Values of further fields that a family needs, besides `SIZES`."""


def small(kind: str | type[PreTrainedConfig], **more: Any) -> PreTrainedConfig:
    """The configuration of a family in miniature.

    Args:
        kind: a family, or the class of a nested configuration.
        more: values for fields; a dictionary for a nested configuration.
    """
    cls = CONFIG_MAPPING[kind] if isinstance(kind, str) else kind
    given = deepcopy(HINTS.get(cls.model_type, {})) | more  # configurations change and share what they are given
    special = itertools.count(TEXT.stop)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in SIZES and isinstance(field.default, (int, float)):
            values[field.name] = type(field.default)(SIZES[field.name])
        elif field.name in _UNSET:
            values[field.name] = SIZES[field.name]
        elif field.name.endswith(("_token_id", "_token_index")) and isinstance(field.default, int):
            values[field.name] = field.default if field.default < TEXT.stop else next(special)
    for name, spec in cls.sub_configs_defaults.items():
        nested = dict(given.pop(name, {}))
        known = issubclass(spec.config_class, PreTrainedConfig)
        values[name] = small(spec.config_class if known else nested.pop("model_type", spec.model_type), **nested)
    config = cls(**values | given)
    if getattr(config, "pad_token_id", 0) is None:  # classifiers need one
        config.pad_token_id = 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def build(model: str, **more: Any) -> Any:
    """A model of a class of transformers in miniature, with random weights, in evaluation mode. (`small` tells about
    `more`.)"""
    kind = getattr(transformers, model)
    torch.manual_seed(0)
    return kind(small(kind.config_class, **more)).eval()


# Inputs


def inputs_of(model: Any) -> dict[str, Any]:
    """Random inputs for a model's main input, and text if it takes text."""
    torch.manual_seed(1)
    config = model.config
    takes = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {}
    if "pixel_values" in takes:
        given |= _pixels(config)
    elif "input_features" in takes:
        given |= _features(config)
    elif "input_values" in takes:
        given["input_values"] = _waves(config)
    if "input_ids" in takes:
        given |= _text(model, given)
    if config.is_encoder_decoder and "decoder_input_ids" in takes:
        given["decoder_input_ids"] = _tokens()
    return given


def _tokens() -> Tensor:
    return torch.randint(TEXT.start, TEXT.stop, (ROWS, 8))


def _text(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Tokens, among them the places of an image or a sound if there is one."""
    ids = _tokens()
    if model.config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        ids[:, -1] = model.config.eos_token_id  # classifiers of the BART type look for it
    if given and (place := _placeholder(model.config)) is not None:
        count = _features_of(model, given)
        ids = torch.cat([ids[:, :2], torch.full((ROWS, count), place), ids[:, 2:]], dim=1)
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            given["mm_token_type_ids"] = (ids == place).long()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _features_of(model: Any, given: dict[str, Any]) -> int:
    """Return the number of tokens that one image or sound takes."""
    find = getattr(model, "get_image_features", None) or getattr(model, "get_audio_features", None)
    if find is None:
        return int(model.config.audio_config.max_source_positions) // 2  # Qwen2-Audio
    with torch.no_grad():
        features = find(**given)
    features = getattr(features, "pooler_output", features)
    parts = features if isinstance(features, (tuple, list)) else [features]
    return int(sum(part.numel() for part in parts)) // int(model.config.get_text_config().hidden_size) // ROWS


def _placeholder(config: Any) -> int | None:
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def _pixels(config: Any) -> dict[str, Any]:
    vision = getattr(config, "vision_config", config)
    if hasattr(vision, "temporal_patch_size"):  # Qwen-VL: a list of patches, and the grid that they come from
        side = 4
        wide = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        grid = torch.tensor([[1, side, side]] * ROWS)
        return {"pixel_values": torch.randn(ROWS * side * side, wide), "image_grid_thw": grid}
    size = vision.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = [getattr(vision, "num_channels", 3), height, width]
    if hasattr(config, "num_frames"):
        shape.insert(0, config.num_frames)
    elif config.model_type in ("idefics3", "smolvlm"):
        shape.insert(0, 1)  # images of one text
    elif config.model_type == "llava_next":
        shape.insert(0, 2)  # the image and its one tile
        sizes = torch.tensor([[height, width]] * ROWS)
        return {"pixel_values": torch.randn(ROWS, *shape), "image_sizes": sizes}
    pixels = torch.randn(ROWS, *shape)
    return {"pixel_values": pixels} | (
        {"image_sizes": torch.tensor([[height, width]] * ROWS)} if config.model_type == "mistral3" else {}
    )


def _features(config: Any) -> dict[str, Any]:
    audio = getattr(config, "audio_config", getattr(config, "encoder_config", config))
    if config.model_type in ("whisper", "voxtral", "qwen2_audio"):
        frames = torch.randn(ROWS, audio.num_mel_bins, 2 * audio.max_source_positions)
        mask = {"feature_attention_mask": torch.ones(ROWS, frames.shape[-1], dtype=torch.long)}
        return {"input_features": frames} | (mask if config.model_type == "qwen2_audio" else {})
    wide = getattr(audio, "input_feat_per_channel", None) or getattr(audio, "feature_projection_input_dim", None)
    return {"input_features": torch.randn(ROWS, 32, wide or audio.num_mel_bins)}


def _waves(config: Any) -> Tensor:
    if hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):  # spectrograms
        return torch.randn(ROWS, config.max_length, config.num_mel_bins)
    return torch.randn(ROWS, 2000)
