"""The fused kernel for GPUs: row limbs exist in registers only, and one packed layout serves both directions.

The layout is that of `limbs`: one or two planes of int8 digits, 1 byte per weight up to 8 bits and 2 beyond. Backward
reads the same planes with the strides exchanged. The kernel needs Triton and a GPU with int8 products. With
TRITON_INTERPRET=1 it also runs on a CPU, slowly, for tests.
"""

import contextlib
import functools
import importlib.util
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.kernels.base import Packed
from symbiosis_priv.kernels.limbs import DigitKernel

MAX_TERMS = 1 << 16
"""Largest number of terms of one program, so that its accumulators stay in int32 (`triton_product`)."""

# lowest compute capability: on older GPUs, an int8 product makes Triton's compiler abort the process
_LEAST_CAPABILITY = (8, 0)
_INTERPRETED_PROCESSORS = 4
_PROGRAMS_PER_PROCESSOR = 2  # number of terms from which splitting sums pays
_LEAST_STEPS = 4  # fewest terms of a program, because adding its partial sum to the others takes time


@dataclass(frozen=True)
class Tile:
    """The part of a product that one Triton program computes.

    Args:
        rows: rows of the result.
        columns: columns of the result.
        terms: terms summed in one step.
        warps: warps of the program.
        stages: steps whose loads are in flight at the same time.
    """

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


# Tiles that spill no register on compute capability 8.0 and 9.0, by the largest number of rows that they are for. With
# few rows, nearly all time is spent on reading weights, so many small loads are in flight.
_FEW = Tile(rows=16, columns=64, terms=64, warps=4, stages=5)
_SOME = Tile(rows=32, columns=64, terms=64, warps=4, stages=4)
_MANY = Tile(rows=128, columns=64, terms=64, warps=8, stages=3)


@dataclass(frozen=True)
class Plan:
    """Programs of one product.

    Args:
        tile: the tile of each program.
        grid: tiles down, tiles across, programs per tile.
        share: terms of each program, a multiple of the tile's.
    """

    tile: Tile
    grid: tuple[int, int, int]
    share: int


def plan(count: int, width: int, columns: int, *, processors: int) -> Plan:
    """Divide a product `[count, width] @ [width, columns]` so that all processors have work."""
    tile = _FEW if count <= _FEW.rows else _SOME if count <= _SOME.rows else _MANY
    down, across = _parts(count, tile.rows), _parts(columns, tile.columns)
    useful = min(processors * _PROGRAMS_PER_PROCESSOR // (down * across), width // (tile.terms * _LEAST_STEPS))
    shares = max(1, useful, _parts(width, MAX_TERMS))
    share = _parts(_parts(width, shares), tile.terms) * tile.terms
    return Plan(tile, (down, across, _parts(width, share)), share)


class TritonKernel(DigitKernel):
    """int8 tensor cores, programmed with Triton."""

    name = "triton"

    def supports(self, device: torch.device) -> bool:
        if importlib.util.find_spec("triton") is None:
            return False
        if device.type == "cuda":
            return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
        return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"

    def is_candidate(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def prepare(self, packed: Packed) -> None:
        """Compile the kernel. This takes seconds, the first time on a machine."""
        device = packed.data.device
        if device.type != "cuda":  # the interpreter compiles nothing
            return
        for direction in DIRECTIONS:
            width, columns = packed.columns(direction)
            for tile in (_FEW, _SOME, _MANY):
                rows = torch.zeros((tile.rows, width), dtype=torch.int32, device=device)
                self.product(packed, rows, direction, rows.new_empty((tile.rows, columns)))

    def product(self, packed: Packed, rows: Tensor, direction: Direction, out: Tensor) -> None:
        from symbiosis_priv.kernels import triton_product  # importing Triton takes a second

        device = packed.data.device
        (count, width), columns = rows.shape, out.shape[1]
        digits, _, stride = packed.data.shape
        term_stride, column_stride = (1, stride) if direction == FORWARD else (stride, 1)
        launch = plan(count, width, columns, processors=_processors(device))
        if launch.grid[2] > 1:
            out.zero_()
        # Triton launches on the current device, wherever the tensors are
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            triton_product.tile[launch.grid](
                rows,
                packed.data,
                out,
                count,
                width,
                columns,
                packed.data.stride(0),
                term_stride,
                column_stride,
                launch.share,
                TWO_DIGITS=digits == 2,
                ROWS=launch.tile.rows,
                COLUMNS=launch.tile.columns,
                TERMS=launch.tile.terms,
                num_warps=launch.tile.warps,
                num_stages=launch.tile.stages,
            )


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _parts(total: int, size: int) -> int:
    return -(-total // size)
