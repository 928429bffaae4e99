"""The picture of `bench provider`: what each policy gives to so many tenants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from symbiosis_priv.display import figures
from symbiosis_priv.display.figures import COLOURS, Axis, Bar
from symbiosis_priv.system.files import write_atomically
from tenant.bench.tenants import Figures

_POLICIES = ("none", "lockstep", "opportunistic")


def draw(results: Sequence[Figures], path: Path) -> None:
    """Tokens per second above, median milliseconds of a token below; a bar per policy and number of tenants."""
    pictures = [
        _bars(results, "tokens per second", lambda f: f.tokens_per_s),
        _bars(results, "milliseconds of a token, median", lambda f: f.token_ms[1] if f.token_ms else 0.0),
    ]
    write_atomically(path, figures.stacked(pictures).encode())


def _bars(results: Sequence[Figures], title: str, value: Callable[[Figures], float]) -> str:
    bars = [
        Bar(f"{f.variant}, {_who(f)}", value(f), colour=COLOURS[_POLICIES.index(f.variant.policy)])
        for f in sorted(
            results,
            key=lambda f: (f.generating + f.training, f.generating_rows, _POLICIES.index(f.variant.policy)),
        )
    ]
    return figures.bars(title, bars, Axis(title, 0.0, max(bar.value for bar in bars) or 1.0))


def _who(figures: Figures) -> str:
    sizes = figures.generating_rows
    batches = f" x {sizes[0]}-{sizes[-1]} rows" if sizes and sizes != (1,) else ""
    return f"{figures.generating}{batches} + {figures.training}"
