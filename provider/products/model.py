"""The served base model: the products that tenants may ask for.

The float path has unquantised weights in float32, with or without the bias. Only `masking = "paper-pool"` needs it, and
it is off unless the operator enables it. float32 weights are several times larger than the ring's, so the bytes of the
groups in memory are limited, and the least recently used group is dropped first.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from provider.config.schema import MIB, ProviderConfig
from provider.products.operands import LocalOperands, Operands
from symbiosis_priv.arithmetic.keystream import expand, mask_key
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.manifest import GroupEntry, Manifest
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError, DeviceLostError
from symbiosis_priv.network.wire import Arithmetic, Effect

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


def open_store(config: ProviderConfig, *, shardable: bool = False) -> WeightStore:
    """Open the weight store of a configuration. For a group of ranks, it uses a layout that can be sharded."""
    path = resolve(config.model.checkpoint)
    model, executor = config.model, config.executor
    return WeightStore(
        path,
        weight_bits=model.weight_bits,
        cache=model.cache,
        device=executor.device,
        kernel=executor.kernel,
        shardable=shardable,
        layers=model.layer_range,
        scope=model.scope,
    )


def _require_usable(device: str | torch.device) -> torch.device:
    """Return the device. Raises ConfigError if a value cannot be copied to it and back."""
    try:
        usable = torch.device(device)
        torch.zeros(1, dtype=torch.float32, device=usable).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device = '{device}' cannot be used here ({reason}); use cpu, or cuda with a GPU") from error
    return usable


class ServedModel:
    """Computes products of every served layer group, one at a time, for the executor.

    Args:
        store: the base model, the layers that are served, and the device of products.
        operands: computes the ring products; None uses the store's weights in this process.
        float_memory: bytes for weights of the float path; None if there is no float path.

    Raises:
        ConfigError: this machine or this torch does not support the device.
    """

    def __init__(
        self, store: WeightStore, *, operands: Operands | None = None, float_memory: int | None = None
    ) -> None:
        self._store = store
        self._device = _require_usable(store.device)
        self._operands = operands or LocalOperands(store)
        self._floats = None if float_memory is None else FloatGroups(store, device=self._device, memory=float_memory)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the whole model."""
        return self._store.manifest()

    @property
    def served(self) -> range:
        return self._store.served

    @property
    def serves_from_any_thread(self) -> bool:
        """Returns True if several threads may compute products, one at a time."""
        return self._operands.any_thread

    @property
    def groups_loaded(self) -> int:
        return len({*self._operands.loaded, *(self._floats.loaded if self._floats else ())})

    def product(
        self, rows: Tensor, *, group: int, direction: Direction, arithmetic: Arithmetic, counts: Counts | None = None
    ) -> Tensor:
        """`rows @ W.T` forward, `rows @ W` backward.

        Args:
            rows: `[r, inputs]` on the CPU; int32 for the ring, float32 otherwise.
            group: index into the manifest.
            arithmetic: `float` adds the bias forward. The other arithmetics and backward products add none.
            counts: rows of each expert of a stack, if a row is for one expert; ring only.

        Returns:
            `[r, outputs]`, contiguous, on the CPU, of the dtype of `rows`.

        Raises:
            ConfigError: a float product without a float path. (The gateway refuses such requests.)
        """
        if arithmetic == "ring":
            return self._operands.product(rows, group=group, direction=direction, counts=counts)
        if self._floats is None:
            raise ConfigError("float products are not served here: set float = true under [executor]")
        operand = self._floats.group(group)
        return operand.product(rows.to(self._device), direction=direction, biased=arithmetic == "float").cpu()

    def require_device(self) -> None:
        """Compute a small product, to test the device.

        Raises:
            DeviceLostError: the device fails.
        """
        try:
            _require_usable(self._device)
        except ConfigError as error:
            raise DeviceLostError(f"device {self._device} has failed for good: {error}") from error

    def mask_rows(self, request: Effect) -> Tensor:
        """The keystream rows of an effect request, int32 `[rows, inputs]`. Their product is the effect."""
        entry = self.manifest.entry(request.group, by_expert=request.counts is not None)
        key = mask_key(request.seed, group_name=entry.name, direction=request.direction)
        inputs, _ = entry.columns(request.direction)
        return expand(key, first_row=request.first_row, rows=request.rows, width=inputs)

    def warm_up(self) -> Iterator[None]:
        """Prepare the first requests, one small step per `next`, so that they do not wait."""
        return self._operands.warm_up()

    def close(self) -> None:
        """Release the weights. The model cannot be used again."""
        self._operands.close()
