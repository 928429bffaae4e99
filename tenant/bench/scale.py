"""`bench scale`: how the cost of a step grows with rows, width and depth. A slope of 1 is proportional growth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from symbiosis_priv import figures
from tenant.bench.contest import Shape
from tenant.bench.report import Value
from tenant.bench.step import Row, measure_steps
from tenant.bench.worker import Step

_FIGURE = "tenant_cpu_s"
_AXES = {"rows": "rows of a step", "width": "width", "layers": "layers"}


def measure_scale(
    directory: Path,
    *,
    rows: Sequence[int],
    widths: Sequence[int],
    depths: Sequence[int],
    masking: str,
    repeat: int,
    threads: int,
    pool_memory_mib: int,
    on_turn: Callable[[str], None],
) -> list[Row]:
    """A row per point, contestant and axis (`rows`, `width`, `layers`), with the slope of its line.

    The first of each list is what stays fixed while another one grows.

    Args:
        directory: new or empty.
        rows, widths, depths: the points; multiples of 64 for widths.
        masking: of the split tenant.
        repeat, threads, pool_memory_mib, on_turn: see `step.measure_steps`.
    """
    measured = {}
    base = (widths[0], depths[0])
    for width, depth in dict.fromkeys([base, *((w, depths[0]) for w in widths), *((widths[0], d) for d in depths)]):
        shape = Shape(width=width, layers=depth, inner=_inner(width))
        counts = rows if (width, depth) == base else rows[:1]
        folder = directory / f"{width}-{depth}"
        folder.mkdir(parents=True)
        measured[width, depth] = measure_steps(
            folder,
            shape,
            [Step(batch=1, tokens=count) for count in counts],
            [masking],
            repeat=repeat,
            threads=threads,
            pool_memory_mib=pool_memory_mib,
            on_turn=lambda what, shape=shape: on_turn(f"width {shape.width}, {shape.layers} layers: {what}"),
        )
    points: dict[str, list[Row]] = {
        "rows": measured[base],
        "width": [row for width in widths for row in measured[width, depths[0]] if row["tokens"] == rows[0]],
        "layers": [row for depth in depths for row in measured[widths[0], depth] if row["tokens"] == rows[0]],
    }
    return [row for axis, found in points.items() for row in _with_slopes(axis, found)]


def _inner(width: int) -> int:
    """The usual MLP of a Llama: 8/3 of the width, rounded up to a multiple of 64."""
    return 64 * math.ceil(width * 8 / 3 / 64)


def _with_slopes(axis: str, rows: Sequence[Row]) -> list[Row]:
    placed = [{"axis": axis, "at": row["tokens" if axis == "rows" else axis], **row} for row in rows]
    return [{**row, "slope": slope(points(placed, axis, str(row["variant"])))} for row in placed]


def points(rows: Sequence[Row], axis: str, variant: str) -> list[tuple[float, float]]:
    """(place on the axis, CPU seconds of the tenant) of one line."""
    return [
        (number(row["at"]), number(row[_FIGURE])) for row in rows if (row["axis"], row["variant"]) == (axis, variant)
    ]


def slope(line: Sequence[tuple[float, float]]) -> float | None:
    """Of the least-squares line through the logarithms; None for fewer than two places."""
    xs = [math.log(x) for x, _ in line]
    ys = [math.log(max(y, 1e-9)) for _, y in line]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if not spread:
        return None
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def picture(rows: Sequence[Row], axis: str) -> str:
    """The lines of one axis as an SVG, both scales logarithmic."""
    lines = {
        variant: points(rows, axis, variant)
        for variant in dict.fromkeys(str(row["variant"]) for row in rows if row["axis"] == axis)
    }
    labels = {f"{name}: slope {_slope_text(slope(line))}": line for name, line in lines.items()}
    every = [point for line in lines.values() for point in line]
    return figures.lines(
        f"tenant's CPU seconds of a step against {_AXES[axis]}",
        labels,
        _axis(_AXES[axis], [x for x, _ in every]),
        _axis("CPU seconds", [y for _, y in every]),
    )


def number(value: Value) -> float:
    """A figure that is one."""
    assert isinstance(value, int | float)
    return float(value)


def _axis(label: str, values: Sequence[float]) -> figures.Axis:
    """From power of ten to power of ten."""
    low, high = math.floor(math.log10(max(min(values), 1e-9))), math.ceil(math.log10(max(*values, 1e-9)))
    return figures.Axis(label, 10.0**low, 10.0 ** max(high, low + 1), log=True)


def _slope_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
