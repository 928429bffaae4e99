"""A suite's figures as one HTML page."""

import math
from collections.abc import Sequence
from html import escape

from threat_model.evidence.statistics import gaussian_channel_bits
from threat_model.report import charts
from threat_model.report.sections import MARKS, interval_note, last_sections, noise_scales, pool_cells, summary
from threat_model.suite import Cell, Suite, Verdict

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
        _pictures(charts.pool_charts(suite)),
        "<h2>How much a Gaussian mask hides</h2>",
        _html_leakage(suite),
        "<h2>Stolen adapters</h2>",
        _pictures(charts.adapter_charts(suite)),
        "<h2>Telling two rows apart</h2>",
        _pictures(charts.roc_charts(suite)),
        "<h2>Every attack</h2><p><small>Whiskers: 99 % interval; dashes: chance.</small></p>",
        _pictures(charts.attack_charts(suite)),
        "<h2>Fault attribution with few columns</h2>",
        _pictures([charts.forgery_chart(suite)]),
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
            cells = "".join(_html_cell(suite.cell(attack.name, scheme.name)) for scheme in suite.schemes)
            rows.append(f"<tr><td>{escape(attack.name)}</td>{cells}</tr>")
    legend = "".join(f'<span class="{_css(verdict)}">{mark} {verdict}</span>' for verdict, mark in MARKS.items())
    return (
        f'<p class="legend">{legend}<small>success, and what chance would score</small></p>'
        f'<div class="wide"><table class="cells"><tr><th>attack</th>{head}</tr>{"".join(rows)}</table></div>'
    )


def _css(verdict: Verdict) -> str:
    """The class of a verdict in the page's style sheet."""
    return verdict.name.lower().replace("_", "-")


def _html_cell(cell: Cell) -> str:
    kind = _css(cell.verdict) + ("" if cell.expected else " alarm")
    o, mark = cell.outcome, MARKS[cell.verdict]
    text = mark if o is None else f"{o.success:.1%} {mark}<br><small>chance {o.chance:.1%}</small>"
    return f'<td class="{kind}" title="{cell.verdict}">{text}</td>'


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
