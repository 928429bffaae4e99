"""Small inputs for a model's functions, by the names of their parameters; sizes come from the configuration.

A configuration does not say which of several layouts a model takes (one image, tiles of an image, patches, a
spectrogram in either order). So each layout is offered in turn, and the first that the model accepts is used.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

Inputs = dict[str, Any]

_TOKENS = 8  # Funnel halves the number of tokens twice
_SIDE = 4  # pixels of a side, for an image that is given in patches
_SAMPLES = 16_000  # one second of sound
_FRAMES = 3_000  # frames of a spectrogram: 30 seconds


def inputs_of(function: Callable[..., Any], config: PreTrainedConfig, main: str | None = None) -> Iterator[Inputs]:
    """Yield inputs to try for a function of a model, in a fixed order.

    Args:
        function: the function; the names of its parameters say what it takes.
        main: the only input to make; if None, or if the function does not take it, all inputs of the function.
    """
    parameters = inspect.signature(function).parameters
    sizes = _Sizes(config)
    makers: dict[str, Callable[[_Sizes], list[Inputs]]] = {
        "input_ids": _text,
        "pixel_values": _images,
        "pixel_values_videos": _videos,
        "input_features": _spectrograms,
        "input_values": _sounds,
    }
    kinds = [main] if main in makers and main in parameters else [kind for kind in makers if kind in parameters]
    if not kinds:
        return
    layouts = [makers[kind](sizes) for kind in kinds]
    if len(kinds) > 1 and kinds[0] == "input_ids":
        layouts[0] = layouts[0][:1]
    for parts in itertools.product(*layouts):
        inputs = {name: value for part in parts for name, value in part.items()}
        if "decoder_input_ids" in parameters:
            inputs.setdefault("decoder_input_ids", sizes.ids())
        takes_more = kinds[0] == "input_ids" and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        yield {name: value for name, value in inputs.items() if name in parameters or takes_more}


class _Sizes:
    """The sizes that a configuration and its parts name."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config

    def one(self, *names: str, default: int) -> int:
        """Return the first of these entries that is a size, or `default`."""
        found = self._find(names)
        return found if isinstance(found, int) and found >= 0 else default

    def two(self, *names: str, default: int) -> tuple[int, int]:
        """Return the first of these entries that is a size, as height and width."""
        match self._find(names):
            case int(size):
                return size, size
            case [int(height), int(width)] | {"height": int(height), "width": int(width)}:
                return height, width
        return default, default

    def ids(self) -> Tensor:
        """Make token ids that end as a sequence does: classifiers of the BART type look for the end."""
        ids = torch.zeros((1, _TOKENS), dtype=torch.long, device="cpu")
        ids[0, -1] = self.one("eos_token_id", default=0)
        return ids

    def _find(self, names: tuple[str, ...]) -> Any:
        waiting = [self.config]
        for config in waiting:
            for name in names:
                if (value := getattr(config, name, None)) is not None:
                    return value
            waiting += [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
        return None


def _text(sizes: _Sizes) -> list[Inputs]:
    """Inputs of text. Some models refuse a mask, and some want a cache."""
    ids = sizes.ids()
    sides = ("", "decoder_") if sizes.config.is_encoder_decoder else ("",)
    plain = {f"{side}input_ids": ids for side in sides}
    masked = plain | {f"{side}attention_mask": torch.ones_like(ids) for side in sides}
    return [masked | {"use_cache": False}, plain | {"use_cache": False}, plain | {"use_cache": True}]


def _images(sizes: _Sizes) -> list[Inputs]:
    """Inputs of images: one image; an image and its tiles, or frames; patches of one image; patches of many images in
    one sequence."""
    channels = sizes.one("num_channels", "in_channels", "in_chans", default=3)
    height, width = sizes.two("image_size", default=224)
    tiles = sizes.one("max_num_tiles", default=1)
    leading = ((1,), (1, 1), (1, 2), (1, 3), (1, sizes.one("num_frames", default=1)), (1, 1, tiles))
    images: list[Inputs] = [
        {
            "pixel_values": _unknown(*lead, channels, height, width),
            "pixel_attention_mask": _ones(*lead, height, width),
            "pixel_mask": _ones(1, height, width),
            "image_sizes": torch.tensor([[height, width]], dtype=torch.long, device="cpu"),
            "aspect_ratio_ids": _ones(1, 1),
            "aspect_ratio_mask": _ones(1, 1, tiles),
        }
        for lead in dict.fromkeys(leading)
    ]
    grid = torch.tensor([[1, _SIDE, _SIDE]], dtype=torch.long, device="cpu")
    one = {"pixel_attention_mask": _ones(1, _SIDE * _SIDE), "spatial_shapes": grid[:, 1:]}
    many = {"image_grid_thw": grid, "grid_thw": grid, "image_merge_sizes": _ones(1), "merge_sizes": _ones(1)}
    return [
        *images,
        *({"pixel_values": patches} | many for patches in _patches(sizes)),
        *({"pixel_values": patches[None]} | one | many for patches in _patches(sizes)),
    ]


def _videos(sizes: _Sizes) -> list[Inputs]:
    """Inputs of videos: frames, or patches of all frames in one sequence."""
    channels = sizes.one("num_channels", "in_channels", "in_chans", default=3)
    frames = sizes.one("num_frames", "frames_per_clip", default=2)
    height, width = sizes.two("image_size", "crop_size", default=224)
    grid = torch.tensor([[1, _SIDE, _SIDE]], dtype=torch.long, device="cpu")
    many = {"video_grid_thw": grid, "video_merge_sizes": _ones(1)}
    return [
        {"pixel_values_videos": _unknown(1, frames, channels, height, width)},
        *({"pixel_values_videos": patches} | many for patches in _patches(sizes)),
    ]


def _patches(sizes: _Sizes) -> list[Tensor]:
    """The patches of one image: as rows of one or two frames, and as small images."""
    height, width = sizes.two("patch_size", default=16)
    channels = sizes.one("num_channels", "in_channels", "in_chans", default=3)
    frames = sizes.one("temporal_patch_size", default=1)
    rows = [_unknown(_SIDE * _SIDE, channels * n * height * width) for n in dict.fromkeys((frames, 2))]
    return [*rows, _unknown(_SIDE * _SIDE, channels, height, width)]


def _spectrograms(sizes: _Sizes) -> list[Inputs]:
    """Inputs of a spectrogram: bins by frames, or frames by bins."""
    names = "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim", "feature_size"
    bins = sizes.one(*names, default=80)
    frames = 2 * sizes.one("max_source_positions", default=_FRAMES // 2)
    masks = dict.fromkeys(("input_features_mask", "feature_attention_mask"), _ones(1, frames))
    return [{"input_features": _unknown(1, *shape)} | masks for shape in ((bins, frames), (frames, bins))]


def _sounds(sizes: _Sizes) -> list[Inputs]:
    """Inputs of sound: samples, a spectrogram, or samples of one channel."""
    spectrogram = sizes.one("max_length", default=_FRAMES), sizes.one("num_mel_bins", default=1)
    return [{"input_values": _unknown(1, *shape)} for shape in ((_SAMPLES,), spectrogram, (1, _SAMPLES))]


def _unknown(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def _ones(*shape: int) -> Tensor:
    """Return a mask of ones that takes no memory."""
    return torch.ones((), dtype=torch.long, device="cpu").expand(shape)
