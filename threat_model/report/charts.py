"""The pictures of a report, as inline SVG."""

from symbiosis_priv.display import figures
from symbiosis_priv.display.figures import Axis, Bar
from threat_model.report.sections import pool_cells
from threat_model.suite import Suite, Verdict

_COLOUR = {
    Verdict.HIDDEN: "#15803d",
    Verdict.BROKEN: "#b91c1c",
    Verdict.RESISTED: "#a16207",
    Verdict.BY_DESIGN: "#0e7490",
    Verdict.ABSENT: "#777",
}
_RATE = Axis("success", 0.0, 1.0)


def pool_charts(suite: Suite) -> list[str]:
    charts = []
    for attack in dict.fromkeys(c.attack for c in suite.cells if c.attack.family == "noise removal"):
        series: dict[str, list[tuple[float, float]]] = {}
        for cell in pool_cells(suite, attack.name):
            assert cell.outcome is not None  # pool_cells
            name = f"noise × {cell.scheme.options['masking_options']['noise_scale']:g}"
            series.setdefault(name, []).append(
                (float(cell.scheme.options["masking_options"]["pool_size"]), cell.outcome.success)
            )
        charts.append(figures.lines(attack.name, series, Axis("noises per layer", 1, 100, log=True), _RATE))
    return charts


def adapter_charts(suite: Suite) -> list[str]:
    found = [c for c in suite.cells if "loss, stolen" in (c.outcome.figures if c.outcome else {})]
    errors, losses, ends = [], [], list[float]()
    for cell in found:
        assert cell.outcome is not None  # found
        f = cell.outcome.figures
        error = f["worst relative error"]
        errors.append(Bar(cell.scheme.name, error, error, error, 0.01))
        losses.append(Bar(cell.scheme.name, f["loss, stolen"], f["loss, true"], f["loss, base model"], f["loss, true"]))
        ends += [f["loss, true"], f["loss, base model"]]
    if not found:
        return []
    low, high = min(ends), max(ends)
    room = 0.2 * (high - low) + 1e-3
    return [
        figures.bars("error of the stolen BA (dashes: 1 %)", errors, Axis("relative error", 1e-7, 10.0, log=True)),
        figures.bars(
            "private-text loss with it (whisker: true to base)", losses, Axis("loss, nats", low - room, high + room)
        ),
    ]


def roc_charts(suite: Suite) -> list[str]:
    charts = []
    for attack in dict.fromkeys(c.attack for c in suite.cells):
        # settings of one family look alike, so only the first one is shown; a scheme's other helpers are another family
        shown = {(s.family, s.helpers): s for s in reversed(suite.schemes)}.values()
        series = {
            c.scheme.name: c.outcome.curve
            for c in suite.cells
            if c.attack is attack and c.scheme in shown and c.outcome and c.outcome.curve
        }
        if series:
            axes = Axis("false positives", 0, 1), Axis("true positives", 0, 1)
            charts.append(figures.lines(attack.name, series, *axes))
    return charts


def attack_charts(suite: Suite) -> list[str]:
    charts = []
    for attack in dict.fromkeys(c.attack for c in suite.cells):
        values = [
            Bar(
                c.scheme.name,
                c.outcome.success,
                c.outcome.interval.low,
                c.outcome.interval.high,
                c.outcome.chance,
                _COLOUR[c.verdict],
            )
            for c in suite.cells
            if c.attack is attack and c.outcome
        ]
        if values:
            charts.append(figures.bars(f"{attack.name}: {attack.metric}", values, _RATE))
    return charts


def forgery_chart(suite: Suite) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for f in suite.active.forgeries:
        series.setdefault(f"m = {f.columns}, measured", []).append((f.valuation, max(f.passed / f.trials, 1e-3)))
        series.setdefault(f"m = {f.columns}, 2^-(32-v)m", []).append((f.valuation, f.theory))
    axes = Axis("valuation of the error", 28, 31), Axis("rate", 1e-3, 1, log=True)
    return figures.lines("fault attribution with few columns: rate of errors that pass", series, *axes)
