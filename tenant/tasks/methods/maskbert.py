"""MaskBert (Zhao et al. 2020, arXiv:2004.12406): binary masks over the weight, `y = (W * M) x`.

An offloaded layer computes `W x`, and the tenant subtracts `(W * (1 - M)) x`. While masks are trained, each step reads
`W` from the checkpoint on the tenant's disk: a mask is 1 where its score is positive, and the mask's gradient is used
as the score's (straight-through). A saved mask lists the places where it is 0. The weights at these places are read
from the checkpoint once, when the adapter is first used or a task is loaded, and the product with them is sparse.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from symbiosis_priv.errors import ConfigError, UnsupportedMethodError
from tenant.tasks.methods.layer import MethodConfig, MethodLayer, MethodTuner
from tenant.tasks.methods.registration import add
from tenant.tasks.methods.sparse import Pattern, Patterns
from tenant.tasks.methods.start import base_weight, remote_layer


@dataclass
class MaskBertConfig(MethodConfig):
    """Configuration of MaskBert.

    Args:
        masked_share: share of the weights that are masked out (replaced by zero) at the start, in [0, 1).
        learn_masks: False evaluates the saved masks; `save_pretrained` writes False.

    Raises:
        ConfigError: a value is out of range.
    """

    method = "MASKBERT"
    learns_with = "learn_masks"

    masked_share: float = 0.05
    learn_masks: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.masked_share < 1:
            raise ConfigError(f"masked_share = {self.masked_share} is not in [0, 1)")


class MaskBertLayer(MethodLayer):
    """A linear with binary masks over its weight."""

    adapter_layer_names = ("maskbert_scores",)
    other_param_names = ("maskbert_places", "patterns")

    def make_containers(self) -> None:
        self.maskbert_scores = nn.ParameterDict()
        self.maskbert_places = BufferDict(persistent=True)
        self.patterns = Patterns()

    def make(self, adapter: str, config: MaskBertConfig) -> None:
        inputs, outputs = self.widths
        layer = remote_layer(self.base_layer)
        if layer is not None and layer.group.weights is not None:
            layer.group.weights.check()
        if config.learn_masks:
            scores = torch.empty(outputs, inputs, dtype=torch.float32, device="cpu").uniform_(
                -config.masked_share, 1 - config.masked_share
            )
            self.maskbert_scores[adapter] = nn.Parameter(scores)
        elif config.inference_mode:
            self.maskbert_places[adapter] = torch.zeros(0, dtype=self.integer, device="cpu")
        else:
            raise UnsupportedMethodError(
                "a saved mask has no scores, so it cannot be trained further; train a new MaskBertConfig()"
            )

    def change(self, adapter: str, x: Tensor, y: Tensor) -> Tensor | None:
        if (saved := self.pattern(adapter)) is not None:
            pattern, weights = saved
            return -pattern.product(x, weights)
        if adapter not in self.maskbert_scores:
            return None
        scores = self.maskbert_scores[adapter]
        masked_out: Tensor = _MaskedOut.apply(  # type: ignore[no-untyped-call]
            x.to(scores.dtype), scores, lambda: base_weight(self).to(scores)
        )
        return -masked_out

    def places(self, adapter: str) -> Tensor:
        """Return the places where the masks in training are 0: ascending positions in the row-major weight."""
        masked_out: Tensor = self.maskbert_scores[adapter].detach() <= 0
        return masked_out.flatten().nonzero().flatten().to(self.integer)

    def saved(self, adapter: str) -> dict[str, Tensor | None]:
        if adapter not in self.maskbert_scores:
            return {}
        return {"maskbert_scores": None, "maskbert_places": self.places(adapter)}

    def pattern(self, adapter: str) -> tuple[Pattern, Tensor] | None:
        """Return the pattern of a saved mask and the weights that it masks out; None without a saved mask."""
        if adapter not in self.maskbert_places:
            return None
        places = self.maskbert_places[adapter]

        def masked_out() -> tuple[Pattern, Tensor]:
            inputs, outputs = self.widths
            pattern = Pattern(places, (outputs, inputs))
            return pattern, base_weight(self).flatten()[places].to(torch.float32)

        return self.patterns.of(adapter, places, masked_out)


class _MaskedOut(torch.autograd.Function):
    """The product with the weights that are masked out. Backward reads the weight again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scores: Tensor, read: Callable[[], Tensor]) -> Tensor:
        ctx.save_for_backward(x, scores)
        ctx.read = read
        return functional.linear(x, read() * (scores <= 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scores = ctx.saved_tensors
        weight = ctx.read()
        # negative, because this product is subtracted from the layer's product
        grad_scores = -(grad.flatten(0, -2).t() @ x.flatten(0, -2)) * weight
        return grad @ (weight * (scores <= 0)), grad_scores, None


class MaskBertTuner(MethodTuner):
    prefix = "maskbert_"
    tuner_layer_cls = MaskBertLayer

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        if config.learn_masks:
            raise UnsupportedMethodError(
                "a saved mask has no scores to train; load the folder with PeftModel.from_pretrained(model, folder)"
            )
        for name, layer in model.named_modules():
            stored = state_dict.get(f"{name}.maskbert_places")
            if isinstance(layer, MaskBertLayer) and stored is not None:  # the number of zeros differs between masks
                layer.maskbert_places[adapter_name] = torch.zeros_like(stored, dtype=layer.integer)
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)


add("maskbert", config=MaskBertConfig, tuner=MaskBertTuner)
