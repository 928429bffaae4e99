"""Families of models that transformers can build, each in miniature.

`small(family)` shrinks a family's default configuration: it sets the fields in `SIZES`, also in nested configurations,
and the family's own values in `HINTS`. `head(family)` is the class that is tried for a family. `build(model)` is a
model of a class, and `inputs_of` makes what it takes.
"""

import dataclasses
import inspect
import itertools
import re
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from tests import forms

_DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
KINDS: dict[str, tuple[list[str], str]] = {
    kind: (entry["heads"], entry["families"]) for kind, entry in _DATA["kinds"].items()
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


def head(family: str) -> str:
    """Return the name of the class that is tried for a family, or for one in `PUBLISHED`: the first one in the mappings
    of transformers for its kind, of which "" is that of models without a head (embeddings)."""
    family = family.partition(" in ")[0]
    for kind in KINDS[FAMILIES[family]][0]:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES" if kind else "MODEL_MAPPING_NAMES")
        if names := mapping.get(family):
            return str(names) if isinstance(names, str) else str(names[0])
    raise KeyError(family)


# Sizes, by the names of fields

SIZES: dict[str, Any] = {name: int(value) for value, names in _DATA["sizes"].items() for name in names.split()} | {
    "apply_spec_augment": False,
    "use_mamba_kernels": False,
}
_UNSET = ("head_dim", "num_key_value_heads")  # set although some families derive them
TEXT = range(3, 64)
"""Token ids of ordinary tokens; smaller ones may be special."""
ROWS = 2
"""Texts, images or sounds of `inputs_of`."""

HINTS: dict[str, dict[str, Any]] = {}
for _names, _fields in _DATA["hints"].items():
    for _name in _names.split():
        HINTS[_name] = HINTS.get(_name, {}) | _fields
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
