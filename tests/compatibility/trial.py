"""One class of one family: built small, saved, loaded split and plain, and compared.

The plain model holds the weights that providers multiply by (`tenant.rounded_model`), so only the rounding of rows
differs. Both get the same random LoRA on every offloaded linear.
"""

import contextlib
import re
import tempfile
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
from symbiosis_priv.errors import SymbiosisError, UnsupportedModelError
from tenant import RemoteConfig, rounded_model
from tenant.model.loading import load_model
from tenant.model.offloaded import OffloadedWeight
from tenant.model.remote_linear import RemoteLayer
from tenant.options import Experts
from tests import forms
from tests.compatibility.families import ROWS, inputs_of, small

TOLERANCE = 1e-2
"""Largest allowed difference, as a share of the largest value compared, or of an adapter's effect."""
ROUNDING = 1 / 500
"""Largest allowed difference of a weight, as a share of the matrix's largest weight: more than rounding it to 10 bits
changes."""
_SHOWN, _NAMED = 500, 3  # characters of an error, and matrices that stay, in a cell
_HUGE = 1e30  # larger values are taken for masked logits
_SIZES = {"mxfp4": {"intermediate_size": 64}}  # a scale for 32 columns
_MAMBAS = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
_NEW = 4  # generated tokens
_OUTPUTS = (
    *("logits", "start_logits", "end_logits", "last_hidden_state", "logits_per_image", "image_embeds", "text_embeds"),
    *("start_top_log_probs", "end_top_log_probs", "prediction_logits", "reconstruction"),
)


def attempt(family: str, model: str) -> list[str]:
    """Try one class of a family. Returns cells of a table: the stages that agree and the modes of experts, the share of
    the parameters that providers hold, and the largest matrices that stay. Or "refused" (an error of this project says
    that the model is not supported), "wrong" or "not tried" (plain transformers fails), and the error."""
    failed = "not tried"
    with tempfile.TemporaryDirectory() as folder:
        try:
            trial = Trial(family, model, Path(folder))
            failed = "wrong"
            trial.split()
            share, stayed = round(trial.share(), 3), trial.stayed()
            stages, modes = trial.stages(), trial.modes()
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
            return ["refused" if isinstance(error, SymbiosisError) else failed, "", shown]
    more = f" and {len(stayed) - _NAMED} more" if len(stayed) > _NAMED else ""
    return [
        stages + (f" ({', '.join(modes)})" if modes else ""),
        f"{share:.0%}",
        ", ".join(stayed[:_NAMED]) + more,
    ]


class WrongError(AssertionError):
    """The split model's result differs from the plain model's."""


class Trial:
    """Build a class of a family, or of one of `families.PUBLISHED`, and write it to `folder`. Raises whatever
    transformers raises."""

    def __init__(self, family: str, model: str, folder: Path) -> None:
        family, _, form = family.partition(" in ")
        self.folder = folder / "model"
        self.kind = getattr(transformers, model)
        _write_checkpoint(self.kind, small(family, **_SIZES.get(form, {})), self.folder)
        if form:
            source, self.folder = self.folder, folder / "published"
            chosen = r"\.experts\." if form == "fp4 pairs" else r"layers\..*(proj|attn\.w|experts)"
            forms.publish(source, self.folder, form, chosen=chosen)
        self.stored: Any = load_model(self.folder, kind=self.kind, dtype=torch.float32)
        self.inputs = inputs_of(self.stored)
        self.outputs(self.stored)

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
        except Exception:  # some classes fail although `can_generate` is true
            return False
        found = split.generate(**given, **options)
        steps: Any = getattr(expected, "scores", None)
        if steps is None and not torch.equal(found.sequences, expected.sequences):
            raise WrongError("generate: other tokens")
        for row in range(ROWS):
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
