"""The encoding of a matrix in a payload. No other module computes payload sizes, packs or unpacks matrices."""

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from symbiosis_priv import native

_NARROW = 24
_BRIEF = 1 << 14  # items that take less time than reacquiring the GIL


@dataclass(frozen=True)
class Encoding:
    """How a payload stores a matrix: row-major, little-endian, a fixed number of bits per item, no padding.

    Args:
        dtype: dtype of the matrix in memory.
        item_bits: bits of one item in a payload: 32, or 24 for the low bits of int32.
    """

    dtype: torch.dtype
    item_bits: int

    @cached_property
    def items(self) -> type[np.generic]:
        """The numpy type that corresponds to `dtype`."""
        return np.int32 if self.dtype == torch.int32 else np.float32

    def size(self, rows: int, width: int) -> int:
        """Bytes of a matrix `[rows, width]` in a payload."""
        return -(-rows * width * self.item_bits // 8)

    def pack(self, matrix: Tensor | NDArray[Any]) -> memoryview:
        """The payload of a CPU matrix of `dtype`. With 32 bits it is not a copy if the matrix is contiguous and the
        machine little-endian.

        `pack` and `unpack` avoid torch where possible. Each torch operation releases the GIL, and reacquiring it takes
        longer than the rest while other threads wait for it.
        """
        if isinstance(matrix, Tensor):
            matrix = (matrix.detach() if matrix.requires_grad else matrix).numpy()
        array = np.ascontiguousarray(matrix)
        if not array.size:  # a memoryview with a zero in its shape cannot be cast
            return memoryview(b"")
        if self.item_bits == _NARROW:
            return _pack24(array)
        return (array if sys.byteorder == "little" else array.byteswap()).data.cast("B")

    def unpack(self, payload: bytearray | memoryview | np.ndarray, *, rows: int) -> Tensor:
        """The matrix `[rows, width]` of a writable payload. With 32 bits it is not a copy on little-endian machines.

        With 24 bits, items are the signed representatives, -2^23 to 2^23 - 1.
        """
        if self.item_bits == _NARROW:
            packed = np.frombuffer(payload, dtype=np.uint8)
            array = np.empty(len(packed) // 3, dtype=np.int32)
            _unpack24(packed, array)
        else:
            array = _ordered(np.frombuffer(payload, dtype=self.items))
        return torch.from_numpy(array.reshape(rows, -1 if rows else 0))

    def subtract(self, payload: memoryview, matrix: NDArray[np.int32]) -> None:
        """Subtract the integers of a payload from a contiguous int32 matrix, modulo 2^32 and in place.

        With 24 bits the payload holds signed representatives, as `unpack` returns them.
        """
        if self.item_bits == _NARROW:
            _subtract24(np.frombuffer(payload, dtype=np.uint8), matrix)
        else:
            matrix -= _ordered(np.frombuffer(payload, dtype=np.int32)).reshape(matrix.shape)

    def payload_space(self, matrix: NDArray[Any]) -> memoryview:
        """The part of a contiguous matrix's memory that receives its payload. Call `unpack_in_place` once it is
        full."""
        return matrix.data.cast("B")[-self.size(1, matrix.size) :] if matrix.size else memoryview(bytearray())

    def unpack_in_place(self, matrix: NDArray[Any]) -> None:
        """Turn the payload that fills `payload_space(matrix)` into the matrix, in place."""
        if self.item_bits == _NARROW:
            _unpack24(np.frombuffer(self.payload_space(matrix), dtype=np.uint8), matrix)
        elif sys.byteorder == "big":
            matrix.byteswap(inplace=True)


RING32 = Encoding(torch.int32, 32)
"""Integers modulo 2^32."""
RING24 = Encoding(torch.int32, _NARROW)
"""Integers modulo 2^24."""
FLOAT32 = Encoding(torch.float32, 32)


def _ordered(array: NDArray[Any]) -> NDArray[Any]:
    """Swap bytes on big-endian machines."""
    return array if sys.byteorder == "little" else array.byteswap()


def _pack24(items: NDArray[np.int32]) -> memoryview:
    """The low 24 bits of each item."""
    packed = np.empty(3 * items.size, dtype=np.uint8)
    if (library := native.library()) is None:
        packed.reshape(-1, 3)[:] = items.astype("<i4", copy=False).reshape(-1).view(np.uint8).reshape(-1, 4)[:, :3]
    else:
        library = native.brief_library() if items.size <= _BRIEF else library
        library.ring_pack24(native.best(library), items.ctypes.data, items.size, packed.ctypes.data)
    return packed.data


def _unpack24(packed: NDArray[np.uint8], items: NDArray[np.int32]) -> None:
    """Write the signed representatives. `packed` may be the end of the memory of `items`."""
    if (library := native.library()) is None:
        words = np.zeros((items.size, 4), dtype=np.uint8)
        words[:, 1:] = packed.reshape(-1, 3)
        items.reshape(-1)[:] = words.reshape(-1).view("<i4") >> 8
    elif items.size:
        library = native.brief_library() if items.size <= _BRIEF else library
        library.ring_unpack24(native.best(library), packed.ctypes.data, items.size, items.ctypes.data)


def _subtract24(packed: NDArray[np.uint8], items: NDArray[np.int32]) -> None:
    if (library := native.library()) is None:
        subtrahend = np.empty_like(items)
        _unpack24(packed, subtrahend)
        np.subtract(items, subtrahend, out=items)
    elif items.size:
        library = native.brief_library() if items.size <= _BRIEF else library
        library.ring_subtract24(native.best(library), packed.ctypes.data, items.size, items.ctypes.data)
