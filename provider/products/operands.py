"""Computes the ring products of a served model, with weights of this process or of a group of ranks (`shards`).

On a GPU, rows are copied in chunks, through page-locked memory: while one chunk is multiplied, the next one is copied
to the GPU and the previous result is copied back, each on its own stream. A single chunk cannot overlap with anything,
so it uses one stream: events between streams would take as long as a small product. Weights are never copied. On a CPU,
the same code runs in order and with ordinary memory, for the tests.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts, clip
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


class Transfers:
    """Computes products on one device. Not thread-safe.

    Args:
        chunk: number of rows of one copy.
    """

    def __init__(self, device: torch.device, *, chunk: int = 256) -> None:
        self._device = device
        self._chunk = chunk
        self._module: Any = torch.get_device_module(device)
        self._up, self._down = self._stream(), self._stream()

    def product(
        self, matrix: RingMatrix, rows: Tensor, direction: Direction, *, counts: Counts | None = None
    ) -> Tensor:
        """`RingMatrix.product` from host memory to host memory.

        Args:
            rows: int32 `[r, width]` on the CPU.
            counts: as for `RingMatrix.product`.

        Returns:
            int32 `[r, columns]` on the CPU, contiguous.
        """
        columns = matrix.columns(direction, by_expert=counts is not None)[1]
        host_rows, host_product = self._host(*rows.shape), self._host(len(rows), columns)
        if len(rows) <= self._chunk:
            host_rows.copy_(rows)
            sent = host_rows.to(self._device, non_blocking=True)
            host_product.copy_(matrix.product(sent, direction, counts=counts), non_blocking=True)
            self._module.synchronize(self._device)
            return host_product
        products = torch.empty(host_product.shape, dtype=torch.int32, device=self._device)
        compute = self._module.current_stream(self._device)
        in_use = []  # until all streams are done, because torch reuses memory as soon as it is freed
        for start in range(0, len(rows), self._chunk):
            chunk = slice(start, start + self._chunk)
            host_rows[chunk].copy_(rows[chunk])  # the CPU copies while the device works on earlier parts
            with self._module.stream(self._up):
                in_use.append(host_rows[chunk].to(self._device, non_blocking=True))
            compute.wait_stream(self._up)
            chunk_counts = None if counts is None else clip(counts, start, len(in_use[-1]))
            matrix.product(in_use[-1], direction, counts=chunk_counts, out=products[chunk])
            self._down.wait_stream(compute)
            with self._module.stream(self._down):
                host_product[chunk].copy_(products[chunk], non_blocking=True)
        self._module.synchronize(self._device)
        return host_product

    def _host(self, rows: int, columns: int) -> Tensor:
        """A matrix that the device can copy without the CPU. torch keeps such memory for reuse."""
        pinned = self._device.type == "cuda"
        return torch.empty((rows, columns), dtype=torch.int32, device="cpu", pin_memory=pinned)

    def _stream(self) -> Any:
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else self._module.Stream()
