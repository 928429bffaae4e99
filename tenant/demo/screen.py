"""The demo's last screen: a loss curve, a before and after, and the claims."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tenant.demo.claims import Figures, claims, per_token
from tenant.ledger import size

_BLOCKS = " ▁▂▃▄▅▆▇█"
_CURVE_WIDTH, _CURVE_HEIGHT = 64, 6


def show(console: Console, f: Figures) -> bool:
    """Print everything; True if every claim holds."""
    judged = claims(f)
    console.print(Panel(_curve(f.losses), title="training loss, masked, nats per token", title_align="left"))
    console.print(_before_after(f))
    table = Table(title="claims, each computed from this run", title_justify="left", expand=True)
    table.add_column("")
    table.add_column("claim", ratio=3)
    table.add_column("figure", ratio=2)
    for claim in judged:
        table.add_row("[green]✓[/]" if claim.holds else "[red]✗[/]", claim.sentence, claim.figure)
    console.print(table)
    console.print(_cost(f))
    failed = sum(not claim.holds for claim in judged)
    if failed:
        console.print(f"[bold red]{failed} of {len(judged)} claims failed[/]")
    else:
        console.print(f"[bold green]all {len(judged)} claims hold[/] in {sum(f.seconds.values()):.0f} s")
    return not failed


def _curve(values: Sequence[float]) -> Text:
    """A bar chart in text: every column a step (or the mean of a few), labelled with first and last value."""
    per_column = -(-len(values) // _CURVE_WIDTH)
    groups = [values[i : i + per_column] for i in range(0, len(values), per_column)]
    means = [sum(group) / len(group) for group in groups]
    low, high = min(means), max(means)
    units = _CURVE_HEIGHT * (len(_BLOCKS) - 1)
    levels = [1 + round((mean - low) / (high - low or 1.0) * (units - 1)) for mean in means]
    rows = []
    for row in reversed(range(_CURVE_HEIGHT)):
        fills = (min(max(level - row * (len(_BLOCKS) - 1), 0), len(_BLOCKS) - 1) for level in levels)
        label = f"{high:7.3f} " if row == _CURVE_HEIGHT - 1 else f"{low:7.3f} " if row == 0 else " " * 8
        rows.append(label + "".join(_BLOCKS[fill] for fill in fills))
    rows.append(" " * 8 + f"step 1 … {len(values)}")
    return Text("\n".join(rows), style="cyan")


def _before_after(f: Figures) -> Table:
    table = Table(expand=True, title="on held-out private text", title_justify="left")
    table.add_column("")
    table.add_column("perplexity", justify="right")
    table.add_column(Text(f"greedy continuation of {f.prompt!r}"), ratio=1)
    table.add_row("before", f"{f.perplexity_before:.2f}", Text(" ".join(f.text_before.split())))
    table.add_row("after", f"{f.perplexity_after:.2f}", Text(" ".join(f.text_after.split())))
    return table


def _cost(f: Figures) -> Group:
    per = per_token(f)
    lines = [
        f"training, per token (forward and backward): {per['training_round_trips']:.3f} round trips, "
        f"{size(per['training_bytes_up'])} up, {size(per['training_bytes_down'])} down, "
        f"{size(per['training_effect_bytes'])} of effects",
        f"generation, per token: {per['generation_round_trips']:.1f} round trips, "
        f"{size(per['generation_bytes_up'])} up, {size(per['generation_bytes_down'])} down",
        f"base model on the tenant: {size(f.tenant_bytes)} of {size(f.full_bytes)} "
        f"({f.tenant_bytes / f.full_bytes:.1%})",
        "not hidden from providers: row counts, timing, stage, when generation ends (docs/threat-model.md)",
    ]
    return Group(*lines)
