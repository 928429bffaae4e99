"""The served base model: the products that tenants may ask for."""

from collections.abc import Iterator

import torch
from torch import Tensor

from provider.config.schema import ProviderConfig
from provider.products.floats import FloatGroups
from provider.products.operands import LocalOperands, Operands
from symbiosis_priv.arithmetic.keystream import expand, mask_key
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError, DeviceLostError
from symbiosis_priv.network.wire import Arithmetic, Effect


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
