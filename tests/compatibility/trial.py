"""One class of one family: built small, saved, loaded split and plain, and compared.

The plain model holds the weights that providers multiply by (`tenant.rounded_model`), so only the rounding of rows
differs. Both get the same random LoRA on every offloaded linear.
"""

import contextlib
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.checkpoints.discovery.linears import experts_of
from symbiosis_priv.errors import UnsupportedModelError
from tenant import RemoteConfig, rounded_model
from tenant.model.loading import load_model
from tenant.model.offloaded import OffloadedWeight
from tenant.model.remote_linear import RemoteLayer
from tenant.options import Experts
from tests.compatibility.families import TEXT, small

TOLERANCE = 1e-2
"""Largest allowed difference, as a share of the largest value compared, or of an adapter's effect."""
ROUNDING = 1 / 500
"""Largest allowed difference of a weight, as a share of the matrix's largest weight: more than rounding it to 10 bits
changes."""
_HUGE = 1e30  # larger values are taken for masked logits
_MAMBAS = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
_ROWS, _LENGTH, _NEW = 2, 8, 4
_OUTPUTS = (
    *("logits", "start_logits", "end_logits", "last_hidden_state", "logits_per_image", "image_embeds", "text_embeds"),
    *("start_top_log_probs", "end_top_log_probs", "prediction_logits", "reconstruction"),
)


class WrongError(AssertionError):
    """The split model's result differs from the plain model's."""


class Trial:
    """Build a class of a family and write it to `folder`. Raises whatever transformers raises."""

    def __init__(self, family: str, model: str, folder: Path) -> None:
        self.folder = folder
        self.kind = getattr(transformers, model)
        _write_checkpoint(self.kind, small(family), folder)
        self.stored: Any = load_model(folder, kind=self.kind, dtype=torch.float32)
        self.inputs = inputs_of(self.stored)
        self.outputs(self.stored)
        self.note = ""

    def split(self, experts: Experts | None = None) -> None:
        """Load both models.

        Raises:
            SymbiosisError: the model is refused.
            WrongError: the plain model has another weight than transformers loads.
        """
        remote = RemoteConfig(masking="simulate", experts=experts)
        self.model: Any = load_model(self.folder, remote=remote, kind=self.kind, dtype=torch.float32)
        self.plain: Any = rounded_model(self.folder, kind=self.kind, experts=experts)
        rounded = dict(self.plain.named_parameters())
        for name, weight in self.stored.named_parameters():
            if weight.numel() and (rounded[name] - weight).abs().max() > ROUNDING * weight.abs().max():
                raise WrongError(f"{name} is another tensor than transformers loads")

    def modes(self) -> list[Experts]:
        """The modes that the experts of a mixture work in, forward; none without experts.

        Raises:
            WrongError: the split model differs from the plain one.
        """
        working: list[Experts] = []
        for mode in get_args(Experts) if experts_of(self.stored) else ():
            with contextlib.suppress(UnsupportedModelError):
                self.split(mode)
                expected = self.outputs(self.plain)
                _agree(f"experts = {mode}", self.outputs(self.model), expected, scale=expected.abs().max())
                working.append(mode)
        return working

    @property
    def offloaded(self) -> list[str]:
        return [name for name, module in self.model.named_modules() if isinstance(module, RemoteLayer)]

    def _adaptable(self) -> list[str]:
        """Names of the linears that PEFT can put a LoRA on. (PEFT refuses the last linear of a Mamba layer.)"""
        refused = ".out_proj" if self.model.config.model_type in _MAMBAS else "none"
        return [name for name in self.offloaded if not name.endswith(refused)]

    def share(self) -> float:
        """The share of the parameters that providers hold."""
        kept: int = sum(p.numel() for p in self.model.parameters() if not isinstance(p, OffloadedWeight))
        whole: int = sum(p.numel() for p in self.plain.parameters())
        return 1 - kept / whole

    def stayed(self) -> list[str]:
        """Matrices that stay with the tenant, the largest first, without the numbers of layers."""
        sizes: Counter[str] = Counter()
        for name, parameter in self.model.named_parameters():
            if parameter.dim() > 1 and not isinstance(parameter, OffloadedWeight):
                sizes[re.sub(r"\.\d+(?=\.)", ".*", name.removesuffix(".weight"))] += parameter.numel()
        return [name for name, _ in sizes.most_common()]

    def stages(self) -> str:
        """Compare the models, and return the stages that agree: F, B, H, and G if the plain model generates.

        Raises:
            WrongError: the models differ at a stage.
        """
        before = self.outputs(self.plain)
        _agree("forward", self.outputs(self.model), before, scale=before.abs().max())
        torch.manual_seed(3)
        config = LoraConfig(target_modules=self._adaptable(), r=4, init_lora_weights=False)
        split: Any = get_peft_model(self.model, config).eval()
        adapter = str(self.folder / "adapter")
        split.save_pretrained(adapter)
        home: Any = PeftModel.from_pretrained(self.plain, adapter, is_trainable=True).eval()
        after = self.outputs(home)
        effect = (after - before).abs().max()
        # none where all adapters are on a pooler that this head does not use (SqueezeBERT)
        _agree("home", self.outputs(split), after, scale=effect if effect else before.abs().max())
        gradients = self.gradients(home)
        for name, gradient in self.gradients(split).items():
            if gradient.any() or gradients[name].any():  # some weights have no effect at the start (Doge's dt_proj)
                _agree(f"gradient of {name}", gradient, gradients[name], scale=gradients[name].abs().max())
        return "FBGH" if self._generates(split.eval(), home.eval()) else "FBH"

    def outputs(self, model: Any) -> Tensor:
        torch.manual_seed(5)  # a ViT-MAE masks patches at random
        with torch.no_grad():
            return _values(model(**self.inputs))

    def gradients(self, model: Any) -> dict[str, Tensor]:
        """Return the gradient of every adapter parameter after one backward pass."""
        torch.manual_seed(5)
        np.random.seed(5)
        model.train()
        out = _values(model(**self.inputs))
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
        if out.requires_grad:
            (out * weights).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def _generates(self, split: Any, home: Any) -> bool:
        """Returns True if both models generate the same tokens; False if the plain model cannot generate.

        If a token differs, the plain model's scores of both tokens must be equal within rounding.
        """
        if not home.can_generate():
            return False
        given = {name: value for name, value in self.inputs.items() if not name.startswith("decoder_")}
        options: dict[str, Any] = {"max_new_tokens": _NEW, "min_new_tokens": _NEW, "do_sample": False}
        options |= {"num_beams": 1, "return_dict_in_generate": True, "output_scores": True}
        try:
            expected = home.generate(**given, **options)
        except Exception as error:  # some classes fail although `can_generate` is true
            self.note = f"plain generate: {error}"
            return False
        found = split.generate(**given, **options)
        steps: Any = getattr(expected, "scores", None)
        if steps is None and not torch.equal(found.sequences, expected.sequences):
            raise WrongError("generate: other tokens")
        for row in range(_ROWS):
            for step, scores in enumerate(steps or ()):
                index = step - len(steps)
                token, other = expected.sequences[row, index], found.sequences[row, index]
                if token != other:
                    lost = scores[row, token] - scores[row, other]
                    if lost > TOLERANCE * scores[row, token].abs():
                        raise WrongError(f"generate: {other} for {token} in row {row}")
                    break
        return True


