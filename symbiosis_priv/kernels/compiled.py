"""Kernels of the compiled library, one per instruction set, on one layout (native/product.h has the theory).

The library has no threads: Python slices the result's columns and hands the slices to `for_each_slice`.
"""

from collections import deque

import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.passes import large_tensor
from symbiosis_priv.arithmetic.ring import BACKWARD, Direction
from symbiosis_priv.kernels.kernel import Kernel, Packed
from symbiosis_priv.native import Isa, for_each_slice

_PANEL = 64  # PANEL in product.h
# bytes of weights; with up to _SLICE_ROWS rows they take 30 µs, about the time to wake another thread
_SLICE_BYTES = 1 << 21
_SLICE_ROWS = 8
_BRIEF_ENTRIES = 1 << 17  # rows that are split into limbs in 13 µs
_unused_limbs: deque[Tensor] = deque()  # one buffer per product that ran concurrently


def _padded(width: int) -> int:
    return -(-width // _PANEL) * _PANEL


class CompiledKernel(Kernel):
    """A kernel for one instruction set: `pmaddwd`, `vpdpwssd` or plain C."""

    layout = "panels"
    shard_granule = granule = _PANEL

    def __init__(self, isa: Isa) -> None:
        self.isa = isa
        self.name = f"native-{isa.name.lower()}"

    def supports(self, device: torch.device) -> bool:
        return device.type == "cpu" and self.isa in native.isas()

    def is_candidate(self, device: torch.device) -> bool:
        return self.isa is native.isas()[-1] and native.vectorised()

    def form(self, outputs: int, inputs: int, *, weight_bits: int) -> tuple[torch.dtype, tuple[int, ...]]:
        shape = (_padded(outputs) // _PANEL, _padded(inputs) // 2, _PANEL, 2)
        return torch.int8 if weight_bits <= 8 else torch.int16, shape

    def pack(self, weight: Tensor, *, weight_bits: int) -> Packed:
        lib = native.library()
        assert lib is not None  # `supports` has returned True
        weight = weight.contiguous()
        outputs, inputs = weight.shape
        dtype, shape = self.form(outputs, inputs, weight_bits=weight_bits)
        data = large_tensor(shape, dtype=dtype)
        lib.ring_pack(weight.data_ptr(), outputs, inputs, dtype.itemsize, data.data_ptr())
        return Packed(self.layout, outputs, inputs, weight_bits, data)

    def product(self, packed: Packed, rows: Tensor, direction: Direction, out: Tensor) -> None:
        lib = native.library()
        assert lib is not None
        count, width = rows.shape
        padded = _padded(width)
        limbs = _limbs(count * padded)
        splitting = native.brief_library() if rows.numel() <= _BRIEF_ENTRIES else lib
        splitting.ring_split(rows.data_ptr(), count, width, limbs.data_ptr())
        data, weight_bytes = packed.data.data_ptr(), packed.data.element_size()
        arguments = (self.isa, direction == BACKWARD, data, weight_bytes, packed.outputs, packed.inputs)
        operands = (limbs.data_ptr(), count, out.data_ptr())

        def columns(begin: int, end: int) -> None:
            lib.ring_product(*arguments, *operands, begin, end)

        panels = _padded(out.shape[1]) // _PANEL
        panel_bytes = _PANEL * padded * weight_bytes * max(1, count // _SLICE_ROWS)
        for_each_slice(columns, total=panels, least=-(-_SLICE_BYTES // panel_bytes))
        _unused_limbs.append(limbs)


def _limbs(size: int) -> Tensor:
    """A reused buffer for the rows' limbs. New pages would cost small products more than the arithmetic."""
    try:
        buffer = _unused_limbs.pop()
    except IndexError:
        buffer = None
    if buffer is None or buffer.shape[0] < size:
        buffer = torch.empty(size, dtype=torch.int32, device="cpu")
    return buffer
