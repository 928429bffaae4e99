"""Diff pruning (Guo et al. 2021, arXiv:2012.07463): a sparse change of the weight.

While the support is learned, the change `z * delta` is dense: `z` is a sample of the hard concrete distribution
(Louizos et al. 2018, arXiv:1712.01312), and the expected number of non-zeros is added to the loss. The tenant then
holds two numbers for each base weight and computes a dense product. Evaluation and saving keep the largest entries. A
loaded adapter is sparse; further training changes only its entries. The method needs no base weight.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners._buffer_dict import BufferDict
from torch import Tensor, nn
from torch.nn import functional

from symbiosis_priv.arithmetic.ring import Widths
from symbiosis_priv.errors import ConfigError, UnsupportedMethodError
from tenant.tasks.methods.layer import MethodConfig, MethodLayer, MethodTuner
from tenant.tasks.methods.registration import add
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

    def entries(self, widths: Widths) -> int:
        """Entries of the sparse change of a linear."""
        return max(1, round(self.density * math.prod(widths)))


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
        self._count[adapter] = count = config.entries(self.widths)
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

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        if config.learn_support:
            raise UnsupportedMethodError(
                "a saved change is sparse, and this adapter is still learning its support; load the folder with "
                "PeftModel.from_pretrained(model, folder, is_trainable=True) to train its values further"
            )
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)


add("diff_pruning", config=DiffPruningConfig, tuner=DiffPruningTuner)
