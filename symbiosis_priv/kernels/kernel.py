"""The interface of a kernel, and the kernels of the compiled library and of torch: each packs weights, and computes
exact products modulo 2^32 with them in both directions.

native-*  the compiled library, one kernel per instruction set, on one layout (native/product.h has the theory, amx.h
          that of native-amx). The library has no threads: Python slices the result's columns and hands the slices to
          `for_each_slice`.
plain     torch, with unchanged weights, int16 or int8 `[o, d]`, converted one block at a time. Few rows on a CPU take
          int32, which wraps modulo 2^32. Others take float64, exact while every partial sum is at most 2^53; longer
          sums are split.
"""

import contextlib
import functools
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.passes import large_tensor
from symbiosis_priv.arithmetic.ring import BACKWARD, Direction, Widths
from symbiosis_priv.limits import RingBits
from symbiosis_priv.native import Isa, for_each_slice, slices_of


@dataclass(frozen=True)
class Packed:
    """A weight matrix `[outputs, inputs]` in the layout of some kernels: a contiguous tensor, so that it can be mapped
    from disk and shared."""

    layout: str
    outputs: int
    inputs: int
    weight_bits: int
    data: Tensor

    def columns(self, direction: Direction) -> Widths:
        """The columns of a product's rows and of its result."""
        return Widths.of(self.inputs, self.outputs, direction)

    def to(self, device: torch.device) -> Self:
        return replace(self, data=self.data.to(device))


PayloadProduct = Callable[[int, int], None]
"""Computes a product from the payload of a request to that of its answer (`wire.Encoding`), given both addresses."""


