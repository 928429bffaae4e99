"""Small models for images, video and sound: their configurations, and random inputs."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

IMAGE_TOKEN = 9
TOKENS: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = TOKENS | SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
IMAGE = SIZES | {"image_size": 16, "patch_size": 8}
SIGLIP = IMAGE | {"model_type": "siglip_vision_model", "vision_use_head": False}
BART: dict[str, Any] = TOKENS | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}
WHISPER = BART | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
WAVE = (
    TOKENS
    | SIZES
    | {
        "conv_dim": [16, 16],
        "conv_kernel": [10, 3],
        "conv_stride": [5, 2],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "mask_time_prob": 0.0,
        "layerdrop": 0.0,
    }
)
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
QWEN_TEXT = TEXT | {"rope_parameters": ROPE, "rope_scaling": ROPE}
QWEN_IMAGE: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2, "hidden_size": 32}


@dataclass(frozen=True)
class Family:
    """A model for images, video or sound.

    Args:
        stored: the class of the checkpoint.
        auto: the auto class that a tenant loads the checkpoint with.
        config: makes the configuration.
        inputs: makes inputs of `forward`.
        kept: endings of the names of the linears that stay with the tenant.
        generates: True if the model generates text.
    """

    stored: str
    auto: str
    config: Callable[[], PreTrainedConfig]
    inputs: Callable[[], dict[str, Tensor]]
    kept: tuple[str, ...] = ()
    generates: bool = False

    def build(self) -> PreTrainedModel:
        torch.manual_seed(0)
        model: PreTrainedModel = getattr(transformers, self.stored)(self.config())
        model.eval()
        return model

    def save(self, folder: Path) -> Path:
        self.build().save_pretrained(folder)
        return folder


def configured(name: str, **entries: Any) -> Callable[[], PreTrainedConfig]:
    """Make configurations that share nothing: a test may change the one that it got."""
    return lambda: getattr(transformers, f"{name}Config")(**deepcopy(entries))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def ids(*tokens: int) -> dict[str, Tensor]:
    found = torch.tensor([[1, *tokens, 5, 6, 7]])
    return {"input_ids": found, "attention_mask": torch.ones_like(found)}


def image() -> dict[str, Tensor]:
    return {"pixel_values": random(1, 3, 16, 16)}


def image_and_text() -> dict[str, Tensor]:
    return image() | ids()


def image_in_text() -> dict[str, Tensor]:
    """An image in text: four patches take four tokens."""
    return image() | ids(*[IMAGE_TOKEN] * 4)


def tiles_in_text() -> dict[str, Tensor]:
    return {"pixel_values": random(1, 1, 3, 16, 16)} | ids(*[IMAGE_TOKEN] * 4)


def patches_in_text() -> dict[str, Tensor]:
    """An image in text: sixteen patches are merged into four tokens."""
    grid = torch.tensor([[1, 4, 4]])
    found = ids(*[IMAGE_TOKEN] * 4)
    types = (found["input_ids"] == IMAGE_TOKEN).long()
    return {"pixel_values": random(16, 3 * 2 * 64), "image_grid_thw": grid, "mm_token_type_ids": types} | found


def spectrogram() -> dict[str, Tensor]:
    return {"input_features": random(1, 8, 32), "decoder_input_ids": torch.tensor([[1, 5, 6]])}


def sound() -> dict[str, Tensor]:
    return {"input_values": random(1, 400)}


def classifier(name: str, *kept: str, **entries: Any) -> Family:
    sizes = configured(name, **IMAGE | entries)
    return Family(f"{name}ForImageClassification", "AutoModelForImageClassification", sizes, image, kept)


def multimodal(name: str, *kept: str, text: dict[str, Any], vision: dict[str, Any], **entries: Any) -> Family:
    config = configured(
        name, text_config=text, vision_config=vision, **{"image_token_id": IMAGE_TOKEN, "pad_token_id": 0} | entries
    )
    inputs = {"Qwen": patches_in_text, "Smol": tiles_in_text}.get(name[:4], image_in_text)
    stored = f"{name}ForConditionalGeneration"
    return Family(stored, "AutoModelForImageTextToText", config, inputs, kept, generates=True)


LLAMA, QWEN2, GEMMA = (TEXT | {"model_type": name} for name in ("llama", "qwen2", "gemma"))
CLIP = IMAGE | {"model_type": "clip_vision_model"}
FAMILIES: dict[str, Family] = {
    "ViT": classifier("ViT", "classifier"),
    "DINOv2": classifier("Dinov2", "classifier", mlp_ratio=2),
    "Swin": Family(
        "SwinForImageClassification",
        "AutoModelForImageClassification",
        configured("Swin", image_size=16, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=2),
        image,
        ("classifier",),
    ),
    "ConvNeXt": classifier("ConvNext", "classifier", num_stages=2, hidden_sizes=[16, 32], depths=[1, 1]),
    "DINOv3": Family("DINOv3ViTModel", "AutoModel", configured("DINOv3ViT", **IMAGE), image),
    "CLIP": Family(
        "CLIPModel",
        "AutoModelForZeroShotImageClassification",
        configured("CLIP", text_config=TEXT, vision_config=IMAGE, projection_dim=24),
        image_and_text,
    ),
    "SigLIP": Family(
        "SiglipModel",
        "AutoModelForZeroShotImageClassification",
        configured("Siglip", text_config=TEXT, vision_config=IMAGE),
        lambda: image() | {"input_ids": ids()["input_ids"]},
        ("head.attention.out_proj",),  # PyTorch's attention computes with its weight
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        "AutoModelForSpeechSeq2Seq",
        configured("Whisper", **WHISPER),
        spectrogram,
        ("proj_out",),
    ),
    "Wav2Vec2": Family("Wav2Vec2ForCTC", "AutoModelForCTC", configured("Wav2Vec2", **WAVE), sound, ("lm_head",)),
    "HuBERT": Family(
        "HubertForSequenceClassification",
        "AutoModelForAudioClassification",
        configured("Hubert", **WAVE),
        sound,
        ("projector", "classifier"),
    ),
    "AST": Family(
        "ASTForAudioClassification",
        "AutoModelForAudioClassification",
        configured("AST", **IMAGE | {"max_length": 24, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8}),
        lambda: {"input_values": random(1, 24, 16)},
        ("classifier.dense",),
    ),
    "BART classifier": Family(
        "BartForSequenceClassification",
        "AutoModelForSequenceClassification",
        configured("Bart", **BART),
        lambda: {"input_ids": torch.tensor([[1, 5, 6, 7, 2]])},
        ("classification_head.dense", "classification_head.out_proj"),
    ),
    "BLIP": Family(
        "BlipForConditionalGeneration",
        "AutoModelForImageTextToText",
        configured("Blip", text_config=TEXT | {"encoder_hidden_size": 32}, vision_config=IMAGE),
        image_and_text,
        ("predictions.decoder",),
    ),
    "LLaVA": multimodal("Llava", text=LLAMA, vision=CLIP, vision_feature_select_strategy="default"),
    "PaliGemma": multimodal(
        "PaliGemma", "lm_head", text=GEMMA, vision=SIGLIP | {"projection_dim": 32}, projection_dim=32
    ),
    "Gemma 3": multimodal(
        "Gemma3", "lm_head", text=TEXT | {"model_type": "gemma3_text"}, vision=SIGLIP, mm_tokens_per_image=4
    ),
    "InternVL": multimodal(
        "InternVL",
        "lm_head",
        text=QWEN2,
        vision=IMAGE | {"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
    ),
    "SmolVLM": multimodal("SmolVLM", text=LLAMA, vision=IMAGE | {"model_type": "smolvlm_vision"}, scale_factor=1),
    "Qwen2-VL": multimodal("Qwen2VL", text=QWEN_TEXT, vision=QWEN_IMAGE | {"embed_dim": 32, "hidden_size": 32}),
    "Qwen2.5-VL": multimodal(
        "Qwen2_5_VL", text=QWEN_TEXT, vision=QWEN_IMAGE | {"intermediate_size": 48, "out_hidden_size": 32}
    ),
    "Qwen3-VL": multimodal(
        "Qwen3VL",
        text=QWEN_TEXT,
        vision=QWEN_IMAGE
        | {
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    ),
    "Voxtral": Family(
        "VoxtralForConditionalGeneration",
        "AutoModelForMultimodalLM",
        configured(
            "Voxtral",
            text_config=LLAMA,
            audio_config=SIZES | {"num_mel_bins": 8, "max_source_positions": 16, "intermediate_size": 128},
            audio_token_id=IMAGE_TOKEN,
        ),
        lambda: {"input_features": random(1, 8, 32)} | ids(*[IMAGE_TOKEN] * 4),
        generates=True,
    ),
}
