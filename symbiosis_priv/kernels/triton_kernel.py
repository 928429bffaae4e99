"""The kernel for GPUs: one product on the int8 tensor cores per step, and one packed layout for both directions.

The layout is that of `limbs`: one or two planes of int8 digits, 1 byte per weight up to 8 bits and 2 beyond. Backward
reads the same planes with the strides exchanged. The kernel needs Triton and a GPU with int8 products. With
TRITON_INTERPRET=1 it also runs on a CPU, slowly, for tests.
"""

import contextlib
import functools
import importlib.util
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.kernels.kernel import BALANCE, DigitKernel, Packed
from symbiosis_priv.limits import RingBits

MAX_TERMS = 1 << 16
"""Largest number of terms of one program, so that its accumulators stay in int32 (`triton_product`)."""

LEAST_MEMORY = 99 << 10
"""Bytes of shared memory that a program may use on every GPU with int8 tensor cores."""

# lowest compute capability: on older GPUs, an int8 product makes Triton's compiler abort the process
_LEAST_CAPABILITY = (8, 0)
_INTERPRETED_PROCESSORS = 4
_PROGRAMS_PER_PROCESSOR = 2  # number of programs up to which splitting sums pays
_LEAST_STEPS = 4  # fewest steps of a program, because adding its partial sum to the others takes time
_TIMED_ROWS = 256
_ALIGNED = 16  # bytes that a GPU copies to shared memory at once


@dataclass(frozen=True)
class Tile:
    """The part of a product that one Triton program computes: rows and columns of the result. The loads of `stages`
    steps are in flight at the same time."""

    rows: int
    columns: int
    warps: int
    stages: int

    depth = 128
    """Bytes of a limb's row, and of a column of digits, that one step multiplies: the terms of every digit."""

    @property
    def memory(self) -> int:
        return self.stages * self.depth * (4 * self.rows + self.columns)


# Candidates by the largest number of rows that they are for, probably the fastest first. `prepare` times them. None
# spills a register on compute capability 9.0. With few rows, nearly all time is spent on reading weights, so many small
# loads are in flight. With many rows, one large program per processor reads less, and two small ones hide each other's
# waits.
TILES = {
    16: (Tile(16, 64, warps=4, stages=5), Tile(16, 128, warps=4, stages=4)),
    32: (Tile(32, 64, warps=4, stages=4), Tile(32, 128, warps=8, stages=3)),
    1 << 62: (Tile(64, 128, warps=8, stages=4), Tile(32, 128, warps=8, stages=3)),
}


class Plan(NamedTuple):
    """The division of one product into programs of the GPU: `grid` tiles down, tiles across, and programs per tile,
    each of which adds `share` terms, a multiple of the terms of one step."""

    grid: tuple[int, int, int]
    share: int


def plan(tile: Tile, count: int, width: int, columns: int, *, terms: int, processors: int) -> Plan:
    """Divide a product `[count, width] @ [width, columns]`, of `terms` in a step, so that all processors have work."""
    down, across = _parts(count, tile.rows), _parts(columns, tile.columns)
    useful = min(processors * _PROGRAMS_PER_PROCESSOR // (down * across), width // (terms * _LEAST_STEPS))
    shares = max(1, useful, _parts(width, MAX_TERMS))
    share = _parts(_parts(width, shares), terms) * terms
    return Plan((down, across, _parts(width, share)), share)


class TritonKernel(DigitKernel):
    """Multiplies on a GPU's int8 tensor cores, with a Triton program."""

    name = "triton"

    def __init__(self) -> None:
        self._fastest: dict[tuple[object, ...], Tile] = {}

    def supports(self, device: torch.device) -> bool:
        if importlib.util.find_spec("triton") is None:
            return False
        if device.type == "cuda":
            return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
        return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"

    def is_candidate(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def prepare(self, packed: Packed) -> None:
        """Compile the kernel, and time the tiles for this matrix. The first time on a machine, compiling takes
        seconds."""
        if packed.data.device.type == "cuda":  # the interpreter compiles nothing
            from triton.testing import do_bench

            self.choose(packed, milliseconds=partial(do_bench, warmup=5, rep=20))

    def choose(self, packed: Packed, *, milliseconds: Callable[[Callable[[], None]], float]) -> None:
        """Choose the fastest tile for each class of row counts and each direction. Ranges of a matrix (`cut`) keep the
        first candidate."""
        device = packed.data.device
        for direction, most in itertools.product(DIRECTIONS, TILES):
            if _key(packed, direction, most) in self._fastest:  # another matrix of this shape
                continue
            width, columns = packed.columns(direction)
            rows = torch.zeros((min(most, _TIMED_ROWS), width), dtype=torch.int32, device=device)
            out = rows.new_empty((len(rows), columns))
            times = {
                tile: milliseconds(partial(_multiply, tile, packed, rows, direction, out))
                for tile in _candidates(most, device)
            }
            self._fastest[_key(packed, direction, most)] = min(times, key=times.__getitem__)

    def product(
        self, packed: Packed, rows: Tensor, direction: Direction, out: Tensor, *, ring_bits: RingBits = 32
    ) -> None:
        most = next(most for most in TILES if len(rows) <= most)
        tile = self._fastest.get(_key(packed, direction, most)) or _candidates(most, rows.device)[0]
        _multiply(tile, packed, rows, direction, out)


def _key(packed: Packed, direction: Direction, most: int) -> tuple[object, ...]:
    return packed.data.device, packed.data.shape, direction, most


def _candidates(most: int, device: torch.device) -> list[Tile]:
    """The tiles that a device has enough shared memory for."""
    if device.type != "cuda":
        return list(TILES[most])
    # missing in torch's type stubs
    memory: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LEAST_MEMORY)
    return [tile for tile in TILES[most] if tile.memory <= memory]


def _multiply(tile: Tile, packed: Packed, rows: Tensor, direction: Direction, out: Tensor) -> None:
    from symbiosis_priv.kernels import triton_product  # importing Triton takes a second

    device = packed.data.device
    (count, width), columns = rows.shape, out.shape[1]
    digits = packed.data.shape[2]
    terms = tile.depth // digits
    launch = plan(tile, count, width, columns, terms=terms, processors=_processors(device))
    if launch.grid[2] > 1:
        out.zero_()
    limbs = torch.empty((4, count, width + -width % _ALIGNED), dtype=torch.int8, device=device)
    parts = (rows + BALANCE).view(torch.int8).view(count, width, 4).permute(2, 0, 1)
    torch.bitwise_xor(parts, -0x80, out=limbs[..., :width])
    # Triton launches on the current device, wherever the tensors are
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        triton_product.tile[launch.grid](
            limbs,
            packed.data,
            out,
            count,
            width,
            columns,
            limbs.stride(1),
            packed.data.stride(2),
            packed.data.stride(1),
            launch.share,
            FORWARD=direction == FORWARD,
            DIGITS=digits,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            TERMS=terms,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _parts(total: int, size: int) -> int:
    return -(-total // size)
