"""Bars of `bench provider` as an SVG file, which needs no library to draw and none to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from tenant.bench.tenants import POLICIES, Figures

_COLOURS = dict(zip(POLICIES, ("#999999", "#e69f00", "#0072b2"), strict=True))  # told apart by everybody
_BAR, _GAP, _HEIGHT, _MARGIN = 26, 24, 180, 48


def draw(results: Sequence[Figures], path: Path) -> None:
    """Tokens per second above, median milliseconds of a token below; a group of bars per number of tenants."""
    groups = list(dict.fromkeys((figures.generating, figures.training) for figures in results))
    width = 2 * _MARGIN + len(groups) * (len(POLICIES) * _BAR + _GAP)
    top = _chart(results, groups, "tokens/s", lambda f: f.tokens_per_s, offset=_MARGIN)
    below = _chart(results, groups, "ms per token, median", _median, offset=_HEIGHT + 2 * _MARGIN)
    height = 2 * _HEIGHT + 4 * _MARGIN
    legend = "".join(
        _text(_MARGIN + 100 * i + 16, height - 12, policy) + _bar(_MARGIN + 100 * i, height - 22, 12, 12, policy)
        for i, policy in enumerate(POLICIES)
    )
    size = f'width="{max(width, 360)}" height="{height}"'
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{top}{below}{legend}</svg>\n',
        encoding="utf-8",
    )


def _median(figures: Figures) -> float:
    return figures.token_ms[0] if figures.token_ms else 0.0


def _chart(
    results: Sequence[Figures],
    groups: Sequence[tuple[int, int]],
    title: str,
    value: Callable[[Figures], float],
    *,
    offset: int,
) -> str:
    top = max([value(figures) for figures in results] + [1e-9])
    parts = [_text(_MARGIN, offset - 16, title)]
    for number, group in enumerate(groups):
        left = _MARGIN + number * (len(POLICIES) * _BAR + _GAP)
        parts.append(_text(left, offset + _HEIGHT + 14, f"{group[0]} + {group[1]} tenants"))
        for figures in results:
            if (figures.generating, figures.training) == group:
                height = value(figures) / top * _HEIGHT
                x = left + POLICIES.index(figures.policy) * _BAR
                parts.append(_bar(x, offset + _HEIGHT - height, _BAR - 3, height, figures.policy))
                parts.append(_text(x, offset + _HEIGHT - height - 3, f"{value(figures):,.0f}"))
    return "".join(parts)


def _bar(x: float, y: float, width: float, height: float, policy: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width}" height="{height:.1f}" fill="{_COLOURS[policy]}"/>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
