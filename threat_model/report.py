"""A suite's figures as a terminal table, as JSON, and as one HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from threat_model import figures
from threat_model.figures import Axis, Bar
from threat_model.schemes import Scheme
from threat_model.security_table import NOT_HIDDEN, security_table
from threat_model.statistics import CONFIDENCE, gaussian_channel_bits
from threat_model.suite import Cell, PlantedCell, Suite, Verdict

_STYLE = {
    Verdict.HIDDEN: ("green", "✓"),
    Verdict.BROKEN: ("red", "✗"),
    Verdict.RESISTED: ("yellow", "~"),
    Verdict.BY_DESIGN: ("cyan", "○"),
    Verdict.ABSENT: ("dim", "–"),
}
_COLUMNS = 6  # schemes side by side in a terminal
_RATE = Axis("success", 0.0, 1.0)


# Terminal


def render(suite: Suite) -> RenderableType:
    """Tables for a terminal."""
    parts: list[RenderableType] = []
    for start in range(0, len(suite.schemes), _COLUMNS):
        parts.append(_attack_table(suite, suite.schemes[start : start + _COLUMNS]))
    legend = ", ".join(f"{mark} {verdict}" for verdict, (_, mark) in _STYLE.items())
    outside, promised = suite.outside
    parts += [
        Text(f"success | chance, in %. {legend}; ! not as promised", style="dim"),
        Text(
            f"{promised} cells are promised to be hidden; in {outside} of them chance lies outside the cell's own "
            f"{CONFIDENCE:.0%} interval ({promised / 100:.1f} expected).",
            style="dim",
        ),
        _cost_table(suite),
        _planted_table(suite),
        _active_table(suite),
        _not_hidden_table(),
    ]
    return Group(*parts)


def _attack_table(suite: Suite, schemes: Sequence[Scheme]) -> Table:
    table = Table(title="Attacks against masking schemes", title_justify="left")
    table.add_column("attack", no_wrap=True)
    table.add_column("by", no_wrap=True)
    for scheme in schemes:
        table.add_column(scheme.name, justify="right", no_wrap=True)
    attacks = list(dict.fromkeys(c.attack for c in suite.cells))
    for attack in attacks:
        cells = [_cell_text(suite.cell(attack.name, scheme.name)) for scheme in schemes]
        table.add_row(attack.name, attack.party, *cells)
    return table


def _cell_text(cell: Cell) -> Text:
    style, mark = _STYLE[cell.verdict]
    alarm = "" if cell.expected else " !"
    if cell.outcome is None:
        return Text(mark + alarm, style=style)
    success, chance = (f"{100 * rate:.1f}" for rate in (cell.outcome.success, cell.outcome.chance))
    return Text.assemble((success, style), (f" | {chance} ", "dim"), (mark + alarm, style))


def _cost_table(suite: Suite) -> Table:
    table = Table(title="What candidate subtraction costs: each layer on its own", title_justify="left")
    for name in ("scheme", "distances tried", "combinations the paper counts", "rows read, worst layer"):
        table.add_column(name, justify="right")
    for cell in _pool_cells(suite, "candidate subtraction, forward"):
        assert cell.outcome is not None  # _pool_cells
        f = cell.outcome.figures
        table.add_row(
            cell.scheme.name,
            f"{f['distances tried']:,.0f}",
            f"10^{f['combinations, log10']:.0f}",
            f"{f['worst layer']:.1%}",
        )
    return table


def _planted_table(suite: Suite) -> Table:
    table = Table(title="Planted faults", title_justify="left")
    for name in ("fault", "breaks", "attack", "success", "chance", "found"):
        table.add_column(name)
    for fault in suite.planted:
        table.add_row(*_planted_row(fault), style=None if fault.found else "bold red")
    return table


def _planted_row(fault: PlantedCell) -> tuple[str, ...]:
    rates = (f"{rate:.1%}" for rate in (fault.outcome.success, fault.outcome.chance))
    return fault.fault, fault.rule, fault.attack, *rates, "yes" if fault.found else "NO"


def _active_table(suite: Suite) -> Table:
    table = Table(title="Active adversaries", title_justify="left")
    for name in ("lie", "caught", "at least (99 %)"):
        table.add_column(name)
    single = [d for d in suite.active.detections if not d.name.startswith("error of valuation")]
    by_valuation = [d for d in suite.active.detections if d.name.startswith("error of valuation")]
    caught, trials = sum(d.caught for d in by_valuation), sum(d.trials for d in by_valuation)
    worst = min(d.caught / d.trials for d in by_valuation)
    table.add_row("errors of valuation 0..31", f"{caught} of {trials}", f"worst valuation {worst:.0%}")
    for d in single:
        table.add_row(d.name, f"{d.caught} of {d.trials}", f"{d.interval.low:.1%}")
    for leak in suite.active.leaks:
        table.add_row(
            f"selective abort, {leak.name}",
            f"{leak.aborts} of {leak.trials} aborted",
            f"tells {leak.information:.3f} bits of a secret bit",
        )
    return table


def _not_hidden_table() -> Table:
    table = Table(title="Not hidden, by any scheme", title_justify="left")
    table.add_column("what")
    table.add_column("shown by")
    for what, attack in NOT_HIDDEN:
        table.add_row(what, attack)
    return table


# JSON


def to_json(suite: Suite) -> str:
    """Every figure."""
    outside, promised = suite.outside
    data = {
        "version": 1,
        "quick": suite.quick,
        "seconds": round(suite.seconds, 1),
        "as_expected": suite.as_expected,
        "confidence": CONFIDENCE,
        "promised_cells": promised,
        "promised_cells_outside_their_interval": outside,
        "cells": [_cell_json(c) for c in suite.cells],
        "planted": [
            {"fault": p.fault, "rule": p.rule, "attack": p.attack, "success": p.outcome.success, "found": p.found}
            for p in suite.planted
        ],
        "active": {
            "detections": [asdict(d) for d in suite.active.detections],
            "aborts": [asdict(x) for x in suite.active.leaks],
            "forgeries": [{**asdict(f), "theory": f.theory} for f in suite.active.forgeries],
        },
        "gaussian_bits_per_coordinate": {f"{s:g}": gaussian_channel_bits(s) for s in _noise_scales(suite)},
        "not_hidden": [{"what": what, "shown_by": attack} for what, attack in NOT_HIDDEN],
    }
    return json.dumps(data, indent=1)


def _cell_json(cell: Cell) -> dict[str, Any]:
    result: dict[str, Any] = {
        "attack": cell.attack.name,
        "party": cell.attack.party,
        "metric": cell.attack.metric,
        "scheme": cell.scheme.name,
        "verdict": cell.verdict,
        "promised": cell.promised,
        "expected": cell.expected,
        "seconds": round(cell.seconds, 3),
    }
    if cell.outcome is not None:
        o = cell.outcome
        result |= {
            "success": o.success,
            "trials": o.trials,
            "chance": o.chance,
            "interval": [o.interval.low, o.interval.high],
            "p_value": o.p_value,
            "figures": dict(o.figures),
        }
    return result


# HTML

_CSS = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
table{border-collapse:collapse;margin:1rem 0;font-size:13px}td,th{border:1px solid #ddd;padding:3px 8px;text-align:left}
.hidden{background:#dcfce7}.broken{background:#fee2e2}.resisted{background:#fef9c3}.by-design{background:#cffafe}
.nothing-to-see{color:#777}.alarm{outline:3px solid #b91c1c}.wide{overflow-x:auto}
figure{display:inline-block;margin:.5rem}
svg{max-width:100%;height:auto}small{color:#555}
"""


