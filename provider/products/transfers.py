"""Products on a GPU of rows that are on the host: copies to it, products and copies back at the same time.

Rows go in parts through page-locked memory: while one part is multiplied, the next is on its way there and the one
before on its way back, each on a stream of its own. One part alone has nothing to overlap with and goes on one stream:
events between streams would take as long as a small product. Weights never move. On a CPU the same code runs in order
and with ordinary memory, for the tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.kernels import RingMatrix


class Transfers:
    """To one device and back. Not thread-safe.

    Args:
        device: where the matrices are.
        part: rows of one copy.
    """

    def __init__(self, device: torch.device, *, part: int = 256) -> None:
        self._device = device
        self._part = part
        self._module: Any = torch.get_device_module(device)
        self._up, self._down = self._stream(), self._stream()

    def product(self, matrix: RingMatrix, rows: Tensor, direction: Direction) -> Tensor:
        """`RingMatrix.product` from host to host.

        Args:
            matrix: on this device.
            rows: int32 `[r, width]` on the CPU.

        Returns:
            int32 `[r, columns]` on the CPU, contiguous.
        """
        columns = matrix.columns(direction)[1]
        there, back = self._host(*rows.shape), self._host(len(rows), columns)
        if len(rows) <= self._part:
            there.copy_(rows)
            back.copy_(matrix.product(there.to(self._device, non_blocking=True), direction), non_blocking=True)
            self._module.synchronize(self._device)
            return back
        products = torch.empty(back.shape, dtype=torch.int32, device=self._device)
        here = self._module.current_stream(self._device)
        in_use = []  # until all streams are done: memory that is freed sooner is given to the next who asks
        for start in range(0, len(rows), self._part):
            part = slice(start, start + self._part)
            there[part].copy_(rows[part])  # by the CPU, while the device is at work on the parts before
            with self._module.stream(self._up):
                in_use.append(there[part].to(self._device, non_blocking=True))
            here.wait_stream(self._up)
            matrix.product(in_use[-1], direction, out=products[part])
            self._down.wait_stream(here)
            with self._module.stream(self._down):
                back[part].copy_(products[part], non_blocking=True)
        self._module.synchronize(self._device)
        return back

    def _host(self, rows: int, columns: int) -> Tensor:
        """A matrix that the device can read and write by itself; torch keeps such memory for the next."""
        pinned = self._device.type == "cuda"
        return torch.empty((rows, columns), dtype=torch.int32, device="cpu", pin_memory=pinned)

    def _stream(self) -> Any:
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else self._module.Stream()
