"""Computes the ring products of a served model, with weights of this process or of a group of ranks (`shards`)."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from provider.products.transfers import Transfers
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.kernels import RingMatrix


class Operands(ABC):
    """The quantised weights of every served layer group. Computes one product at a time."""

    @property
    def any_thread(self) -> bool:
        """Returns True if several threads may compute products, one at a time; False if only one thread may."""
        return False

    @property
    @abstractmethod
    def loaded(self) -> Collection[int]:
        """The layer groups that are in memory."""

    @abstractmethod
    def product(self, rows: Tensor, *, group: int, direction: Direction, counts: Counts | None = None) -> Tensor:
        """`rows @ W.T` forward, `rows @ W` backward, mod 2^32.

        Args:
            rows: int32 `[r, inputs]` on the CPU.
            counts: number of rows of each expert. Each row is then multiplied by its own expert's matrix
                (`RingMatrix.product`). None multiplies all rows by the whole matrix.

        Returns:
            int32 `[r, outputs]`, contiguous, on the CPU.
        """

    @abstractmethod
    def warm_up(self) -> Iterator[None]:
        """Prepare the first requests, one small step per `next`, so that they do not wait."""

    @abstractmethod
    def close(self) -> None:
        """Release the weights. The operands cannot be used again."""


class LocalOperands(Operands):
    """Weights of this process. A layer group is loaded at its first product.

    Args:
        store: the base model, the layers that are served, and the device of products.
    """

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._matrices: dict[int, RingMatrix] = {}
        device = torch.device(store.device)
        self._transfers = None if device.type == "cpu" else Transfers(device)

    @property
    def any_thread(self) -> bool:
        return self._transfers is None  # CUDA streams belong to a thread

    @property
    def loaded(self) -> Collection[int]:
        return self._matrices.keys()

    def product(self, rows: Tensor, *, group: int, direction: Direction, counts: Counts | None = None) -> Tensor:
        matrix = self._matrix(group)
        if self._transfers:
            return self._transfers.product(matrix, rows, direction, counts=counts)
        return matrix.product(rows, direction, counts=counts)

    def warm_up(self) -> Iterator[None]:
        for group in self._store.served:
            self._matrix(group)
            yield

    def close(self) -> None:
        self._matrices.clear()

    def _matrix(self, group: int) -> RingMatrix:
        matrix = self._matrices.get(group)
        if matrix is None:
            matrix = self._matrices[group] = self._store.matrix(group)
        return matrix
