"""Finds the calls of linears and experts, with their inputs, by running a model without its weights.

The inputs are small, and are made by the names of a function's parameters; sizes come from the configuration. It does
not say which of several layouts a model takes (one image, tiles, patches, a spectrogram in either order), so each is
offered in turn, and the first that the model accepts is used.
"""

import inspect
import itertools
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from symbiosis_priv.checkpoints.discovery.linears import called, experts_of, is_metadata
from symbiosis_priv.errors import UnsupportedModelError, one_line

Inputs = dict[str, Any]

_TOKENS = 8  # Funnel halves the number of tokens twice
_SIDE = 4  # pixels of a side, for an image that is given in patches
_SAMPLES = 16_000  # one second of sound
_FRAMES = 3_000  # frames of a spectrogram: 30 seconds


def inputs_of(function: Callable[..., Any], config: PreTrainedConfig, main: str | None = None) -> Iterator[Inputs]:
    """Yield inputs to try for a function of a model, in a fixed order. The names of its parameters say what it takes.
    `main` is the only input to make; if None, or if the function does not take it, all inputs of the function."""
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


_SHOWN = 200  # characters shown of an error of the model's own code
_LEAST_SHARE = 0.5  # if only parts of a model can be run, they must hold this share of its parameters
_Run = tuple[Callable[..., Any], Inputs]
_FEATURES = re.compile(r"get_(text|image|video|audio)_features")


@dataclass(frozen=True, eq=False)
class Call:
    """The first call of a module in one run of the model. Keeps the input alive, so that no other tensor gets the
    input's `id`."""

    name: str
    x: Tensor
    version: int
    run: int

    @property
    def input(self) -> tuple[int, int, int]:
        """The identity of the input tensor: equal for two calls of one run with the same tensor."""
        return self.run, id(self.x), self.version


def trace_calls(model: PreTrainedModel, modules: dict[str, nn.Module]) -> tuple[list[Call], set[str]]:
    """Run a model and, where this leaves modules out, its parts: once in inference and once in training. The forward
    pass of experts is replaced, because it depends on routes. `modules` are the linears and the modules of expert
    stacks to look for, by name. Returns the first call of every module in inference, in order; and the names of modules
    whose parameters the model also uses otherwise. Raises `UnsupportedModelError`: it cannot be run without weights."""
    trace = _Trace(model, modules)
    handles = [m.register_forward_pre_hook(partial(trace.enter, n), with_kwargs=True) for n, m in modules.items()]
    handles += [m.register_forward_hook(trace.leave, always_call=True) for m in modules.values()]
    for module in experts_of(model).values():
        module.forward = lambda x, *_, **__: torch.empty_like(x)  # a tensor of their result's shape
    try:
        runs = _run_all(model.eval(), trace)
        calls = trace.calls
        model.train()
        for function, inputs in runs:
            trace.run(function, inputs)  # a failure shows when the model is trained
    finally:
        for handle in handles:
            handle.remove()
        model.eval()
    return calls, trace.computed_with


class _Trace(TorchFunctionMode):
    """Records the calls of modules, and the use of their parameters outside such calls."""

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self._model = model
        self._modules = modules
        self.calls: list[Call] = []
        self.computed_with: set[str] = set()
        self._names = {id(p): name for name, m in modules.items() for p in m.parameters(recurse=False)}
        self._runs = 0
        self._inside = 0

    def share(self) -> float:
        """Share of the modules' parameters that runs have used."""
        reached = {call.name for call in self.calls}
        sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in self._modules.items()}
        return sum(size for name, size in sizes.items() if name in reached) / sum(sizes.values())

    def is_complete(self) -> bool:
        """Returns True if runs have called every module."""
        return len(self._modules) == len({call.name for call in self.calls})

    def run(self, function: Callable[..., Any], inputs: dict[str, Any]) -> str:
        """Call a function of the model. Returns "", or where and why it failed; then its calls do not count."""
        before = self.calls
        self.calls = [*before]
        self._runs += 1
        self._inside = 0
        self._seen = {call.name for call in before}
        try:
            with self:
                function(**inputs)
        # the architecture's code may raise any error where it was not written for such inputs
        except Exception as error:
            self.calls = before
            names = {id(module): name for name, module in self._model.named_modules()}
            owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
            # the innermost module whose code raised the error
            place = next((names[id(o)] for o in reversed(owners) if names.get(id(o))), type(self._model).__name__)
            return f"{place}: {one_line(f'{type(error).__name__}: {error}')[:_SHOWN]}"
        return ""

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inside += 1
        x = args[0] if args else next(iter(kwargs.values()))
        if name not in self._seen and x.numel():  # no rows: how many there are depends on unknown values
            self._seen.add(name)
            self.calls.append(Call(name, x, x._version, self._runs))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._inside:
            used = {self._names[id(x)] for x in _leaves((*args, *kwargs.values())) if id(x) in self._names}
            if used and not is_metadata(called(func)):
                self.computed_with |= used
        return func(*args, **kwargs)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """The arguments of a function, and those inside lists and other containers."""
    for value in values:
        if isinstance(value, Tensor | int | float | None):
            yield value
        else:
            yield from tree_leaves(value)


def _run_all(model: PreTrainedModel, trace: _Trace) -> list[_Run]:
    """Run the model on its main input, then on all its inputs, and then each part that no run has reached. Returns the
    runs without an error. Models skip towers that get no input, so functions such as `get_image_features` run alone."""
    runs: list[_Run] = []
    failures: list[str] = []

    def attempt(function: Callable[..., Any], config: PreTrainedConfig, main: str | None = None) -> bool:
        try:
            layouts = list(inputs_of(function, config, main))
        except (RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"config.json states sizes of which no input can be made ({one_line(str(error))[:_SHOWN]}); "
                f"fetch it again"
            ) from error
        for inputs in layouts:
            failure = trace.run(function, inputs)
            if not failure:
                runs.append((function, inputs))
                return True
            failures.append(failure)
        return False

    whole = attempt(model.forward, model.config, model.main_input_name)
    owners: tuple[PreTrainedModel, ...] = (model, model.base_model)  # type: ignore[assignment]
    for part in dict.fromkeys(owners):
        for name in filter(_FEATURES.fullmatch, dir(type(part))):
            if not trace.is_complete():
                attempt(getattr(part, name), part.config)
    if not trace.is_complete():
        whole |= attempt(model.forward, model.config)
    for name, part in model.named_modules():
        reached = any(call.name.startswith(f"{name}.") for call in trace.calls)
        if isinstance(part, PreTrainedModel) and name and not reached:
            attempt(part.forward, part.config, part.main_input_name)
    if not trace.calls or (not whole and trace.share() < _LEAST_SHARE):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be traced without weights, because its code fails. If the sizes in "
            f"config.json are wrong (an image_size below what the stages need, for example), correct them; else use "
            f"another base model: one that runs on token ids, pixels or sound alone, and does not divide its rows by "
            f"values. The code said: {'; '.join(dict.fromkeys(failures))}"
        )
    return runs
