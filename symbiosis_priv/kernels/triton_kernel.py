"""The kernels for GPUs: exact products on matrix units, and one packed layout for both directions.

triton-int8   multiplies 8-bit limbs of rows with int8 digits of weights
triton-fp16   multiplies the same limbs with whole weights, both in float16, for chips whose int8 products are slow

`triton_product` has the programs and says why they are exact. A weight takes 1 byte up to 8 bits, 1.25 bytes up to 10,
and 1.5 bytes up to 12, if the number of inputs is a multiple of 128. Backward reads the same weights with exchanged
strides. Packed weights have one line per output, so they can be cut and sharded at every output. The kernels need
Triton and a GPU with matrix units. With TRITON_INTERPRET=1 they also run on a CPU, slowly, for tests.
"""

import contextlib
import importlib.util
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from symbiosis_priv.arithmetic.passes import large_tensor
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.kernels import chip as chips
from symbiosis_priv.kernels.chip import Chip
from symbiosis_priv.kernels.kernel import Kernel, Packed
from symbiosis_priv.limits import RingBits
from symbiosis_priv.system.files import UNDECODABLE, read_limited, write_atomically

MAX_TERMS = 1 << 16
"""Largest number of terms of one program, so that its accumulators stay in int32 (`triton_product`)."""

_INTERPRETED_PROCESSORS = 4
_PROGRAMS_PER_PROCESSOR = 2  # number of programs up to which splitting sums pays
_LEAST_STEPS = 4  # fewest steps of a program, because adding its partial sum to the others takes time
_PADDING = 128  # inputs; the largest number of terms and of columns of a tile
_SPLIT = 1024  # entries of a row that one program divides into limbs
_PACKED_AT_ONCE = 512  # outputs
_MAX_TIMES = 16 << 20  # limit of the file of results, in bytes
_MANY = 256  # rows of the timing for more than 64
_MOST_THREADS = 256  # with more, a tile has no registers for its sums


