"""`bench scale`: measures how the cost of a step grows with rows, width and depth. A slope of 1 means proportional
growth."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Annotated

import typer

from symbiosis_priv.display import figures
from symbiosis_priv.system.files import output_file, write_atomically
from tenant.bench import steps_and_tokens
from tenant.bench.measured_models import Effort, Llama, MaskingVariant, Step
from tenant.bench.options import Masking, Progress, Rows, benchmark, numbers, widths
from tenant.bench.report import Row, number
from tenant.bench.steps_and_tokens import measure_step

_TICK_S = 0.01  # resolution of the CPU clock
_FIGURES = ("width", "layers", "tokens", "variant", "wall_s", "tenant_cpu_s", "tenant_cpu_over_whole")
AXES = {"rows": "rows of a step", "width": "width", "layers": "layers"}
_EFFORT = Effort()


@benchmark("scale")
def scale(
    folder: Path,
    progress: Progress,
    *,
    rows: Rows = "64,128,256,512",
    width: Annotated[str, typer.Option(help="Widths, separated by commas; multiples of 64.")] = "512,1024,2048",
    layers: Annotated[str, typer.Option(help="Layers, separated by commas.")] = "1,2,4",
    masking: Masking = "pad",
    effort: Effort = _EFFORT,
    svg: Annotated[Path | None, typer.Option(help="Also draw a picture per axis into this folder.")] = None,
) -> Iterator[Row]:
    """Measure the tenant's cost of a step against rows, width and depth, with slopes in a log-log picture.

    Two of the lists stay at their first value while the third one varies.

    Example: symbiosis-priv bench scale --rows 64,256 --width 512,1024 --layers 1 --svg pictures
    """
    counts, sizes, depths = numbers(rows, "--rows"), widths(width), numbers(layers, "--layers")
    variant = MaskingVariant.parse(masking)
    pictures = {axis: file for axis in AXES if svg and (file := output_file(svg / f"scale-{axis}.svg"))}
    measured: dict[tuple[int, int], list[Row]] = {}
    base = (sizes[0], depths[0])
    for wide, deep in dict.fromkeys([base, *((size, depths[0]) for size in sizes), *((sizes[0], d) for d in depths)]):
        # the usual inner width of a Llama's MLP: 8/3 of the width, rounded up to a multiple of 64
        shape = Llama(width=wide, layers=deep, inner=64 * math.ceil(wide * 8 / 3 / 64))
        here = folder / f"{wide}-{deep}"
        here.mkdir(parents=True)
        with steps_and_tokens.comparison(here, shape, [variant], effort) as running:
            for count in counts if (wide, deep) == base else counts[:1]:
                progress(f"width {wide}, {deep} layers, {count} rows")
                task = Step(batch=1, tokens=count)
                found = measure_step(running, shape, task, repeat=effort.repeat, on_turn=lambda _: None)
                kept = [{figure: row[figure] for figure in _FIGURES} for row in found]
                measured.setdefault((wide, deep), []).extend(kept)
    by_axis: dict[str, list[Row]] = {
        "rows": measured[base],
        "width": [row for size in sizes for row in measured[size, depths[0]] if row["tokens"] == counts[0]],
        "layers": [row for deep in depths for row in measured[sizes[0], deep] if row["tokens"] == counts[0]],
    }
    for axis, of_axis in by_axis.items():
        placed = [{"axis": axis, "at": row["tokens" if axis == "rows" else axis], **row} for row in of_axis]
        if axis in pictures:
            write_atomically(pictures[axis], picture(placed, axis).encode())
        yield from ({**row, "slope": slope(points(placed, axis, str(row["variant"])))} for row in placed)


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