def to_html(suite: Suite) -> str:
    """One page that needs nothing else: pictures are inline SVG."""
    outside, promised = suite.outside
    state = "Every verdict is the promised one." if suite.as_expected else "Some verdicts are NOT as promised."
    sections = [
        "<h1>Threat model: what each party learns</h1>",
        f"<p><strong>{state}</strong> {promised} cells are promised to be hidden; in {outside} of them "
        f"chance lies outside the cell's own 99 % interval, where {promised / 100:.1f} are expected by chance.</p>",
        _html_cells(suite),
        "<h2>Noise removal against pool size</h2>",
        "<p><small>The paper counts combinations over layers; the work is a sum over layers.</small></p>",
        *(_figure(chart) for chart in _pool_charts(suite)),
        "<h2>How much a Gaussian mask hides</h2>",
        _html_leakage(suite),
        "<h2>Stolen adapters</h2>",
        *(_figure(chart) for chart in _adapter_charts(suite)),
        "<h2>Telling two rows apart</h2>",
        *(_figure(chart) for chart in _roc_charts(suite)),
        "<h2>Every attack</h2><p><small>Whiskers: 99 % interval; dashes: chance.</small></p>",
        *(_figure(chart) for chart in _attack_charts(suite)),
        "<h2>Planted faults</h2>",
        _html_table(
            ("fault", "breaks", "attack", "success", "chance", "found"),
            [_planted_row(p) for p in suite.planted],
        ),
        "<h2>Active adversaries</h2>",
        _figure(_forgery_chart(suite)),
        _html_table(("lie", "caught", "of"), [(d.name, str(d.caught), str(d.trials)) for d in suite.active.detections]),
        _html_table(
            ("selective abort", "aborted", "of", "bits told of one secret bit"),
            [(x.name, str(x.aborts), str(x.trials), f"{x.information:.3f}") for x in suite.active.leaks],
        ),
        "<h2>Not hidden</h2>",
        _html_table(("what", "shown by"), NOT_HIDDEN),
        "<h2>Attacks and their sources</h2>",
        _html_table(
            ("attack", "by", "sees", "metric", "chance", "source"),
            [
                (a.name, a.party, a.sees, a.metric, a.chance, a.source)
                for a in dict.fromkeys(c.attack for c in suite.cells)
            ],
        ),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>symbiosis-priv threat model</title>'
        f"<style>{_CSS}</style></head><body>{''.join(sections)}</body></html>"
    )


