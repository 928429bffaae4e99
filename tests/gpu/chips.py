"""What each GPU gets, by its data sheet: `python -m tests.gpu.chips` prints a table.

A product of 4,096 x 28,672 weights (gate and up of an 8 B model), forward, is compared with bfloat16 of the same chip.
Its time is the longer one of reading the operands and of multiplying, at a part of each peak that is assumed. *Before*
is what release 0.5 chose. `make gpu` prints what the kernels take beside it (`expected`).
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
    float64: float
    before: str = "triton"


_GIB: Final = 1 << 30
_HOPPER, _CONSUMER = 227 << 10, 99 << 10
SHEETS: Final = {
    "A100 80 GB": Sheet(Chip("A100", "sm_80", 108, 80 * _GIB, 163 << 10), 2.04, 312, 624, 19.5),
    "H100 SXM": Sheet(Chip("H100", "sm_90", 132, 80 * _GIB, _HOPPER), 3.35, 989, 1979, 67),
    "H200": Sheet(Chip("H200", "sm_90", 132, 141 * _GIB, _HOPPER), 4.8, 989, 1979, 67),
    "B200": Sheet(Chip("B200", "sm_100", 148, 180 * _GIB, _HOPPER), 8.0, 2250, 1000, 40),
    "B300": Sheet(Chip("B300", "sm_103", 148, 270 * _GIB, _HOPPER), 8.0, 2250, 165, 1.25),
    "RTX 4090": Sheet(Chip("RTX 4090", "sm_89", 128, 24 * _GIB, _CONSUMER), 1.008, 165, 660, 1.29),
    "RTX 5090": Sheet(Chip("RTX 5090", "sm_120", 170, 32 * _GIB, _CONSUMER), 1.79, 209, 838, 1.64),
    "MI300X": Sheet(Chip("MI300X", "gfx942", 304, 192 * _GIB, 64 << 10, lanes=64), 5.3, 1307, 2615, 163, "limbs"),
}


@dataclass(frozen=True)
class Scheme:
    """A way to multiply exactly: products and bytes per weight, operations per second, and the rows of its tiles."""

    products: float
    stored: float
    speed: float
    tile: int = 16

    def seconds(self, sheet: Sheet, rows: int) -> float:
        weights, entries = INPUTS * OUTPUTS, rows * (INPUTS + OUTPUTS)
        multiplied = -(-rows // self.tile) * self.tile
        reading = (self.stored * weights + 4 * entries) / (sheet.memory * 1e12 * _MEMORY)
        return max(reading, 2 * self.products * weights * multiplied / (self.speed * 1e12))


def bfloat16(sheet: Sheet, rows: int) -> float:
    return Scheme(1, 2, sheet.bfloat16 * _LIBRARY, tile=1).seconds(sheet, rows)


def products(kernel: TritonKernel, weight_bits: int, ring_bits: int = 32) -> int:
    """Products of a limb and a digit per weight (`triton_product`)."""
    limbs = ring_bits // 8
    return limbs if kernel.floats or weight_bits <= 8 else 2 * limbs - 1


def chosen(chip: Chip) -> TritonKernel:
    """The kernel that a chip gets."""
    name = "triton-fp16" if chip.prefers_floats else "triton-int8"
    kernel = KERNELS[name]
    assert isinstance(kernel, TritonKernel)
    return kernel


def scheme(sheet: Sheet, kernel: TritonKernel, weight_bits: int, rows: int, *, ring_bits: int = 32) -> Scheme:
    """A kernel on a chip."""
    dtype, shape = kernel.form(OUTPUTS, INPUTS, weight_bits=weight_bits)
    stored = dtype.itemsize * shape[0] * shape[1] / (INPUTS * OUTPUTS)
    speed = sheet.bfloat16 / _FLUSH if kernel.floats else sheet.int8
    tile = kernel.candidates(sheet.chip, rows, weight_bits=weight_bits)[0]
    return Scheme(products(kernel, weight_bits, ring_bits), stored, speed * _TRITON, tile.rows)


def before(sheet: Sheet, weight_bits: int, *, sharded: bool = False) -> Scheme:
    """What release 0.5 chose on a chip."""
    wide = 1 + (weight_bits > 8)
    if sharded:  # the weights are converted: they are read, written and read again
        return Scheme(1, wide + 16, sheet.float64 * 0.8, tile=1)
    if sheet.before == "limbs":
        return Scheme(3 * wide + 1, wide, sheet.int8 * _TUNED)
    return Scheme(4 * wide, wide, sheet.int8 * _TRITON)


def best(sheet: Sheet, weight_bits: int, rows: int) -> float:
    """Seconds of the fastest exact scheme on the units that Triton reaches, as a tuned library would run it."""
    digits = Scheme(7 if weight_bits > 8 else 4, weight_bits / 8, sheet.int8 * _TUNED)
    floats = Scheme(4, weight_bits / 8, sheet.bfloat16 / _FLUSH * _TUNED)
    return min(scheme.seconds(sheet, rows) for scheme in (digits, floats))


def expected(sheet: Sheet, rows: int, *, weight_bits: int = 10, ring_bits: int = 32) -> float:
    """The time of the chosen kernel over bfloat16's."""
    found = scheme(sheet, chosen(sheet.chip), weight_bits, rows, ring_bits=ring_bits)
    return found.seconds(sheet, rows) / bfloat16(sheet, rows)


def sheet_of(name: str) -> Sheet | None:
    """The data sheet of a device, by the name that its driver gives it."""
    return next((sheet for sheet in SHEETS.values() if sheet.chip.name in name), None)


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
            ratios = [
                " / ".join(f"{seconds / bfloat16(sheet, rows):.3g}" for seconds in three)
                for rows, after in zip(ROWS, found, strict=True)
                for three in [
                    (
                        before(sheet, weight_bits, sharded=True).seconds(sheet, rows),
                        before(sheet, weight_bits).seconds(sheet, rows),
                        after.seconds(sheet, rows),
                    )
                ]
            ]
            how = f"{found[0].products}, {found[0].stored:.3g}"
            lines.append(f"| {name} | {weight_bits} | {kernel.name} | {how} | {shapes} | {' | '.join(ratios)} |")
    return lines


if __name__ == "__main__":
    print(*table(), sep="\n")
