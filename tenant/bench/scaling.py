"""`bench scale`: measures how the cost of a step grows with rows, width and depth. A slope of 1 means proportional
growth."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Annotated

import typer

from symbiosis_priv.display import figures
from symbiosis_priv.system.files import output_file, write_atomically
from tenant.bench import steps_and_tokens
from tenant.bench.measured_models import Effort, Llama, Step
from tenant.bench.options import Json, Masking, Rows, measure, numbers, scheme, widths
from tenant.bench.report import Row, number
from tenant.bench.steps_and_tokens import measure_step
from tenant.cli.options import takes

_TICK_S = 0.01  # resolution of the CPU clock
_FIGURES = ("width", "layers", "tokens", "variant", "wall_s", "tenant_cpu_s", "tenant_cpu_over_whole")
AXES = {"rows": "rows of a step", "width": "width", "layers": "layers"}
_EFFORT = Effort()


@takes
def scale(
    *,
    rows: Rows = "64,128,256,512",
    width: Annotated[str, typer.Option(help="Widths, separated by commas; multiples of 64.")] = "512,1024,2048",
    layers: Annotated[str, typer.Option(help="Layers, separated by commas.")] = "1,2,4",
    masking: Masking = "pad",
    effort: Effort = _EFFORT,
    svg: Annotated[Path | None, typer.Option(help="Also draw a picture per axis into this folder.")] = None,
    json: Json = None,
) -> None:
    """Measure the tenant's cost of a step against rows, width and depth, with slopes in a log-log picture.

    Two of the lists stay at their first value while the third one varies.

    Example: symbiosis-priv bench scale --rows 64,256 --width 512,1024 --layers 1 --svg pictures
    """
    counts, sizes, depths, name = numbers(rows, "--rows"), widths(width), numbers(layers, "--layers"), scheme(masking)
    pictures = {axis: file for axis in AXES if svg and (file := output_file(svg / f"scale-{axis}.svg"))}

    def run(folder: Path, progress: Callable[[str], None]) -> list[Row]:
        return measure_scale(
            folder, rows=counts, widths=sizes, depths=depths, masking=name, effort=effort, on_turn=progress
        )

    found = measure("scale", json, run)
    for axis, file in pictures.items():
        write_atomically(file, picture(found, axis).encode())


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
        # the usual inner width of a Llama's MLP: 8/3 of the width, rounded up to a multiple of 64
        shape = Llama(width=width, layers=depth, inner=64 * math.ceil(width * 8 / 3 / 64))
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
    with_slopes = list[Row]()
    for axis, found in by_axis.items():
        placed = [{"axis": axis, "at": row["tokens" if axis == "rows" else axis], **row} for row in found]
        with_slopes += [{**row, "slope": slope(points(placed, axis, str(row["variant"])))} for row in placed]
    return with_slopes


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
    slopes = {name: slope(line) for name, line in lines.items()}
    labels = {
        f"{name}: slope {'–' if slopes[name] is None else f'{slopes[name]:.2f}'}": line for name, line in lines.items()
    }
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
