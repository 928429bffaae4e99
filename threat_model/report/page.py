"""A suite's figures as one HTML page, with pictures as inline SVG."""

import math
from collections.abc import Sequence
from html import escape

from symbiosis_priv.display import figures
from symbiosis_priv.display.figures import Axis, Bar
from threat_model.evidence.statistics import gaussian_channel_bits
from threat_model.report.tables import MARKS, interval_note, last_sections, noise_scales, pool_cells, summary
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


_CSS = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
h2{margin-top:2.5rem;border-bottom:1px solid #ddd;padding-bottom:.2rem}
table{border-collapse:collapse;margin:1rem 0;font-size:13px}td,th{border:1px solid #ddd;padding:3px 8px;text-align:left}
th{background:#f4f4f5}.party{background:#f4f4f5;font-weight:600}.cells td+td{white-space:nowrap;text-align:right}
.hidden{background:#dcfce7}.broken{background:#fee2e2}.resisted{background:#fef9c3}.by-design{background:#cffafe}
.absent{color:#777}.alarm{outline:3px solid #b91c1c}.wide{overflow-x:auto}
.legend span{padding:2px 8px;margin-right:.5rem;font-size:13px}.state{padding:.6rem 1rem;border-radius:6px}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(460px,1fr))}figure{margin:.5rem 0}
svg{max-width:100%;height:auto}small{color:#555}
"""


def to_html(suite: Suite) -> str:
    """The report as one self-contained HTML page. Pictures are inline SVG."""
    state = "Every verdict is the promised one." if suite.as_expected else "Some verdicts are NOT as promised."
    kind = "hidden" if suite.as_expected else "broken"
    sections = [
        "<h1>Threat model: what each party learns</h1>",
        f'<p class="state {kind}"><strong>{state}</strong></p>',
        _html_table(summary(suite).headings, summary(suite).rows),
        f"<p><small>{escape(interval_note(suite))}</small></p>",
        "<h2>Attacks against masking schemes</h2>",
        _html_cells(suite),
        "<h2>Noise removal against pool size</h2>",
        "<p><small>The paper counts combinations over layers; the work is a sum over layers.</small></p>",
        _pictures(pool_charts(suite)),
        "<h2>How much a Gaussian mask hides</h2>",
        _html_leakage(suite),
        "<h2>Stolen adapters</h2>",
        _pictures(adapter_charts(suite)),
        "<h2>Telling two rows apart</h2>",
        _pictures(roc_charts(suite)),
        "<h2>Every attack</h2><p><small>Whiskers: 99 % interval; dashes: chance.</small></p>",
        _pictures(attack_charts(suite)),
        "<h2>Fault attribution with few columns</h2>",
        _pictures([forgery_chart(suite)]),
        *(f"<h2>{escape(s.title)}</h2>{_html_table(s.headings, s.rows)}" for s in last_sections(suite)),
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
            row = f"<tr><td>{escape(attack.name)}</td>"
            for cell in (suite.cell(attack.name, scheme.name) for scheme in suite.schemes):
                kind = _css(cell.verdict) + ("" if cell.expected else " alarm")
                o, mark = cell.outcome, MARKS[cell.verdict]
                text = mark if o is None else f"{o.success:.1%} {mark}<br><small>chance {o.chance:.1%}</small>"
                row += f'<td class="{kind}" title="{cell.verdict}">{text}</td>'
            rows.append(row + "</tr>")
    legend = "".join(f'<span class="{_css(verdict)}">{mark} {verdict}</span>' for verdict, mark in MARKS.items())
    return (
        f'<p class="legend">{legend}<small>success, and what chance would score</small></p>'
        f'<div class="wide"><table class="cells"><tr><th>attack</th>{head}</tr>{"".join(rows)}</table></div>'
    )


def _css(verdict: Verdict) -> str:
    """The class of a verdict in the page's style sheet."""
    return verdict.name.lower().replace("_", "-")


def _html_leakage(suite: Suite) -> str:
    rows = []
    for scale in noise_scales(suite):
        cells = [
            c
            for c in pool_cells(suite, "candidate subtraction, forward")
            if c.scheme.options["masking_options"]["noise_scale"] == scale
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
