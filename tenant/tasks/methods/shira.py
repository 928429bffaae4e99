"""SHiRA (arXiv:2406.13175) and SuperTuning (arXiv:2607.09287): adapters that change few entries of the weight.

PEFT adds the entries to a copy of the weight. An offloaded layer computes `W x`, and the tenant adds the sparse
product. SuperTuning chooses its entries by the magnitude of the weights, so it reads the weight once, at its start.
"""

from typing import Any

from peft import PeftType
from peft.tuners.shira import ShiraModel
from peft.tuners.shira.layer import Linear as ShiraLinear
from peft.tuners.supertuning import SupertuningModel
from peft.tuners.supertuning.layer import Linear as SupertuningLinear
from torch import Tensor

from symbiosis_priv.errors import CheckpointError
from tenant.model.remote_linear import RemoteLayer
from tenant.tasks.methods.registration import replace
from tenant.tasks.methods.sparse import Pattern, Patterns
from tenant.tasks.methods.start import OnOffloadedLayers


def _product(module: Any, adapter: str, x: Tensor, places: Tensor, entries: Tensor) -> Tensor:
    """Multiply rows by the sparse matrix of an adapter. places: integer `[n]` or `[2, n]`, in any order."""
    shape = module.out_features, module.in_features

    def sorted_pattern() -> tuple[Pattern, Tensor]:
        flat, order = _flat(places, shape).sort()
        return Pattern(flat, shape), order

    pattern, order = module.patterns.of(adapter, places, sorted_pattern)
    product: Tensor = pattern.product(x, entries[order])
    return product


def _flat(places: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return positions in the row-major matrix, given positions or rows and columns."""
    places = places.long()
    if places.dim() == 1:
        return places
    rows, columns = places[0], places[1]
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise CheckpointError(f"the adapter names a column outside a weight of {shape[0]} x {shape[1]}; fetch it again")
    return rows * shape[1] + columns


class RemoteShiraLinear(ShiraLinear):
    """PEFT's module around an offloaded layer: it adds a sparse product."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        for adapter in self.active_adapters:
            if adapter in self.shira_weight:
                entries = self.shira_weight[adapter] * self.scaling[adapter]
                # not a buffer, so `to(device)` does not move it
                places = self.shira_indices[adapter] = self.shira_indices[adapter].to(x.device)
                result = result + _product(self, adapter, x, places, entries).to(result.dtype)
        return result


class RemoteShira(OnOffloadedLayers, ShiraModel):
    """SHiRA on offloaded layers too. The caller's mask function may read the weight."""

    def starts_from_weight(self, config: Any) -> bool:
        return bool(config.mask_type != "random")

    def started(self, layer: RemoteLayer, module: Any, adapter: str, config: Any) -> None:
        module.__class__ = RemoteShiraLinear
        vars(module).setdefault("patterns", Patterns())


class RemoteSupertuningLinear(SupertuningLinear):
    """PEFT's module around an offloaded layer: it adds a sparse product, and LoRA's."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        for adapter in self.active_adapters:
            if adapter not in self.supertuning_values:
                continue
            values, places = self.supertuning_values[adapter], self.supertuning_indices[adapter]
            result = result + _product(self, adapter, x, places, values).to(result.dtype)
            if rank := self.supertuning_rank[adapter]:
                lora_a, lora_b = self.supertuning_lora_A[adapter], self.supertuning_lora_B[adapter]
                dropped = self.supertuning_lora_dropout[adapter](x).to(lora_a.weight.dtype)
                scaling = self.supertuning_lora_alpha[adapter] / rank
                result = result + (scaling * lora_b(lora_a(dropped))).to(result.dtype)
        return result


class RemoteSupertuning(OnOffloadedLayers, SupertuningModel):
    def started(self, layer: RemoteLayer, module: Any, adapter: str, config: Any) -> None:
        module.__class__ = RemoteSupertuningLinear
        vars(module).setdefault("patterns", Patterns())


replace(PeftType.SHIRA, RemoteShira)
replace(PeftType.SUPERTUNING, RemoteSupertuning)
