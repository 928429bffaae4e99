"""`RingMatrix`: weights packed for one device, and the exact products of tenants and providers with them."""

from typing import Self

import numpy as np
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.errors import RangeError
from symbiosis_priv.kernels.base import Kernel, Packed
from symbiosis_priv.kernels.choice import Choice, choose
from symbiosis_priv.kernels.registry import KERNELS, kernel_of

_CPU_ROWS = 256  # bytes of one product on a CPU: limits a kernel's own buffers


class RingMatrix:
    """A weight matrix ready for exact products on one device. Holds one packed copy and no other.

    Args:
        weight: int16 `[o, d]`.
        weight_bits: bits of a weight.
        device: device of the products.
        kernel: "auto", or a name in `KERNELS`; a named kernel must pass the self-test too.

    Raises:
        ConfigError: no such kernel, or none that is exact here.
    """

    def __init__(
        self, weight: Tensor, *, weight_bits: int, device: torch.device | str = "cpu", kernel: str = "auto"
    ) -> None:
        device = torch.device(device)
        choice = choose(weight.shape, weight_bits=weight_bits, device=device, kernel=kernel)
        self._hold(kernel_of(choice.layout).pack(weight.cpu(), weight_bits=weight_bits), choice, device)

    @classmethod
    def of_packed(cls, packed: Packed, choice: Choice, *, device: torch.device | str = "cpu") -> Self:
        """A matrix of weights that are already packed in the choice's layout. Shares their memory if possible."""
        matrix = cls.__new__(cls)
        matrix._hold(packed, choice, torch.device(device))
        return matrix

    def _hold(self, packed: Packed, choice: Choice, device: torch.device) -> None:
        self.device = device
        self._choice = choice
        self._packed = packed.to(device)
        for name in set(choice.kernels.values()):
            KERNELS[name].prepare(self._packed)

    @property
    def nbytes(self) -> int:
        """Bytes that the packed weights take."""
        return self._packed.data.nbytes

    def columns(self, direction: Direction) -> tuple[int, int]:
        """The columns of a product's rows and of its result."""
        return self._packed.columns(direction)

    def product(self, rows: Tensor, direction: Direction = FORWARD, *, out: Tensor | None = None) -> Tensor:
        """`rows @ W.T` mod 2^32 forward, `rows @ W` backward.

        Args:
            rows: int32 `[r, d]` forward, `[r, o]` backward, on any device; r may be 0.
            out: tensor for the result: contiguous, of its shape and dtype, on this matrix's device.

        Returns:
            int32 `[r, o]` forward, `[r, d]` backward, contiguous, on this matrix's device.
        """
        width, columns = self._packed.columns(direction)
        if rows.dim() != 2 or rows.shape[1] != width or rows.dtype != torch.int32:
            raise RangeError(f"expected int32 rows of width {width}, got {rows.dtype} {list(rows.shape)}")
        count = rows.shape[0]
        if out is None:
            out = _fresh(count, columns, device=self.device)
        elif out.shape != (count, columns) or out.dtype != torch.int32 or not out.is_contiguous():
            raise RangeError(f"expected a contiguous int32 {[count, columns]} to write to, got {list(out.shape)}")
        if rows.device != self.device:
            rows = rows.to(self.device)
        rows = rows.contiguous()
        step = _CPU_ROWS if self.device.type == "cpu" else max(count, 1)
        if 0 < count <= step:
            self.chosen(count, direction).product(self._packed, rows, direction, out)
            return out
        for start in range(0, count, step):
            block = slice(start, start + step)
            self.chosen(count, direction).product(self._packed, rows[block], direction, out[block])
        return out

    def chosen(self, count: int, direction: Direction = FORWARD) -> Kernel:
        """The kernel that products of `count` rows use."""
        return self._choice.kernel(direction, count)


def _fresh(rows: int, columns: int, *, device: torch.device) -> Tensor:
    if device.type == "cpu":  # numpy keeps the GIL, which matters for one row
        return torch.from_numpy(np.empty((rows, columns), dtype=np.int32))
    return torch.empty((rows, columns), dtype=torch.int32, device=device)
