"""The encoding of a matrix in a payload. No other module computes payload sizes, packs or unpacks matrices."""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Encoding:
    """Row-major, little-endian, a fixed number of bits per item, without padding between rows.

    Args:
        dtype: dtype of the matrix in memory.
        item_bits: bits of one item in a payload.
    """

    dtype: torch.dtype
    item_bits: int

    def size(self, rows: int, width: int) -> int:
        """Bytes of a matrix `[rows, width]`."""
        return -(-rows * width * self.item_bits // 8)

    def pack(self, matrix: Tensor) -> memoryview:
        """The payload of a CPU matrix of `dtype`. Not a copy if the matrix is contiguous and the machine little-endian.

        `pack` and `unpack` avoid torch where possible. Each torch operation releases the GIL, and reacquiring it takes
        longer than the rest while other threads wait for it.
        """
        array = (matrix.detach() if matrix.requires_grad else matrix).numpy()
        if not array.size:  # a memoryview with a zero in its shape cannot be cast
            return memoryview(b"")
        return _ordered(np.ascontiguousarray(array)).data.cast("B")

    def unpack(self, payload: bytearray | memoryview | np.ndarray, *, rows: int) -> Tensor:
        """The matrix `[rows, width]` over a writable payload. Not a copy on little-endian machines."""
        array = _ordered(np.frombuffer(payload, dtype=np.int32 if self.dtype == torch.int32 else np.float32))
        return torch.from_numpy(array.reshape(rows, -1 if rows else 0))


RING32 = Encoding(torch.int32, 32)
"""Integers modulo 2^32."""
FLOAT32 = Encoding(torch.float32, 32)


def _ordered(array: NDArray[Any]) -> NDArray[Any]:
    """Swap bytes on big-endian machines."""
    return array if sys.byteorder == "little" else array.byteswap()
