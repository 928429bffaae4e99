"""What each GPU gets, by its data sheet: `python -m tests.gpu.chips` prints a table.

A product of 4,096 x 28,672 weights (gate and up of an 8 B model), forward, is compared with bfloat16 of the same chip.
Its time is the longer one of reading the operands and of multiplying, at a part of each peak that is assumed.
"""

from dataclasses import dataclass
from typing import Final

from symbiosis_priv.kernels import KERNELS
from symbiosis_priv.kernels.chip import Chip
from symbiosis_priv.kernels.triton_kernel import TritonKernel

INPUTS, OUTPUTS, ROWS = 4096, 28672, (1, 16, 256, 4096)
_MEMORY, _LIBRARY, _TUNED, _TRITON = 0.85, 0.72, 0.70, 0.60  # parts of a peak that are reached; assumed
_FLUSH = 1.15  # emptying float32 accumulators takes this much longer; assumed


@dataclass(frozen=True)
class Sheet:
    """A chip, and its data sheet in 10^12 per second: bytes of memory, and dense operations. `int8` is what Triton's
    instructions reach: B200's fast ones, 4500, cannot be used (`Chip.prefers_floats`)."""

    chip: Chip
    memory: float
    bfloat16: float
    int8: float


_GIB: Final = 1 << 30
_HOPPER, _CONSUMER = 227 << 10, 99 << 10
SHEETS: Final = {
    "A100 80 GB": Sheet(Chip("A100", "sm_80", 108, 80 * _GIB, 163 << 10), 2.04, 312, 624),
    "H100 SXM": Sheet(Chip("H100", "sm_90", 132, 80 * _GIB, _HOPPER), 3.35, 989, 1979),
    "H200": Sheet(Chip("H200", "sm_90", 132, 141 * _GIB, _HOPPER), 4.8, 989, 1979),
    "B200": Sheet(Chip("B200", "sm_100", 148, 180 * _GIB, _HOPPER), 8.0, 2250, 1000),
    "B300": Sheet(Chip("B300", "sm_103", 148, 270 * _GIB, _HOPPER), 8.0, 2250, 165),
    "RTX 4090": Sheet(Chip("RTX 4090", "sm_89", 128, 24 * _GIB, _CONSUMER), 1.008, 165, 660),
    "RTX 5090": Sheet(Chip("RTX 5090", "sm_120", 170, 32 * _GIB, _CONSUMER), 1.79, 209, 838),
    "MI300X": Sheet(Chip("MI300X", "gfx942", 304, 192 * _GIB, 64 << 10, lanes=64), 5.3, 1307, 2615),
}


@dataclass(frozen=True)
class Scheme:
    """A way to multiply exactly: products and bytes per weight, operations per second, and the rows of its tiles."""

    products: float
    stored: float
    speed: float
    tile: int = 16

    def seconds(self, sheet: Sheet, rows: int, *, inputs: int = INPUTS, outputs: int = OUTPUTS) -> float:
        weights, entries = inputs * outputs, rows * (inputs + outputs)
        multiplied = -(-rows // self.tile) * self.tile
        reading = (self.stored * weights + 4 * entries) / (sheet.memory * 1e12 * _MEMORY)
        return max(reading, 2 * self.products * weights * multiplied / (self.speed * 1e12))


def bfloat16(sheet: Sheet, rows: int) -> float:
    return Scheme(1, 2, sheet.bfloat16 * _LIBRARY, tile=1).seconds(sheet, rows)


def products(kernel: TritonKernel, weight_bits: int) -> int:
    """Products of a limb and a digit per weight (`triton_product`)."""
    return 4 if kernel.floats or weight_bits <= 8 else 7


def chosen(chip: Chip) -> TritonKernel:
    """The kernel that a chip gets."""
    name = "triton-fp16" if chip.prefers_floats else "triton-int8"
    kernel = KERNELS[name]
    assert isinstance(kernel, TritonKernel)
    return kernel


def scheme(sheet: Sheet, kernel: TritonKernel, weight_bits: int, rows: int) -> Scheme:
    """A kernel on a chip."""
    dtype, shape = kernel.form(OUTPUTS, INPUTS, weight_bits=weight_bits)
    stored = dtype.itemsize * shape[0] * shape[1] / (INPUTS * OUTPUTS)
    speed = sheet.bfloat16 / _FLUSH if kernel.floats else sheet.int8
    tile = kernel.candidates(sheet.chip, rows, weight_bits=weight_bits)[0]
    return Scheme(products(kernel, weight_bits), stored, speed * _TRITON, tile.rows)


def best(sheet: Sheet, weight_bits: int, rows: int) -> float:
    """Seconds of the fastest exact scheme on the units that Triton reaches, as a tuned library would run it."""
    digits = Scheme(7 if weight_bits > 8 else 4, weight_bits / 8, sheet.int8 * _TUNED)
    floats = Scheme(4, weight_bits / 8, sheet.bfloat16 / _FLUSH * _TUNED)
    return min(scheme.seconds(sheet, rows) for scheme in (digits, floats))


def table() -> list[str]:
    """The lines of the table, in Markdown."""
    lines = [
        f"| chip | bits | kernel | products, bytes per weight | tiles | {' | '.join(f'{n:,} rows' for n in ROWS)} |",
        "|---" * (5 + len(ROWS)) + "|",
    ]
    for name, sheet in SHEETS.items():
        for weight_bits in (10, 8):
            kernel = chosen(sheet.chip)
            found = [scheme(sheet, kernel, weight_bits, rows) for rows in ROWS]
            tiles = [kernel.candidates(sheet.chip, rows, weight_bits=weight_bits)[0] for rows in ROWS]
            shapes = ", ".join(dict.fromkeys(f"{tile.rows}x{tile.columns}" for tile in tiles))
            times = zip(ROWS, found, strict=True)
            ratios = [f"{after.seconds(sheet, rows) / bfloat16(sheet, rows):.3g}" for rows, after in times]
            how = f"{found[0].products}, {found[0].stored:.3g}"
            lines.append(f"| {name} | {weight_bits} | {kernel.name} | {how} | {shapes} | {' | '.join(ratios)} |")
    return lines


if __name__ == "__main__":
    print(*table(), sep="\n")
