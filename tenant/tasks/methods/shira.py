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


class _Sparse:
    """What both modules share: a change of the entries of a weight at places, integer `[n]` or `[2, n]`, in any
    order."""

    patterns: Patterns
    in_features: int
    out_features: int

    def sparse(self, adapter: str) -> tuple[Tensor, Tensor] | None:
        """Return the places and entries of an adapter; None if the layer does not have the adapter."""
        raise NotImplementedError

    def pattern(self, adapter: str) -> tuple[Pattern, Tensor] | None:
        """Return the pattern of an adapter and its entries, in the pattern's order."""
        if (found := self.sparse(adapter)) is None:
            return None
        places, entries = found
        shape = self.out_features, self.in_features

        def sorted_pattern() -> tuple[Pattern, Tensor]:
            flat, order = _flat(places, shape).sort()
            return Pattern(flat, shape), order

        pattern, order = self.patterns.of(adapter, places, sorted_pattern)
        return pattern, entries[order]


def _flat(places: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return positions in the row-major matrix, given positions or rows and columns."""
    places = places.long()
    if places.dim() == 1:
        return places
    rows, columns = places[0], places[1]
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise CheckpointError(f"the adapter names a column outside a weight of {shape[0]} x {shape[1]}; fetch it again")
    return rows * shape[1] + columns


class RemoteShiraLinear(_Sparse, ShiraLinear):
    """PEFT's module around an offloaded layer: it adds a sparse product."""

    def sparse(self, adapter: str) -> tuple[Tensor, Tensor] | None:
        if adapter not in self.shira_weight:
            return None
        entries = self.shira_weight[adapter] * self.scaling[adapter]
        # not a buffer, so `to(device)` does not move it
        places = self.shira_indices[adapter] = self.shira_indices[adapter].to(entries.device)
        return places, entries

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        for adapter in self.active_adapters:
            if (found := self.pattern(adapter)) is not None:
                result = result + found[0].product(x, found[1]).to(result.dtype)
        return result


class RemoteShira(OnOffloadedLayers, ShiraModel):
    """SHiRA on offloaded layers too. The caller's mask function may read the weight."""

    def starts_from_weight(self, config: Any) -> bool:
        return bool(config.mask_type != "random")

    def started(self, layer: RemoteLayer, module: Any, adapter: str, config: Any) -> None:
        module.__class__ = RemoteShiraLinear
        vars(module).setdefault("patterns", Patterns())


class RemoteSupertuningLinear(_Sparse, SupertuningLinear):  # type: ignore[misc]
    """PEFT's module around an offloaded layer: it adds a sparse product, and LoRA's."""

    def sparse(self, adapter: str) -> tuple[Tensor, Tensor] | None:
        if adapter not in self.supertuning_values:
            return None
        return self.supertuning_indices[adapter], self.supertuning_values[adapter]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        for adapter in self.active_adapters:
            if (found := self.pattern(adapter)) is None:
                continue
            result = result + found[0].product(x, found[1]).to(result.dtype)
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
