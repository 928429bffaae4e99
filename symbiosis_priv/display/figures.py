"""Small pictures as inline SVG: no plotting library, no external resource, readable in print and on screens."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 460, 260, 56, 44, 30, 14
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Bar:
    """One rate, with its confidence interval and the chance level."""

    label: str
    value: float
    low: float
    high: float
    chance: float
    colour: str


def bars(title: str, values: Sequence[Bar], label: str) -> str:
    """A picture with one bar per rate, a whisker per interval, and a dash at the chance level. `label` is that of the
    axis, from 0 to 1."""
    parts = [_text(_LEFT, 18, title, 'font-weight="bold"')]
    for tick in _TICKS:
        parts.append(_line((_LEFT, _y(tick)), (_WIDTH - _RIGHT, _y(tick)), 'stroke="#ddd"'))
        parts.append(_text(_LEFT - 6, _y(tick) + 4, f"{tick:.3g}", 'text-anchor="end"'))
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(values))
    for i, bar in enumerate(values):
        left, width = _LEFT + step * (i + 0.2), step * 0.6
        top, middle = _y(bar.value), left + width / 2
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_HEIGHT - _BOTTOM - top:.1f}" '
            f'fill="{bar.colour}"/>'
        )
        parts.append(_line((middle, _y(bar.low)), (middle, _y(bar.high)), 'stroke="#111"'))
        ends = ((left - 3, _y(bar.chance)), (left + width + 3, _y(bar.chance)))
        parts.append(_line(*ends, 'stroke="#111" stroke-width="2" stroke-dasharray="4 2"'))
        below = _HEIGHT - _BOTTOM + 12
        turned = f'transform="rotate(-28 {middle:.1f} {below})"'
        parts.append(_text(middle, below, bar.label, f'text-anchor="end" font-size="9" {turned}'))
    parts.append(_text(12, _HEIGHT / 2, label, f'transform="rotate(-90 12 {_HEIGHT / 2})" text-anchor="middle"'))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" '
        f'font-family="sans-serif" font-size="11"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _line(start: tuple[float, float], end: tuple[float, float], style: str) -> str:
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" {style}/>'


def _y(rate: float) -> float:
    return _HEIGHT - _BOTTOM - min(1.0, max(0.0, rate)) * (_HEIGHT - _BOTTOM - _TOP)
