"""`bench scale`: measures how the cost of a step grows with rows, width and depth. A slope of 1 means proportional
growth."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import linear_regression

from symbiosis_priv.display import figures
from tenant.bench import steps_and_tokens
from tenant.bench.cli_options import Effort
from tenant.bench.measured_models import Llama
from tenant.bench.processes.tenant_process import Step
from tenant.bench.results.result_file import Row, number
from tenant.bench.steps_and_tokens import measure_step

_TICK_S = 0.01  # resolution of the CPU clock
_FIGURES = ("width", "layers", "tokens", "variant", "wall_s", "tenant_cpu_s", "tenant_cpu_over_whole")
AXES = {"rows": "rows of a step", "width": "width", "layers": "layers"}


def measure_scale(
    directory: Path,
    *,
    rows: Sequence[int],
    widths: Sequence[int],
    depths: Sequence[int],
    masking: str,
    effort: Effort,
    on_turn: Callable[[str], None],
) -> list[Row]:
    """Measure, and return a row per point, variant and axis (`rows`, `width`, `layers`), with the slope of its line.

    Two of the lists stay at their first value while the third one varies.

    Args:
        rows, widths, depths: the points; widths must be multiples of 64.
        effort, on_turn: see `measure_step` and `comparison`.
    """
    measured: dict[tuple[int, int], list[Row]] = {}
    base = (widths[0], depths[0])
    for width, depth in dict.fromkeys([base, *((w, depths[0]) for w in widths), *((widths[0], d) for d in depths)]):
        shape = Llama(width=width, layers=depth, inner=_inner(width))
        folder = directory / f"{width}-{depth}"
        folder.mkdir(parents=True)
        with steps_and_tokens.comparison(folder, shape, [masking], effort) as running:
            for count in rows if (width, depth) == base else rows[:1]:
                on_turn(f"width {width}, {depth} layers, {count} rows")
                task = Step(batch=1, tokens=count)
                found = measure_step(running, shape, task, [masking], repeat=effort.repeat, on_turn=lambda _: None)
                kept = [{figure: row[figure] for figure in _FIGURES} for row in found]
                measured.setdefault((width, depth), []).extend(kept)
    by_axis: dict[str, list[Row]] = {
        "rows": measured[base],
        "width": [row for width in widths for row in measured[width, depths[0]] if row["tokens"] == rows[0]],
        "layers": [row for depth in depths for row in measured[widths[0], depth] if row["tokens"] == rows[0]],
    }
    return [row for axis, found in by_axis.items() for row in _with_slopes(axis, found)]


def _inner(width: int) -> int:
    """Return the usual inner width of a Llama's MLP: 8/3 of the width, rounded up to a multiple of 64."""
    return 64 * math.ceil(width * 8 / 3 / 64)


def _with_slopes(axis: str, rows: Sequence[Row]) -> list[Row]:
    placed = [{"axis": axis, "at": row["tokens" if axis == "rows" else axis], **row} for row in rows]
    return [{**row, "slope": slope(points(placed, axis, str(row["variant"])))} for row in placed]


def points(rows: Sequence[Row], axis: str, variant: str) -> list[tuple[float, float]]:
    """Return the points of one line: (value on the axis, CPU seconds of the tenant)."""
    line = [row for row in rows if (row["axis"], row["variant"]) == (axis, variant)]
    return [(number(row["at"]), number(row["tenant_cpu_s"])) for row in line]


def slope(line: Sequence[tuple[float, float]]) -> float | None:
    """Return the slope of the least-squares line through the logarithms; None for fewer than two values on the axis."""
    if len({x for x, _ in line}) < 2:
        return None
    return linear_regression([math.log(x) for x, _ in line], [math.log(max(y, _TICK_S)) for _, y in line]).slope


def picture(rows: Sequence[Row], axis: str) -> str:
    """Draw the lines of one axis as an SVG with logarithmic scales."""
    lines = {
        variant: points(rows, axis, variant)
        for variant in dict.fromkeys(str(row["variant"]) for row in rows if row["axis"] == axis)
    }
    labels = {f"{name}: slope {_slope_text(slope(line))}": line for name, line in lines.items()}
    every = [point for line in lines.values() for point in line]
    return figures.lines(
        f"tenant's CPU seconds of a step against {AXES[axis]}",
        labels,
        _axis(AXES[axis], [x for x, _ in every]),
        _axis("CPU seconds", [y for _, y in every]),
    )


def _axis(label: str, values: Sequence[float]) -> figures.Axis:
    """Return an axis from one power of ten to another."""
    low, high = math.floor(math.log10(max(min(values), _TICK_S))), math.ceil(math.log10(max(*values, _TICK_S)))
    return figures.Axis(label, 10.0**low, 10.0 ** max(high, low + 1), log=True)


def _slope_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