class Kernel(ABC):
    """Multiplies with packed weights. Kernels of the same layout share packed weights."""

    name: str
    layout: ClassVar[str]
    granule: ClassVar[int]
    """`cut` divides packed weights at multiples of this number of outputs, and shards begin there: the outputs in one
    element of the packed data's first dimension."""

    @abstractmethod
    def supports(self, device: torch.device) -> bool:
        """Returns True if products run on this device."""

    def is_candidate(self, device: torch.device) -> bool:
        """Returns True if this kernel may be the fastest on a device that it supports."""
        return True

    def admit(self, passes: Callable[["Kernel"], bool], device: torch.device, weight_bits: int) -> bool:
        """Test this kernel on a device, for weights of these bits. Returns True if it can be used."""
        return passes(self)

    @abstractmethod
    def form(self, outputs: int, inputs: int, *, weight_bits: int) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of the packed tensor."""

    @abstractmethod
    def pack(self, weight: Tensor, *, weight_bits: int) -> Packed:
        """Pack int16 `[o, d]`, `|weight| < 2^(weight_bits - 1)`, on the CPU. The result shares no memory with
        `weight`."""

    def cut(self, packed: Packed, start: int, stop: int) -> Packed:
        """The packed weights of the outputs `start` to `stop - 1`. Both limits are multiples of `granule`. The result
        shares memory with `packed`."""
        data = packed.data[start // self.granule : stop // self.granule]
        return replace(packed, outputs=stop - start, data=data)

    def prepare(self, packed: Packed, results: Path | None = None) -> None:  # noqa: B027
        """Do what the first products with these weights would wait for. `results`: a file for what was measured."""

    @abstractmethod
    def product(
        self, packed: Packed, rows: Tensor, direction: Direction, out: Tensor, *, ring_bits: RingBits = 32
    ) -> None:
        """`rows @ weight.T` forward, `rows @ weight` backward, mod 2^ring_bits: the bits above are arbitrary.

        Args:
            packed: weights in this kernel's layout.
            rows: int32 `[r, d]` forward, `[r, o]` backward, r >= 1, contiguous, on the packed weights' device.
            out: int32 `[r, o]` or `[r, d]`, contiguous, overwritten.
        """

    def few(self, packed: Packed, direction: Direction, count: int, ring_bits: RingBits) -> PayloadProduct | None:
        """Return the product of `count` rows as one compiled call; None if the kernel has none, or if several threads
        should share this product."""
        return None


_PANEL, _SQUARE = 64, 64 * 64  # as in common.h and packed.h
_PACKED_AT_ONCE = 8 * _PANEL  # outputs
_TILE_ROWS = 16  # as in tiles.h
# bytes of weights; with up to _SLICE_ROWS rows they take as long as waking another thread (docs/adr/9-lane.md)
_SLICE_BYTES = 1 << 21
_SLICE_ROWS = 8
_BRIEF_ENTRIES = 1 << 17  # of rows that are split into limbs without releasing the GIL
_unused_limbs: deque[Tensor] = deque()  # one buffer per product that ran concurrently


def _padded(width: int) -> int:
    return -(-width // _PANEL) * _PANEL


def _stored_bits(packed: Packed) -> int:
    """The bits of a weight in panels."""
    return packed.data.shape[2] * 8 // _SQUARE


def _scratch(entries: int) -> Tensor:
    """Memory for at least this many int32, to be appended to `_unused_limbs`: new pages would cost small products more
    than the arithmetic."""
    with contextlib.suppress(IndexError):
        if (limbs := _unused_limbs.pop()).numel() >= entries:
            return limbs
    return torch.empty(entries, dtype=torch.int32, device="cpu")


class CompiledKernel(Kernel):
    """A kernel for one instruction set: `tdpbusd`, `vpdpwssd`, `pmaddwd` or plain C."""

    layout = "panels"
    granule = _PANEL

    def __init__(self, isa: Isa) -> None:
        self.isa = isa
        self.name = f"native-{isa.name.lower()}"

    def supports(self, device: torch.device) -> bool:
        return device.type == "cpu" and self.isa in native.isas()

    def is_candidate(self, device: torch.device) -> bool:
        # for few rows, AMX is not the fastest
        best = [isa for isa in native.isas() if isa is not Isa.AMX][-1]
        return self.isa in (best, Isa.AMX) and native.vectorised()

    def form(self, outputs: int, inputs: int, *, weight_bits: int) -> tuple[torch.dtype, tuple[int, ...]]:
        stored = next(bits for bits in (8, 10, 16) if weight_bits <= bits)
        return torch.int8, (_padded(outputs) // _PANEL, _padded(inputs) // _PANEL, _SQUARE * stored // 8)

    def pack(self, weight: Tensor, *, weight_bits: int) -> Packed:
        lib = native.library()
        assert lib is not None  # `supports` has returned True
        outputs, inputs = weight.shape
        dtype, shape = self.form(outputs, inputs, weight_bits=weight_bits)
        packed = Packed(self.layout, outputs, inputs, weight_bits, large_tensor(shape, dtype=dtype))
        for start in range(0, outputs, _PACKED_AT_ONCE):  # a transposed weight is not copied as a whole
            rows = weight[start : start + _PACKED_AT_ONCE].contiguous()
            panels = packed.data[start // _PANEL :].data_ptr()
            lib.ring_pack(rows.data_ptr(), len(rows), inputs, _stored_bits(packed), panels)
        return packed

    def product(
        self, packed: Packed, rows: Tensor, direction: Direction, out: Tensor, *, ring_bits: RingBits = 32
    ) -> None:
        lib = native.library()
        assert lib is not None
        count, width = rows.shape
        padded = _padded(width)
        limbs = _scratch(padded * (count + -count % _TILE_ROWS if self.isa is Isa.AMX else count))
        splitting = native.brief_library() if rows.numel() <= _BRIEF_ENTRIES else lib
        data, bits = packed.data.data_ptr(), _stored_bits(packed)
        splitting.ring_split(self.isa, ring_bits, bits, rows.data_ptr(), count, width, limbs.data_ptr())
        arguments = (self.isa, ring_bits, direction == BACKWARD, data, bits, packed.outputs, packed.inputs)
        operands = (limbs.data_ptr(), count, out.data_ptr())

        def columns(begin: int, end: int) -> None:
            lib.ring_product(*arguments, *operands, begin, end)

        for_each_slice(columns, **self._slices(packed, count, width, out.shape[1]))
        _unused_limbs.append(limbs)

    def few(self, packed: Packed, direction: Direction, count: int, ring_bits: RingBits) -> PayloadProduct | None:
        lib = native.library()
        assert lib is not None
        slices = slices_of(**self._slices(packed, count, *packed.columns(direction)))
        if sys.byteorder == "big" or self.isa is Isa.AMX or slices > 1:
            return None
        (width, columns), ring = packed.columns(direction), (self.isa, ring_bits, direction == BACKWARD)
        shape, data = (_stored_bits(packed), packed.outputs, packed.inputs, count), packed.data
        ring_answer = functools.partial(lib.ring_answer, *ring, data.data_ptr(), *shape)
        entries = count * (_padded(width) + width + columns)

        def multiply(payload: int, answer: int, _: Tensor = data) -> None:  # keeps the weights in memory
            space = _scratch(entries)
            ring_answer(space.data_ptr(), payload, answer)
            _unused_limbs.append(space)

        return multiply

    def _slices(self, packed: Packed, count: int, width: int, columns: int) -> dict[str, int]:
        """The arguments of `for_each_slice` for a product's panels."""
        panel_bytes = _padded(width) // _PANEL * packed.data.shape[2] * max(1, count // _SLICE_ROWS)
        return {"total": _padded(columns) // _PANEL, "least": -(-_SLICE_BYTES // panel_bytes)}


_CPU_WEIGHTS, _GPU_WEIGHTS = 1 << 19, 1 << 24  # weights that are converted at a time
_INT32_ROWS = 8


class PlainKernel(Kernel):
    name = layout = "plain"
    granule = 1

    def supports(self, device: torch.device) -> bool:
        return True

    def is_candidate(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def form(self, outputs: int, inputs: int, *, weight_bits: int) -> tuple[torch.dtype, tuple[int, ...]]:
        return torch.int8 if weight_bits <= 8 else torch.int16, (outputs, inputs)

    def pack(self, weight: Tensor, *, weight_bits: int) -> Packed:
        outputs, inputs = weight.shape
        dtype, _ = self.form(outputs, inputs, weight_bits=weight_bits)
        data = weight.to(dtype, copy=True, memory_format=torch.contiguous_format)
        return Packed(self.layout, outputs, inputs, weight_bits, data)

    def product(
        self, packed: Packed, rows: Tensor, direction: Direction, out: Tensor, *, ring_bits: RingBits = 32
    ) -> None:
        on_cpu = packed.data.device.type == "cpu"
        dtype = torch.int32 if on_cpu and len(rows) <= _INT32_ROWS else torch.float64
        rows = rows.to(dtype)
        out.zero_()
        step = max(1, (_CPU_WEIGHTS if on_cpu else _GPU_WEIGHTS) // packed.inputs)
        terms = 1 << (23 - packed.weight_bits)  # |row| <= 2^31 and |weight| < 2^(b-1): their sum is at most 2^53
        for start in range(0, packed.outputs, step):
            outputs = slice(start, min(start + step, packed.outputs))
            weights = packed.data[outputs].to(dtype)
            left, matrix, part = rows, weights.t(), out[:, outputs]
            if direction == BACKWARD:
                left, matrix, part = rows[:, outputs], weights, out
            for first in range(0, left.shape[1], terms):
                summed = slice(first, first + terms)
                part.add_((left[:, summed] @ matrix[summed]).to(torch.int64).to(torch.int32))
