"""Methods that learn which weights change: diff pruning and MaskBert. Both keep a sparse result.

Diff pruning (Guo et al. 2021, arXiv:2012.07463): a sparse change of the weight. While the support is learned, the
change `z * delta` is dense: `z` is a sample of the hard concrete distribution (Louizos et al. 2018, arXiv:1712.01312),
and the expected number of non-zeros is added to the loss. The tenant then holds two numbers for each base weight and
computes a dense product. Evaluation and saving keep the largest entries. A loaded adapter is sparse; further training
changes only its entries. The method needs no base weight.

MaskBert (Zhao et al. 2020, arXiv:2004.12406): binary masks over the weight, `y = (W * M) x`. An offloaded layer
computes `W x`, and the tenant subtracts `(W * (1 - M)) x`. While masks are trained, each step reads `W` from the
checkpoint on the tenant's disk: a mask is 1 where its score is positive, and the mask's gradient is used as the score's
(straight-through). A saved mask lists the places where it is 0. The weights at these places are read from the
checkpoint once, when the adapter is first used or a task is loaded, and the product with them is sparse.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners._buffer_dict import BufferDict
from torch import Tensor, nn
from torch.nn import functional

from symbiosis_priv.errors import ConfigError, UnsupportedMethodError
from tenant.model.remote_linear import RemoteLayer
from tenant.tasks.methods.layer import MethodConfig, MethodLayer, MethodTuner, add
from tenant.tasks.methods.sparse import Pattern, Patterns, version

_BETA, _GAMMA, _ZETA = 2 / 3, -0.1, 1.1  # temperature and stretch of the hard concrete distribution
_START = 5.0  # log alpha at the start: nearly all gates are open


@dataclass
class DiffPruningConfig(MethodConfig):
    """Configuration of diff pruning.

    Args:
        density: share of the weights that may change, in (0, 1].
        l0_weight: weight of the expected number of non-zeros in the loss.
        learn_support: False trains and evaluates the saved support; `save_pretrained` writes False.

    Raises:
        ConfigError: a value is out of range.
    """

    method = "DIFF_PRUNING"
    learns_with = "learn_support"

    density: float = 0.005
    l0_weight: float = 1.25e-7
    learn_support: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.density <= 1:
            raise ConfigError(f"density = {self.density} is not in (0, 1]")


class DiffPruningLayer(MethodLayer):
    """A linear with changes: dense while their support is learned, sparse afterwards."""

    adapter_layer_names = ("diff_pruning_delta", "diff_pruning_gate", "diff_pruning_values")
    other_param_names = ("diff_pruning_places", "_count", "_l0_weight", "patterns", "_pruned")

    def make_containers(self) -> None:
        self.diff_pruning_delta = nn.ParameterDict()
        self.diff_pruning_gate = nn.ParameterDict()
        self.diff_pruning_values = nn.ParameterDict()
        self.diff_pruning_places = BufferDict(persistent=True)
        self._count: dict[str, int] = {}
        self._l0_weight: dict[str, float] = {}
        self.patterns = Patterns()
        self._pruned: dict[str, tuple[object, Tensor, Tensor]] = {}

    def make(self, adapter: str, config: DiffPruningConfig) -> None:
        inputs, outputs = self.widths
        self._l0_weight[adapter] = config.l0_weight
        self._count[adapter] = count = max(1, round(config.density * inputs * outputs))
        if config.learn_support:
            delta = torch.zeros(outputs, inputs, dtype=torch.float32, device="cpu")
            self.diff_pruning_delta[adapter] = nn.Parameter(delta)
            self.diff_pruning_gate[adapter] = nn.Parameter(torch.full_like(delta, _START))
        else:
            self.diff_pruning_values[adapter] = nn.Parameter(torch.zeros(count, dtype=torch.float32, device="cpu"))
            self.diff_pruning_places[adapter] = torch.arange(count, dtype=self.integer, device="cpu")

    def change(self, adapter: str, x: Tensor, y: Tensor) -> Tensor | None:
        if self.training and adapter in self.diff_pruning_delta:
            delta = self._gate(adapter, sampled=True) * self.diff_pruning_delta[adapter]
            return functional.linear(x.to(delta.dtype), delta)
        found = self.pattern(adapter)
        return None if found is None else found[0].product(x, found[1])

    def pattern(self, adapter: str) -> tuple[Pattern, Tensor] | None:
        """Return the pattern of a sparse change and its values; None if the layer does not have the adapter."""
        if adapter in self.diff_pruning_values:
            places, values = self.diff_pruning_places[adapter], self.diff_pruning_values[adapter]
        elif adapter in self.diff_pruning_delta:
            places, values = self.pruned(adapter)
        else:
            return None
        inputs, outputs = self.widths
        pattern, _ = self.patterns.of(adapter, places, lambda: (Pattern(places, (outputs, inputs)), places[:0]))
        return pattern, values

    def saved(self, adapter: str) -> dict[str, Tensor | None]:
        if adapter not in self.diff_pruning_delta:
            return {}
        places, values = self.pruned(adapter)
        sparse = {"diff_pruning_values": values, "diff_pruning_places": places.to(self.integer)}
        return {"diff_pruning_delta": None, "diff_pruning_gate": None} | sparse

    def penalties(self) -> Iterator[Tensor]:
        """Yield the weighted expected number of non-zeros of each active adapter that learns its support."""
        for adapter in self.active_adapters:
            if adapter in self.diff_pruning_gate and not self.disable_adapters:
                gate = self.diff_pruning_gate[adapter] - _BETA * math.log(-_GAMMA / _ZETA)
                yield self._l0_weight[adapter] * torch.sigmoid(gate).sum()

    @torch.no_grad()
    def pruned(self, adapter: str) -> tuple[Tensor, Tensor]:
        """Return the places and values of the largest entries of a change that is being learned."""
        delta, gate = self.diff_pruning_delta[adapter], self.diff_pruning_gate[adapter]
        key = (id(delta), *version(delta), id(gate), *version(gate))
        found = self._pruned.get(adapter)
        if found is None or found[0] != key:
            change = (self._gate(adapter, sampled=False) * delta).flatten()
            places = change.abs().topk(self._count[adapter]).indices.sort().values
            found = self._pruned[adapter] = key, places, change[places]
        return found[1], found[2]

    def _gate(self, adapter: str, *, sampled: bool) -> Tensor:
        gate = self.diff_pruning_gate[adapter]
        if sampled:
            noise = torch.rand_like(gate).clamp_(1e-6, 1 - 1e-6)
            gate = (noise.logit() + gate) / _BETA
        return (torch.sigmoid(gate) * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def _add_penalty(model: nn.Module, _: object, output: Any) -> Any:
    """Hook: add the expected number of non-zeros of the active adapters to the loss of a training step."""
    if model.training and getattr(output, "loss", None) is not None:
        for layer in model.modules():
            if isinstance(layer, DiffPruningLayer):
                for penalty in layer.penalties():
                    output.loss = output.loss + penalty.to(output.loss.device)
    return output


class DiffPruningTuner(MethodTuner):
    prefix = "diff_pruning_"
    tuner_layer_cls = DiffPruningLayer

    def _pre_injection_hook(self, model: nn.Module, config: PeftConfig, adapter_name: str) -> None:
        if _add_penalty not in model._forward_hooks.values():
            model.register_forward_hook(_add_penalty)


add("diff_pruning", config=DiffPruningConfig, tuner=DiffPruningTuner)


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
        layer = self.get_base_layer()
        if isinstance(layer, RemoteLayer) and layer.group.weights is not None:
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
            x.to(scores.dtype), scores, lambda: self.base_weight().to(scores)
        )
        return -masked_out

    def base_weight(self) -> Tensor:
        """Return the weight `[o, d]` that the linear multiplies by: its parameter, or an offloaded layer's rounded
        weight. Raises what `RemoteLayer.base_weight` raises."""
        base: Any = self.get_base_layer()
        if not isinstance(base, RemoteLayer) and hasattr(base, "original"):
            base = base.original()  # a task's stand-in for a linear of a whole model
        weight: Tensor = base.base_weight(rounded=True) if isinstance(base, RemoteLayer) else base.weight.detach()
        return weight if isinstance(base, nn.Linear) else weight.t()

    def saved(self, adapter: str) -> dict[str, Tensor | None]:
        if adapter not in self.maskbert_scores:
            return {}
        masked_out: Tensor = self.maskbert_scores[adapter].detach() <= 0
        places = masked_out.flatten().nonzero().flatten()  # ascending positions in the row-major weight
        return {"maskbert_scores": None, "maskbert_places": places.to(self.integer)}

    def pattern(self, adapter: str) -> tuple[Pattern, Tensor] | None:
        """Return the pattern of a saved mask and the weights that it masks out; None without a saved mask."""
        if adapter not in self.maskbert_places:
            return None
        places = self.maskbert_places[adapter]

        def masked_out() -> tuple[Pattern, Tensor]:
            inputs, outputs = self.widths
            pattern = Pattern(places, (outputs, inputs))
            return pattern, self.base_weight().flatten()[places].to(torch.float32)

        return self.patterns.of(adapter, places, masked_out)


class _MaskedOut(torch.autograd.Function):
    """The product with the weights that are masked out. Backward reads the weight again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scores: Tensor, read: Callable[[], Tensor]) -> Tensor:
        ctx.save_for_backward(x, scores)
        ctx.read = read
        return functional.linear(x, read() * (scores <= 0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scores = ctx.saved_tensors
        weight = ctx.read().detach()
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
        for name, layer in model.named_modules():
            stored = state_dict.get(f"{name}.maskbert_places")
            if isinstance(layer, MaskBertLayer) and stored is not None:  # the number of zeros differs between masks
                layer.maskbert_places[adapter_name] = torch.zeros_like(stored, dtype=layer.integer)
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)


add("maskbert", config=MaskBertConfig, tuner=MaskBertTuner)
