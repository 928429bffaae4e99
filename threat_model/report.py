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
from threat_model.statistics import CONFIDENCE, FALSE_ALARM, gaussian_channel_bits
from threat_model.suite import Cell, PlantedCell, Suite, Verdict
from threat_model.views import PARTIES

_STYLE = {
    Verdict.HIDDEN: ("green", "✓"),
    Verdict.BROKEN: ("red", "✗"),
    Verdict.RESISTED: ("yellow", "~"),
    Verdict.BY_DESIGN: ("cyan", "○"),
    Verdict.ABSENT: ("dim", "–"),
}
_COLOUR = {
    Verdict.HIDDEN: "#15803d",
    Verdict.BROKEN: "#b91c1c",
    Verdict.RESISTED: "#a16207",
    Verdict.BY_DESIGN: "#0e7490",
    Verdict.ABSENT: "#777",
}
_FULL, _SHORT = 17, 10  # columns that a scheme takes, with chance beside success and without
_RATE = Axis("success", 0.0, 1.0)


# Terminal


def render(suite: Suite, *, width: int) -> RenderableType:
    """Tables for a terminal of so many columns; chance is left out of the large one where it is narrow."""
    room = width - 4 - max(len(c.attack.name) for c in suite.cells)
    full = room // _FULL >= min(6, len(suite.schemes))
    beside = max(1, room // (_FULL if full else _SHORT))
    parts: list[RenderableType] = []
    for start in range(0, len(suite.schemes), beside):
        parts.append(_attack_table(suite, suite.schemes[start : start + beside], full=full))
    legend = ", ".join(f"{mark} {verdict}" for verdict, (_, mark) in _STYLE.items())
    parts += [
        Text(f"{'success | chance' if full else 'success'}, in %. {legend}; ! not as promised", style="dim"),
        _summary_table(suite),
        Text(_interval_note(suite), style="dim"),
        _cost_table(suite),
        _planted_table(suite),
        _active_table(suite),
        _not_hidden_table(),
    ]
    return Group(*parts)


def _interval_note(suite: Suite) -> str:
    outside, promised = suite.outside
    return (
        f"{promised} cells are promised to be hidden. In {outside} of them chance lies outside the cell's own "
        f"{CONFIDENCE:.0%} interval; {promised * (1 - CONFIDENCE):.1f} are expected to, by chance. A cell counts as "
        f"broken only if chance alone does as well less than once in {1 / FALSE_ALARM:,.0f} times."
    )


_SUMMARY = ("scheme", "hides rows from", "their attacks that fail", "attacks of others that succeed", "as promised")


def _summary_rows(suite: Suite) -> list[tuple[str, ...]]:
    """A line per scheme."""
    rows: list[tuple[str, ...]] = []
    needs = {"helper": 1, "executor+helper": 1, "all but a helper": 2}
    for scheme in suite.schemes:
        cells = [c for c in suite.cells if c.scheme is scheme]
        held = [c for c in cells if c.promised and c.verdict is not Verdict.ABSENT]
        fell = [c for c in cells if not c.promised and not c.attack.by_design and c.outcome and c.outcome.broken]
        by: dict[str, int] = {}
        for cell in fell:
            by[cell.attack.party] = by.get(cell.attack.party, 0) + 1
        rows.append(
            (
                scheme.name,
                ", ".join(p for p in PARTIES if p in scheme.hides_from and scheme.helpers >= needs.get(p, 0)),
                f"{sum(c.verdict is Verdict.HIDDEN for c in held)} of {len(held)}",
                ", ".join(f"{count} by {party}" for party, count in by.items()) or "none",
                "yes" if all(c.expected for c in cells) else "NO",
            )
        )
    return rows


def _summary_table(suite: Suite) -> Table:
    table = Table(title="What that means", title_justify="left")
    for name in _SUMMARY:
        table.add_column(name)
    for row in _summary_rows(suite):
        table.add_row(*row, style=None if row[-1] == "yes" else "bold red")
    return table


def _attack_table(suite: Suite, schemes: Sequence[Scheme], *, full: bool) -> Table:
    table = Table(title="Attacks against masking schemes", title_justify="left", pad_edge=False)
    table.add_column("attack", no_wrap=True)
    for scheme in schemes:
        table.add_column(scheme.name.replace(" × ", "\n× "), justify="right", no_wrap=True)
    attacks = list(dict.fromkeys(c.attack for c in suite.cells))
    for party in dict.fromkeys(a.party for a in attacks):
        table.add_section()
        table.add_row(Text(f"by {party}", style="bold"))
        for attack in (a for a in attacks if a.party == party):
            cells = [_cell_text(suite.cell(attack.name, scheme.name), full=full) for scheme in schemes]
            table.add_row(attack.name, *cells)
    return table


def _cell_text(cell: Cell, *, full: bool) -> Text:
    style, mark = _STYLE[cell.verdict]
    alarm = "" if cell.expected else " !"
    if cell.outcome is None:
        return Text(mark + alarm, style=style)
    success, chance = (f"{100 * rate:.1f}" for rate in (cell.outcome.success, cell.outcome.chance))
    return Text.assemble((success, style), (f" | {chance} " if full else " ", "dim"), (mark + alarm, style))


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
h2{margin-top:2.5rem;border-bottom:1px solid #ddd;padding-bottom:.2rem}
table{border-collapse:collapse;margin:1rem 0;font-size:13px}td,th{border:1px solid #ddd;padding:3px 8px;text-align:left}
th{background:#f4f4f5}.party{background:#f4f4f5;font-weight:600}.cells td+td{white-space:nowrap;text-align:right}
.hidden{background:#dcfce7}.broken{background:#fee2e2}.resisted{background:#fef9c3}.by-design{background:#cffafe}
.nothing-to-see{color:#777}.alarm{outline:3px solid #b91c1c}.wide{overflow-x:auto}
.legend span{padding:2px 8px;margin-right:.5rem;font-size:13px}.state{padding:.6rem 1rem;border-radius:6px}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(460px,1fr))}figure{margin:.5rem 0}
svg{max-width:100%;height:auto}small{color:#555}
"""


def to_html(suite: Suite) -> str:
    """One page that needs nothing else: pictures are inline SVG."""
    state = "Every verdict is the promised one." if suite.as_expected else "Some verdicts are NOT as promised."
    kind = "hidden" if suite.as_expected else "broken"
    sections = [
        "<h1>Threat model: what each party learns</h1>",
        f'<p class="state {kind}"><strong>{state}</strong></p>',
        _html_table(_SUMMARY, _summary_rows(suite)),
        f"<p><small>{escape(_interval_note(suite))}</small></p>",
        "<h2>Attacks against masking schemes</h2>",
        _html_cells(suite),
        "<h2>Noise removal against pool size</h2>",
        "<p><small>The paper counts combinations over layers; the work is a sum over layers.</small></p>",
        _pictures(_pool_charts(suite)),
        "<h2>How much a Gaussian mask hides</h2>",
        _html_leakage(suite),
        "<h2>Stolen adapters</h2>",
        _pictures(_adapter_charts(suite)),
        "<h2>Telling two rows apart</h2>",
        _pictures(_roc_charts(suite)),
        "<h2>Every attack</h2><p><small>Whiskers: 99 % interval; dashes: chance.</small></p>",
        _pictures(_attack_charts(suite)),
        "<h2>Planted faults</h2>",
        _html_table(
            ("fault", "breaks", "attack", "success", "chance", "found"),
            [_planted_row(p) for p in suite.planted],
        ),
        "<h2>Active adversaries</h2>",
        _pictures([_forgery_chart(suite)]),
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


def _pictures(charts: Sequence[str]) -> str:
    return f'<div class="pictures">{"".join(f"<figure>{chart}</figure>" for chart in charts)}</div>'


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(h)}</th>' for h in head)}</tr>{body}</table>"


def _html_cells(suite: Suite) -> str:
    head = "".join(f"<th>{escape(s.name)}</th>" for s in suite.schemes)
    rows = []
    attacks = list(dict.fromkeys(c.attack for c in suite.cells))
    for party in dict.fromkeys(a.party for a in attacks):
        rows.append(f'<tr><td class="party" colspan="{len(suite.schemes) + 1}">by {party}</td></tr>')
        for attack in (a for a in attacks if a.party == party):
            cells = "".join(_html_cell(suite.cell(attack.name, scheme.name)) for scheme in suite.schemes)
            rows.append(f"<tr><td>{escape(attack.name)}</td>{cells}</tr>")
    legend = "".join(
        f'<span class="{verdict.replace(" ", "-")}">{mark} {verdict}</span>' for verdict, (_, mark) in _STYLE.items()
    )
    return (
        f'<p class="legend">{legend}<small>success, and what chance would score</small></p>'
        f'<div class="wide"><table class="cells"><tr><th>attack</th>{head}</tr>{"".join(rows)}</table></div>'
    )


def _html_cell(cell: Cell) -> str:
    kind = cell.verdict.replace(" ", "-") + ("" if cell.expected else " alarm")
    o, mark = cell.outcome, _STYLE[cell.verdict][1]
    text = mark if o is None else f"{o.success:.1%} {mark}<br><small>chance {o.chance:.1%}</small>"
    return f'<td class="{kind}" title="{cell.verdict}">{text}</td>'


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
    console.print(render(suite, width=console.width))


__all__ = ["render", "security_table", "show", "to_html", "to_json"]
