"""Products on a GPU of rows in host memory. Copies to the GPU, products and copies back overlap.

Rows are copied in parts, through page-locked memory: while one part is multiplied, the next one is copied to the GPU
and the previous result is copied back, each on its own stream. A single part cannot overlap with anything, so it uses
one stream: events between streams would take as long as a small product. Weights are never copied. On a CPU, the same
code runs in order and with ordinary memory, for the tests.
"""

from typing import Any

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts, clip
from symbiosis_priv.kernels import RingMatrix


class Transfers:
    """Computes products on one device. Not thread-safe.

    Args:
        part: number of rows of one copy.
    """

    def __init__(self, device: torch.device, *, part: int = 256) -> None:
        self._device = device
        self._part = part
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
        if len(rows) <= self._part:
            host_rows.copy_(rows)
            sent = host_rows.to(self._device, non_blocking=True)
            host_product.copy_(matrix.product(sent, direction, counts=counts), non_blocking=True)
            self._module.synchronize(self._device)
            return host_product
        products = torch.empty(host_product.shape, dtype=torch.int32, device=self._device)
        compute = self._module.current_stream(self._device)
        in_use = []  # until all streams are done, because torch reuses memory as soon as it is freed
        for start in range(0, len(rows), self._part):
            part = slice(start, start + self._part)
            host_rows[part].copy_(rows[part])  # the CPU copies while the device works on earlier parts
            with self._module.stream(self._up):
                in_use.append(host_rows[part].to(self._device, non_blocking=True))
            compute.wait_stream(self._up)
            part_counts = None if counts is None else clip(counts, start, len(in_use[-1]))
            matrix.product(in_use[-1], direction, counts=part_counts, out=products[part])
            self._down.wait_stream(compute)
            with self._module.stream(self._down):
                host_product[part].copy_(products[part], non_blocking=True)
        self._module.synchronize(self._device)
        return host_product

    def _host(self, rows: int, columns: int) -> Tensor:
        """A matrix that the device can copy without the CPU. torch keeps such memory for reuse."""
        pinned = self._device.type == "cuda"
        return torch.empty((rows, columns), dtype=torch.int32, device="cpu", pin_memory=pinned)

    def _stream(self) -> Any:
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else self._module.Stream()
