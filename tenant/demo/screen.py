"""The demo's summary in 80 columns: loss curve, texts before and after training, claims and costs."""

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from symbiosis_priv.errors import one_line
from tenant.demo.claims import Claim, Measurements, claims, per_token
from tenant.model.ledger import size

_WIDTH = 80
_CURVE_WIDTH, _CURVE_HEIGHT = 64, 6
_BLOCKS, _ASCII_BLOCKS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_TEXT_LINES = 2


def show(console: Console, f: Measurements) -> bool:
    """Print the summary. Returns True if every claim holds."""
    ascii_only = console.options.ascii_only
    judged = claims(f)
    width = min(console.width, _WIDTH)
    parts: list[tuple[str, RenderableType]] = [
        ("loss of masked training, nats per token", _curve(f.losses, _ASCII_BLOCKS if ascii_only else _BLOCKS)),
        (_perplexity_title(f), _before_after(f, width)),
        ("claims, each computed from this run", _claims(judged, "+-" if ascii_only else "✓✗")),
        ("cost", _cost(f)),
    ]
    for title, part in parts:
        console.print(Text(f"\n{title}", style="bold"), width=width)
        console.print(Padding(part, (0, 1)), width=width)
    failed = sum(not claim.holds for claim in judged)
    seconds = sum(f.seconds.values())
    if failed:
        console.print(f"\n[bold red]{failed} of {len(judged)} claims failed[/] in {seconds:.0f} s")
    else:
        console.print(f"\n[bold green]all {len(judged)} claims hold[/] in {seconds:.0f} s")
    return not failed


def _curve(values: Sequence[float], blocks: str) -> Text:
    """Return a bar chart as text. A column is one step, or the mean of several; labels show the highest and lowest
    value."""
    per_column = -(-len(values) // _CURVE_WIDTH)
    groups = [values[i : i + per_column] for i in range(0, len(values), per_column)]
    means = [sum(group) / len(group) for group in groups]
    wide = max(1, _CURVE_WIDTH // len(means))
    low, high = min(means), max(means)
    full = len(blocks) - 1
    units = _CURVE_HEIGHT * full
    levels = [1 + round((mean - low) / (high - low or 1.0) * (units - 1)) for mean in means]
    rows = []
    for row in reversed(range(_CURVE_HEIGHT)):
        fills = (min(max(level - row * full, 0), full) for level in levels)
        label = f"{high:7.3f} " if row == _CURVE_HEIGHT - 1 else f"{low:7.3f} " if row == 0 else " " * 8
        rows.append(label + "".join(blocks[fill] * wide for fill in fills))
    last = str(len(values))
    rows.append(" " * 8 + "step 1" + last.rjust(wide * len(means) - 6))
    return Text("\n".join(rows), style="cyan", no_wrap=True, overflow="crop")


def _perplexity_title(f: Measurements) -> str:
    where = "held-out private text" if f.held_out else "the training text (too short to split)"
    return f"perplexity {f.perplexity_before:.2f} before, {f.perplexity_after:.2f} after, on {where}"


def _before_after(f: Measurements, width: int) -> Table:
    table = _grid()
    table.add_column(style="dim")
    table.add_column(ratio=1)
    room = _TEXT_LINES * (width - 12)
    table.add_row("prompt", Text(_shortened(f.prompt, room)))
    table.add_row("before", Text(_shortened(f.text_before, room)))
    table.add_row("after", Text(_shortened(f.text_after, room)))
    return table


def _shortened(text: str, room: int) -> str:
    words = one_line(text)
    return words if len(words) <= room else words[: room - 4] + " ..."


def _claims(judged: Sequence[Claim], marks: str) -> Table:
    table = _grid()
    table.add_column()
    table.add_column(ratio=1)
    table.add_column(justify="right")
    for claim in judged:
        mark = Text(marks[0], style="bold green") if claim.holds else Text(marks[1], style="bold red")
        table.add_row(mark, claim.sentence, claim.figure, style="" if claim.holds else "red")
    return table


def _cost(f: Measurements) -> Group:
    per = per_token(f)
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("per token", ratio=1)
    for name in ("round trips", "to executor", "from executor", "effects"):
        table.add_column(name, justify="right")
    for stage, decimals in (("training", 3), ("generation", 1)):
        sizes = [size(per[f"{stage}_{name}"]) for name in ("bytes_up", "bytes_down", "effect_bytes")]
        table.add_row(f"in {stage}", f"{per[f'{stage}_round_trips']:.{decimals}f}", *sizes)
    share = f.tenant_bytes / f.full_bytes
    memory = f"\nbase model in memory: {size(f.tenant_bytes)} on the tenant, of {size(f.full_bytes)} ({share:.1%})"
    visible = "visible to providers: row counts, timing, stage, when generation ends"
    return Group(table, Text(memory), Text(visible))


def _grid() -> Table:
    return Table(box=None, show_header=False, expand=True, padding=(0, 1, 0, 0), pad_edge=False)
