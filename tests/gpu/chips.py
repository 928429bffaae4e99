"""What each GPU gets, by its data sheet: `python -m tests.gpu.chips` prints a table. With the report of `make gpu`, the
last column is what that machine has measured.

A product of 4,096 x 28,672 weights (gate and up of an 8 B model), forward, is compared with bfloat16 of the same chip.
Its time is the longer one of reading the operands and of multiplying, at a part of each peak that is assumed.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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


def measured(report: dict[str, Any]) -> dict[tuple[str, int], list[float]]:
    """The GPU of a report of `make gpu`, as `SHEETS` calls it if it is there, and the weight bits; to the time over
    bfloat16's for each of `ROWS`. Empty if the report has no such times."""
    rows = [row for section in report["sections"] for row in section["rows"]]
    gpu = next((row["gpu"] for row in rows if "gpu" in row), "")
    name = next((name for name, sheet in SHEETS.items() if sheet.chip.name in gpu), gpu)
    times = {(row["weight_bits"], row["rows"]): row["over_bfloat16"] for row in rows if "ms" in row}
    return {(name, bits): [times[bits, count] for count in ROWS] for bits in sorted({bits for bits, _ in times})}


def table(found: dict[tuple[str, int], list[float]] | None = None) -> list[str]:
    """The lines of the table, in Markdown; with a last column for what was `measured`."""
    left = dict(found or {})
    lines = [
        f"| chip | bits | kernel | products, bytes per weight | tiles | {' | '.join(f'{n:,} rows' for n in ROWS)} |",
        "|---" * (5 + len(ROWS)) + "|",
    ]
    if found is not None:
        lines = [lines[0] + " measured |", lines[1] + "---|"]
    for name, sheet in SHEETS.items():
        for weight_bits in (10, 8):
            kernel = chosen(sheet.chip)
            schemes = [scheme(sheet, kernel, weight_bits, rows) for rows in ROWS]
            tiles = [kernel.candidates(sheet.chip, rows, weight_bits=weight_bits)[0] for rows in ROWS]
            shapes = ", ".join(dict.fromkeys(f"{tile.rows}x{tile.columns}" for tile in tiles))
            times = zip(ROWS, schemes, strict=True)
            ratios = [f"{after.seconds(sheet, rows) / bfloat16(sheet, rows):.3g}" for rows, after in times]
            how = f"{schemes[0].products}, {schemes[0].stored:.3g}"
            line = f"| {name} | {weight_bits} | {kernel.name} | {how} | {shapes} | {' | '.join(ratios)} |"
            lines.append(line if found is None else f"{line} {_shown(left.pop((name, weight_bits), []))} |")
    # a chip without a data sheet here
    lines += [f"| {name} | {bits} |{' |' * (3 + len(ROWS))} {_shown(times)} |" for (name, bits), times in left.items()]
    return [*lines, "", "Nothing was measured: the report has no GPU."] if found == {} else lines


def _shown(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.3g}" for ratio in ratios) or "–"


if __name__ == "__main__":
    paths = sys.argv[1:2]
    print(*table(measured(json.loads(Path(paths[0]).read_text(encoding="utf-8"))) if paths else None), sep="\n")
