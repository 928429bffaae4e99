"""Small pictures as inline SVG: no plotting library, no external resource, readable in print and on screens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7e22ce", "#b45309", "#475569")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 460, 260, 56, 44, 30, 14


@dataclass(frozen=True)
class Axis:
    """A labelled axis with its range; logarithmic if `log`."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Position of a value along the axis, from 0 to 1."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log10(max(v, 1e-300)) for v in (value, low, high))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self) -> list[float]:
        if not self.log:
            return [self.low + (self.high - self.low) * i / 4 for i in range(5)]
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        return [10.0**p for p in range(first, last + 1, max(1, (last - first) // 5))]


@dataclass(frozen=True)
class Bar:
    """One bar, with its confidence interval and the chance level if they are known."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    colour: str = COLOURS[0]


def lines(title: str, series: Mapping[str, Sequence[tuple[float, float]]], x: Axis, y: Axis) -> str:
    """A picture with one line per series and marked points."""
    body, names = [], []
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{_x(x, a):.1f},{_y(y, b):.1f}" for a, b in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) <= 12:
            body += [f'<circle cx="{_x(x, a):.1f}" cy="{_y(y, b):.1f}" r="3" fill="{colour}"/>' for a, b in points]
        look = f'text-anchor="end" fill="{colour}" stroke="#fff" stroke-width="4" paint-order="stroke"'  # before lines
        names.append(_text(_WIDTH - _RIGHT, _TOP + 14 + 14 * i, name, look))
    marks = [_text(_x(x, t), _HEIGHT - _BOTTOM + 16, f"{t:.3g}", 'text-anchor="middle"') for t in x.ticks()]
    return _frame(title, x.label, y, [*marks, *body, *names])


def bars(title: str, values: Sequence[Bar], y: Axis) -> str:
    """A picture with one bar per value, a whisker per interval, and a dash at the chance level."""
    body = []
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(values))
    for i, bar in enumerate(values):
        left, width = _LEFT + step * (i + 0.2), step * 0.6
        top, middle = _y(y, bar.value), left + width / 2
        body.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_HEIGHT - _BOTTOM - top:.1f}" '
            f'fill="{bar.colour}"/>'
        )
        if bar.low is not None and bar.high is not None:
            body.append(_line((middle, _y(y, bar.low)), (middle, _y(y, bar.high)), 'stroke="#111"'))
        if bar.chance is not None:
            ends = ((left - 3, _y(y, bar.chance)), (left + width + 3, _y(y, bar.chance)))
            body.append(_line(*ends, 'stroke="#111" stroke-width="2" stroke-dasharray="4 2"'))
        below = _HEIGHT - _BOTTOM + 12
        turned = f'transform="rotate(-28 {middle:.1f} {below})"'
        body.append(_text(middle, below, bar.label, f'text-anchor="end" font-size="9" {turned}'))
    return _frame(title, "", y, body)


def _frame(title: str, x_label: str, y: Axis, body: Sequence[str]) -> str:
    parts = [_text(_LEFT, 18, title, 'font-weight="bold"')]
    for tick, at in ((tick, _y(y, tick)) for tick in y.ticks()):
        parts.append(_line((_LEFT, at), (_WIDTH - _RIGHT, at), 'stroke="#ddd"'))
        parts.append(_text(_LEFT - 6, at + 4, f"{tick:.3g}", 'text-anchor="end"'))
    parts += body
    parts.append(_text((_WIDTH + _LEFT) / 2, _HEIGHT - 8, x_label, 'text-anchor="middle"'))
    parts.append(_text(12, _HEIGHT / 2, y.label, f'transform="rotate(-90 12 {_HEIGHT / 2})" text-anchor="middle"'))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" '
        f'font-family="sans-serif" font-size="11"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _line(start: tuple[float, float], end: tuple[float, float], style: str) -> str:
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" {style}/>'


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.place(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - axis.place(value) * (_HEIGHT - _BOTTOM - _TOP)