@dataclass(frozen=True)
class Tile:
    """The part of a product that one Triton program computes: rows and columns of the result. A step multiplies `terms`
    of a row. The loads of `stages` steps are in flight at the same time."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int

    def memory(self, *, entry: int, high: int, spare: bool) -> int:
        """Bytes of shared memory, at most. `entry`: bytes of a limb; `high`: bits of a weight beside its low byte;
        `spare`: there is a buffer more than steps whose loads are in flight beside the current one."""
        operands = 4 * self.rows * entry + self.columns * (8 + high) // 8
        unpacked = entry * self.columns if high or entry > 1 else 0
        barriers = 1 << 10
        return self.terms * ((self.stages - 1 + spare) * operands + unpacked) + barriers


def plan(tile: Tile, count: int, width: int, columns: int, *, processors: int) -> tuple[tuple[int, int, int], int]:
    """Divide a product `[count, width] @ [width, columns]` so that all processors have work. Returns the grid of its
    programs (tiles down, tiles across, and programs per tile), and the steps that each of them adds."""
    down, across, steps = _parts(count, tile.rows), _parts(columns, tile.columns), _parts(width, tile.terms)
    useful = min(processors * _PROGRAMS_PER_PROCESSOR // (down * across), steps // _LEAST_STEPS)
    share = _parts(steps, max(1, useful, _parts(width, MAX_TERMS)))
    return (down, across, _parts(steps, share)), share


_FEW, _SQUARE = Tile(16, 64, 64, warps=4, stages=4), Tile(64, 64, 64, warps=4, stages=3)
_WIDE = Tile(64, 128, 64, warps=8, stages=3)
# Candidates by the largest number of rows that they are for, probably the fastest first. With 10 bits they spill a few
# bytes at most on NVIDIA's chips and MI300; on RDNA, those of 64 rows spill hundreds of registers.
TILES: dict[bool, dict[int, tuple[Tile, ...]]] = {
    False: {
        16: (Tile(16, 64, 128, warps=4, stages=4), _FEW),
        64: (_SQUARE, Tile(32, 128, 64, warps=8, stages=3)),
        1 << 62: (Tile(128, 64, 64, warps=8, stages=3), _SQUARE),
    },
    True: {
        16: (_FEW, _SQUARE),
        64: (_SQUARE, _WIDE),
        1 << 62: (_WIDE, _SQUARE),
    },
}


class TritonKernel(Kernel):
    """Multiplies on a GPU's matrix units with a Triton program: those for float16, or those for int8."""

    layout = "digits"
    granule = 1

    def __init__(self, *, floats: bool) -> None:
        self.name = "triton-fp16" if floats else "triton-int8"
        self.floats, self.tiles = floats, TILES[floats]
        self._fastest: dict[str, Tile] = {}
        self._left_out = set[tuple[Chip | None, int, Tile]]()

    def supports(self, device: torch.device) -> bool:
        if importlib.util.find_spec("triton") is None:
            return False
        chip = chips.chip_of(device)
        return chip.multiplies_integers if chip else device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"

    def is_candidate(self, device: torch.device) -> bool:
        chip = chips.chip_of(device)
        return chip is not None and chip.prefers_floats == self.floats

    def admit(self, passes: Callable[[Kernel], bool], device: torch.device, weight_bits: int) -> bool:
        """Test every tile. Returns True if one of each class can be used."""
        chip = chips.chip_of(device)
        for tile in dict.fromkeys(itertools.chain(*self.tiles.values())):
            alone = TritonKernel(floats=self.floats)
            alone.name, alone.tiles = f"{self.name} ({tile})", {1 << 62: (tile,)}
            if alone.candidates(chip, 1, weight_bits=weight_bits) and not passes(alone):
                self._left_out.add((chip, weight_bits, tile))
        return all(self.candidates(chip, most, weight_bits=weight_bits) for most in self.tiles)

    def form(self, outputs: int, inputs: int, *, weight_bits: int) -> tuple[torch.dtype, tuple[int, ...]]:
        padded = inputs + -inputs % _PADDING
        return torch.int8, (outputs, padded + padded * _high_bits(weight_bits) // 8)

    def pack(self, weight: Tensor, *, weight_bits: int) -> Packed:
        outputs, inputs = weight.shape
        dtype, shape = self.form(outputs, inputs, weight_bits=weight_bits)
        data, high = large_tensor(shape, dtype=dtype), _high_bits(weight_bits)
        for lines, part in zip(data.split(_PACKED_AT_ONCE), weight.split(_PACKED_AT_ONCE), strict=True):
            padded = pad(part, (0, -inputs % _PADDING))
            if not high:
                lines.copy_(padded)
                continue
            low, digits = lines.tensor_split([padded.shape[1]], dim=1)
            positive = padded + (0x80 << high)  # a low byte and a high digit
            low.copy_((positive & 0xFF) - 0x80)
            shifts = high * torch.arange(8 // high, dtype=torch.int16, device="cpu")[:, None]
            digits.copy_(((positive >> 8).unflatten(1, (-1, 8 // high, 16)) << shifts).sum(2).flatten(1))
        return Packed(self.layout, outputs, inputs, weight_bits, data)

    def prepare(self, packed: Packed, results: Path | None = None) -> None:
        """Time the tiles for this shape unless it is known."""
        device = packed.data.device
        if device.type != "cuda":  # the interpreter's times say nothing
            return
        from triton.testing import do_bench

        with torch.cuda.device(device):
            self.choose(packed, results, milliseconds=partial(do_bench, warmup=5, rep=20))

    def choose(
        self, packed: Packed, results: Path | None, *, milliseconds: Callable[[Callable[[], None]], float]
    ) -> None:
        """Choose the fastest tile for each class of row counts and each direction of this shape. Ranges of a matrix
        (`cut`) keep the first candidate."""
        chip, known, found = chips.chip_of(packed.data.device), _read(results), dict[str, Tile]()
        for direction, most in itertools.product(DIRECTIONS, self.tiles):
            key = self._key(packed, direction, most)
            candidates = self.candidates(chip, most, weight_bits=packed.weight_bits)
            if known.get(key) in candidates:
                self._fastest[key] = known[key]
            if key not in self._fastest:
                try:
                    rows, out = (
                        torch.zeros((min(most, _MANY), width), dtype=torch.int32, device=packed.data.device)
                        for width in packed.columns(direction)
                    )
                    times = {
                        t: milliseconds(partial(self._multiply, t, packed, rows, out, direction)) for t in candidates
                    }
                except torch.OutOfMemoryError:  # of a card full of weights: timing takes memory too
                    continue
                found[key] = self._fastest[key] = min(times, key=times.__getitem__)
        if found and results is not None:
            with contextlib.suppress(OSError):  # without a cache, they are timed at every start
                write_atomically(results, msgspec.json.encode(_read(results) | found))

    def tile(self, packed: Packed, direction: Direction, count: int) -> Tile:
        """The tile for products of `count` rows."""
        found = self._fastest.get(self._key(packed, direction, self._most(count)))
        return found or self.candidates(chips.chip_of(packed.data.device), count, weight_bits=packed.weight_bits)[0]

    def candidates(self, chip: Chip | None, count: int, *, weight_bits: int) -> list[Tile]:
        """The tiles for products of `count` rows that fit on a chip, without those that failed there."""
        tiles = [t for t in self.tiles[self._most(count)] if (chip, weight_bits, t) not in self._left_out]
        if chip is None:
            return tiles
        memory = partial(Tile.memory, entry=1 + self.floats, high=_high_bits(weight_bits), spare=chip.asynchronous)
        return [tile for tile in tiles if memory(tile) <= chip.shared and tile.warps * chip.lanes <= _MOST_THREADS]

    def _most(self, count: int) -> int:
        return next(most for most in self.tiles if count <= most)

    def _key(self, packed: Packed, direction: Direction, most: int) -> str:
        chip = chips.chip_of(packed.data.device)
        machine = f"{chip.name if chip else packed.data.device}, torch {torch.__version__}"
        shape = f"{self.name} {packed.outputs}x{packed.inputs} of {packed.weight_bits} bits, {direction}"
        return f"{machine}: {shape}, up to {most} rows"

    def product(
        self, packed: Packed, rows: Tensor, direction: Direction, out: Tensor, *, ring_bits: RingBits = 32
    ) -> None:
        self._multiply(self.tile(packed, direction, len(rows)), packed, rows, out, direction, ring_bits)

    def _multiply(
        self, tile: Tile, packed: Packed, rows: Tensor, out: Tensor, direction: Direction, ring_bits: RingBits = 32
    ) -> None:
        from symbiosis_priv.kernels import triton_product  # importing Triton takes a second

        device, chip = rows.device, chips.chip_of(rows.device)
        (count, width), columns = rows.shape, out.shape[1]
        processors = chip.processors if chip else _INTERPRETED_PROCESSORS
        grid, share = plan(tile, count, width, columns, processors=processors)
        if grid[2] > 1:
            out.zero_()
        padded, held, high = width + -width % _PADDING, ring_bits // 8, _high_bits(packed.weight_bits)
        blocks = _parts(padded, _SPLIT)
        limbs = torch.empty((count, held, padded), dtype=torch.float16 if self.floats else torch.int8, device=device)
        sums = torch.empty((count, blocks), dtype=torch.int32, device=device)
        # Triton launches on the current device, wherever the tensors are
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            lines = 1 if count <= _FEW.rows else 8
            triton_product.split[(_parts(count, lines), blocks)](
                *(rows, limbs, sums, count, width, padded),
                LIMBS=held,
                OFFSET=0x80 - (0x80 << high) if high else 0,  # of a weight's digits
                LINES=lines,
                BLOCK=_SPLIT,
            )
            triton_product.tile[grid](
                *(limbs, sums, packed.data, out, count, width, columns, padded),
                *(packed.inputs + -packed.inputs % _PADDING, packed.data.stride(0), share, blocks),
                FORWARD=direction == FORWARD,
                HIGH=high,
                CHUNK=chunk(packed.weight_bits) if self.floats else 0,
                LIMBS=held,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                TERMS=tile.terms,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )


def chunk(weight_bits: int) -> int:
    """The terms whose float32 sum is exact: times 2^7 for a limb and 2^(b - 1) for a weight, they are at most 2^24. No
    program adds fewer if a product has so many, so the self-test meets the largest sum."""
    return 1 << min(8, 18 - weight_bits)


def _high_bits(weight_bits: int) -> int:
    """The bits of a weight that are stored beside its low byte."""
    return 0 if weight_bits <= 8 else 2 if weight_bits <= 10 else 4


def _read(results: Path | None) -> dict[str, Tile]:
    try:
        return msgspec.json.decode(read_limited(results, _MAX_TIMES), type=dict[str, Tile]) if results else {}
    except (OSError, *UNDECODABLE):  # missing or damaged: they are timed again
        return {}


def _parts(total: int, size: int) -> int:
    return -(-total // size)
