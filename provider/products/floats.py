"""The float path: products with unquantised weights in float32, with or without the bias. Off unless the operator
enables it.

Only `masking = "paper-pool"` needs it. float32 weights are several times larger than the ring's, so the bytes of the
groups in memory are limited, and the least recently used group is dropped first.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError

MIB = 1 << 20
_BYTES = 4


@dataclass(frozen=True)
class FloatGroup:
    """One layer group: `weight` float32 `[o, d]`, `bias` float32 `[o]` or None. The members are stacked as in the
    ring."""

    weight: Tensor
    bias: Tensor | None

    def product(self, rows: Tensor, *, direction: Direction, biased: bool) -> Tensor:
        """`rows @ W.T` forward, with the bias if `biased`; `rows @ W` backward. float32 `[r, d]` and `[r, o]` on the
        weight's device."""
        if direction != FORWARD:
            return rows @ self.weight
        return linear(rows, self.weight, self.bias if biased else None)


class FloatGroups:
    """The groups in memory, least recently used first. Not thread-safe.

    Args:
        memory: limit in bytes; ConfigError if the largest group is larger.
    """

    def __init__(self, store: WeightStore, *, device: torch.device, memory: int) -> None:
        self._store = store
        self._device = device
        self._memory = memory
        self._used = 0
        self._groups: OrderedDict[int, FloatGroup] = OrderedDict()
        largest = max(_size(store.manifest().groups[index]) for index in store.served)
        if largest > memory:
            raise ConfigError(
                f"float_memory_mib = {memory // MIB} does not hold one of the largest layer groups in float32: "
                f"set it to {-(-largest // MIB)} or more, or float = false"
            )

    @property
    def loaded(self) -> Collection[int]:
        return self._groups.keys()

    @property
    def used(self) -> int:
        """Bytes of the groups in memory."""
        return self._used

    def group(self, index: int) -> FloatGroup:
        """Return one group. The least recently used groups are dropped first if there is no room for it."""
        found = self._groups.get(index)
        if found is None:
            entry = self._store.manifest().groups[index]
            while self._used + _size(entry) > self._memory:
                dropped, _ = self._groups.popitem(last=False)
                self._used -= _size(self._store.manifest().groups[dropped])
            found = self._groups[index] = self._load(index, entry)
            self._used += _size(entry)
        self._groups.move_to_end(index)
        return found

    def _load(self, index: int, entry: GroupEntry) -> FloatGroup:
        layers = self._store.layers(index)
        outputs = list(entry.outputs)
        weight = torch.empty((sum(outputs), entry.inputs), dtype=torch.float32, device=self._device)
        for layer, part in zip(layers, weight.split(outputs), strict=True):
            part.copy_(layer.weight)
        if all(layer.bias is None for layer in layers):
            return FloatGroup(weight, None)
        bias = torch.zeros(sum(outputs), dtype=torch.float32, device=self._device)
        for layer, part in zip(layers, bias.split(outputs), strict=True):
            if layer.bias is not None:
                part.copy_(layer.bias)
        return FloatGroup(weight, bias)


def _size(entry: GroupEntry) -> int:
    """Bytes of a group in float32, including room for a bias."""
    return _BYTES * entry.stacked_outputs * (entry.inputs + 1)