def _figure(chart: str) -> str:
    return f"<figure>{chart}</figure>"


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(h)}</th>' for h in head)}</tr>{body}</table>"


def _html_cells(suite: Suite) -> str:
    head = "".join(f"<th>{escape(s.name)}</th>" for s in suite.schemes)
    rows = []
    for attack in dict.fromkeys(c.attack for c in suite.cells):
        cells = []
        for scheme in suite.schemes:
            cell = suite.cell(attack.name, scheme.name)
            kind = cell.verdict.replace(" ", "-") + ("" if cell.expected else " alarm")
            o = cell.outcome
            text = "–" if o is None else f"{o.success:.1%}<br><small>chance {o.chance:.1%}</small>"
            cells.append(f'<td class="{kind}" title="{cell.verdict}">{text}<br><small>{cell.verdict}</small></td>')
        rows.append(f"<tr><td>{escape(attack.name)}</td><td>{attack.party}</td>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><tr><th>attack</th><th>by</th>{head}</tr>{"".join(rows)}</table></div>'


def _pool_cells(suite: Suite, attack: str) -> list[Cell]:
    return [
        c
        for c in suite.cells
        if c.attack.name == attack and "paper_pool_size" in c.scheme.options and c.outcome is not None
    ]


def _noise_scales(suite: Suite) -> list[float]:
    options = [s.options for s in suite.schemes]
    return sorted({float(o["paper_noise_scale"]) for o in options if "paper_noise_scale" in o})


def _pool_charts(suite: Suite) -> list[str]:
    charts = []
    for attack in dict.fromkeys(c.attack for c in suite.cells if c.attack.family == "noise removal"):
        series: dict[str, list[tuple[float, float]]] = {}
        for cell in _pool_cells(suite, attack.name):
            assert cell.outcome is not None  # _pool_cells
            name = f"noise × {cell.scheme.options['paper_noise_scale']:g}"
            series.setdefault(name, []).append((float(cell.scheme.options["paper_pool_size"]), cell.outcome.success))
        charts.append(figures.lines(attack.name, series, Axis("noises per layer", 1, 100, log=True), _RATE))
    return charts


def _adapter_charts(suite: Suite) -> list[str]:
    found = [c for c in suite.cells if "loss, stolen" in (c.outcome.figures if c.outcome else {})]
    errors, losses = [], []
    for cell in found:
        assert cell.outcome is not None  # found
        f = cell.outcome.figures
        error = f["worst relative error"]
        errors.append(Bar(cell.scheme.name, error, error, error, 0.01))
        losses.append(Bar(cell.scheme.name, f["loss, stolen"], f["loss, true"], f["loss, base model"], f["loss, true"]))
    if not found:
        return []
    low, high = min(b.low for b in losses), max(b.high for b in losses)
    room = 0.2 * (high - low) + 1e-3
    return [
        figures.bars("error of the stolen BA (dashes: 1 %)", errors, Axis("relative error", 1e-7, 10.0, log=True)),
        figures.bars(
            "private-text loss with it (whisker: true to base)", losses, Axis("loss, nats", low - room, high + room)
        ),
    ]


def _roc_charts(suite: Suite) -> list[str]:
    charts = []
    for attack in dict.fromkeys(c.attack for c in suite.cells):
        series = {
            c.scheme.name: c.outcome.curve for c in suite.cells if c.attack is attack and c.outcome and c.outcome.curve
        }
        if series:
            pools = [name for name in series if name not in ("none", "pad", "local")]
            shown = {n: p for n, p in series.items() if n not in pools[1:]}  # pools look alike: one will do
            axes = Axis("false positives", 0, 1), Axis("true positives", 0, 1)
            charts.append(figures.lines(attack.name, shown, *axes))
    return charts


def _attack_charts(suite: Suite) -> list[str]:
    charts = []
    for attack in dict.fromkeys(c.attack for c in suite.cells):
        values = [
            Bar(c.scheme.name, c.outcome.success, c.outcome.interval.low, c.outcome.interval.high, c.outcome.chance)
            for c in suite.cells
            if c.attack is attack and c.outcome
        ]
        if values:
            charts.append(figures.bars(f"{attack.name}: {attack.metric}", values, _RATE))
    return charts


def _forgery_chart(suite: Suite) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for f in suite.active.forgeries:
        series.setdefault(f"m = {f.columns}, measured", []).append((f.valuation, max(f.passed / f.trials, 1e-3)))
        series.setdefault(f"m = {f.columns}, 2^-(32-v)m", []).append((f.valuation, f.theory))
    axes = Axis("valuation of the error", 28, 31), Axis("rate", 1e-3, 1, log=True)
    return figures.lines("one check, few columns: forgeries that pass", series, *axes)


def _html_leakage(suite: Suite) -> str:
    rows = []
    for scale in _noise_scales(suite):
        cells = [
            c
            for c in _pool_cells(suite, "candidate subtraction, forward")
            if c.scheme.options["paper_noise_scale"] == scale
        ]
        measured = max(c.outcome.figures["median relative error"] for c in cells if c.outcome)
        rows.append(
            (
                f"{scale:g}",
                f"{gaussian_channel_bits(scale):.2g}",
                f"{scale / math.sqrt(1 + scale * scale):.3f}",
                f"{measured:.1e}",
            )
        )
    head = (
        "noise, times the activations",
        "bits per coordinate, fresh noise (Gaussian channel)",
        "best error against fresh noise",
        "measured error against the pool",
    )
    note = "The bound is for noise that is used once, and for real numbers. Pools break the first, float32 the second."
    return f"{_html_table(head, rows)}<p><small>{note}</small></p>"


def show(suite: Suite, console: Console) -> None:
    """Print the tables."""
    console.print(render(suite))


__all__ = ["render", "security_table", "show", "to_html", "to_json"]