def _agree(what: str, a: Tensor, b: Tensor, *, scale: Tensor) -> None:
    if a.shape != b.shape:
        raise WrongError(f"{what}: {list(a.shape)} for {list(b.shape)}")
    difference = (a - b).abs().max()
    if not difference <= TOLERANCE * scale or not scale > 0:
        raise WrongError(f"{what}: {difference:.2g} of {scale:.2g}")


def _values(outputs: Any) -> Tensor:
    """Return the floating-point results of a forward pass, joined to one row."""
    found = [outputs[name] for name in _OUTPUTS if name in outputs and outputs[name] is not None]
    flat = torch.cat([value.flatten() for value in found])
    return flat.where(flat.detach().abs() < _HUGE, 0.0)


def _write_checkpoint(kind: Any, config: Any, folder: Path) -> None:
    """Write a checkpoint with random biases, and random weights that are large enough for each to matter."""
    torch.manual_seed(0)
    model = kind(config)
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = modules[name.rpartition(".")[0]]
            stack = parameter.dim() == 3 and not isinstance(module, nn.modules.conv._ConvNd)
            if name.endswith(".bias") or isinstance(module, (nn.Linear, Conv1D)) or stack:
                nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


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
    return torch.randint(TEXT.start, TEXT.stop, (_ROWS, _LENGTH))


def _text(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Tokens, among them the places of an image or a sound if there is one."""
    ids = _tokens()
    if model.config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        ids[:, -1] = model.config.eos_token_id  # classifiers of the BART type look for it
    if given and (place := _placeholder(model.config)) is not None:
        count = _features_of(model, given)
        ids = torch.cat([ids[:, :2], torch.full((_ROWS, count), place), ids[:, 2:]], dim=1)
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
    return int(sum(part.numel() for part in parts)) // int(model.config.get_text_config().hidden_size) // _ROWS


def _placeholder(config: Any) -> int | None:
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def _pixels(config: Any) -> dict[str, Any]:
    vision = getattr(config, "vision_config", config)
    if hasattr(vision, "temporal_patch_size"):  # Qwen-VL: a list of patches, and the grid that they come from
        side = 4
        wide = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        grid = torch.tensor([[1, side, side]] * _ROWS)
        return {"pixel_values": torch.randn(_ROWS * side * side, wide), "image_grid_thw": grid}
    size = vision.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = [getattr(vision, "num_channels", 3), height, width]
    if hasattr(config, "num_frames"):
        shape.insert(0, config.num_frames)
    elif config.model_type in ("idefics3", "smolvlm"):
        shape.insert(0, 1)  # images of one text
    elif config.model_type == "llava_next":
        shape.insert(0, 2)  # the image and its one tile
        sizes = torch.tensor([[height, width]] * _ROWS)
        return {"pixel_values": torch.randn(_ROWS, *shape), "image_sizes": sizes}
    pixels = torch.randn(_ROWS, *shape)
    return {"pixel_values": pixels} | (
        {"image_sizes": torch.tensor([[height, width]] * _ROWS)} if config.model_type == "mistral3" else {}
    )


def _features(config: Any) -> dict[str, Any]:
    audio = getattr(config, "audio_config", getattr(config, "encoder_config", config))
    if config.model_type in ("whisper", "voxtral", "qwen2_audio"):
        frames = torch.randn(_ROWS, audio.num_mel_bins, 2 * audio.max_source_positions)
        mask = {"feature_attention_mask": torch.ones(_ROWS, frames.shape[-1], dtype=torch.long)}
        return {"input_features": frames} | (mask if config.model_type == "qwen2_audio" else {})
    wide = getattr(audio, "input_feat_per_channel", None) or getattr(audio, "feature_projection_input_dim", None)
    return {"input_features": torch.randn(_ROWS, 32, wide or audio.num_mel_bins)}


def _waves(config: Any) -> Tensor:
    if hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):  # spectrograms
        return torch.randn(_ROWS, config.max_length, config.num_mel_bins)
    return torch.randn(_ROWS, 2000)
