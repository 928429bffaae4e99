"""The demo's measurements, the claims that are computed from them, and the summary in 80 columns."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from symbiosis_priv.errors import one_line
from tenant.model.ledger import size
from tenant.session.tally import Ledger
from tenant.training.quantisation_error import Quality

MIN_TOP1 = 0.99
MAX_PERPLEXITY_CHANGE = 0.01


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """All measurements of the demo. "Simulated" is the reference run.

    Args:
        losses, simulated_losses: of every step, in nats per token.
        perplexity_before, perplexity_after: of the masked model on private text, before and after training.
        held_out: True if that text was not trained on. Texts of a few lines are too short to hold out a part.
        tokens_before, tokens_after, tokens_simulated: greedy continuation without and with the adapter.
        quality: the masked model compared with the unquantised fp32 model, both with the adapter.
        successor: the executor that answered `recovery_s` seconds after the other was `killed`.
        tenant_bytes, offloaded_bytes, full_bytes: base model tensors on the tenant, those of offloaded layers among
            them, and the whole base model in the same precision.
    """

    losses: Sequence[float]
    simulated_losses: Sequence[float]
    perplexity_before: float
    perplexity_after: float
    held_out: bool
    adapter_tensors: int
    adapter_tensors_equal: int
    tokens_before: tuple[int, ...]
    tokens_after: tuple[int, ...]
    tokens_simulated: tuple[int, ...]
    prompt: str
    text_before: str
    text_after: str
    quality: Quality
    ledger: Ledger
    trained_tokens: int
    generation: Ledger
    killed: str | None
    successor: str | None
    recovery_s: float
    tampered: int
    tampered_rejected: int
    tenant_bytes: int
    offloaded_bytes: int
    full_bytes: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Claim:
    """A claim: a sentence, a figure, and True if the claim holds."""

    sentence: str
    figure: str
    holds: bool


def claims(f: Measurements) -> list[Claim]:
    steps = len(f.losses)
    return [
        Claim(
            "losses are bit-identical to the unmasked reference's",
            f"{sum(a == b for a, b in zip(f.losses, f.simulated_losses, strict=True))} of {steps} steps",
            steps > 0 and f.losses == f.simulated_losses,
        ),
        Claim(
            "the adapter is bit-identical to the reference's",
            f"{f.adapter_tensors_equal} of {f.adapter_tensors} tensors",
            0 < f.adapter_tensors == f.adapter_tensors_equal,
        ),
        Claim(
            "generation is token-identical to the reference's",
            f"{sum(a == b for a, b in zip(f.tokens_after, f.tokens_simulated, strict=False))} of {len(f.tokens_after)}",
            len(f.tokens_after) > 0 and f.tokens_after == f.tokens_simulated,
        ),
        Claim(
            f"first choices agree with unquantised fp32, at least {MIN_TOP1:.0%}",
            f"{f.quality.top1:.2%} of {f.quality.tokens:,}",
            f.quality.top1 >= MIN_TOP1,
        ),
        Claim(
            f"perplexity is within {MAX_PERPLEXITY_CHANGE:.0%} of unquantised fp32",
            f"{f.quality.perplexity_change:+.3%}",
            abs(f.quality.perplexity_change) < MAX_PERPLEXITY_CHANGE,
        ),
        Claim(
            "every answer and effect was verified, none was wrong",
            f"{f.ledger.answers_verified:,} + {f.ledger.effects_verified:,}",
            f.ledger.answers_verified == f.ledger.rows > 0
            and f.ledger.effects_verified >= f.ledger.rows
            and not f.ledger.answers_rejected,
        ),
        Claim(
            f"{f.killed} was killed in mid-training; {f.successor} took over",
            f"in {f.recovery_s:.2f} s",
            None not in (f.killed, f.successor) and f.killed != f.successor,
        ),
        Claim(
            "every answer tampered with on purpose was refused",
            f"{f.tampered_rejected} of {f.tampered}",
            0 < f.tampered == f.tampered_rejected,
        ),
        Claim(
            "one round trip per product of a group of layers",
            f"{f.ledger.executor_round_trips:,} for {f.ledger.products:,}",
            f.ledger.executor_round_trips == f.ledger.products > 0,
        ),
        Claim("no weight of an offloaded layer is on the tenant", f"{f.offloaded_bytes} bytes", f.offloaded_bytes == 0),
    ]


def to_json(figures: Measurements) -> dict[str, Any]:
    judged = claims(figures)
    passed = all(claim.holds for claim in judged)
    return {"passed": passed, "claims": [asdict(claim) for claim in judged], "figures": asdict(figures)}


_WIDTH, _TEXT_LINES = 80, 2
_COSTS = {
    "round trips": "executor_round_trips",
    "to executor": "bytes_to_executors",
    "from executor": "bytes_from_executors",
    "effects": "bytes_from_helpers",
}


def show(console: Console, f: Measurements) -> bool:
    """Print the summary. Returns True if every claim holds."""
    judged = claims(f)
    width = min(console.width, _WIDTH)

    def section(title: str, *parts: RenderableType) -> None:
        console.print(Text(f"\n{title}", style="bold"), width=width)
        for part in parts:
            console.print(Padding(part, (0, 1)), width=width)

    losses = f"{f.losses[0]:.3f} at the first step, {f.losses[-1]:.3f} at the last"
    section("loss of masked training, nats per token", Text(losses))
    room, texts = _TEXT_LINES * (width - 12), _grid()
    for label, text in (("prompt", f.prompt), ("before", f.text_before), ("after", f.text_after)):
        words = one_line(text)
        shown = Text(words if len(words) <= room else words[: room - 4] + " ...")
        texts.add_row(Text(label, style="dim"), shown)
    where = "held-out private text" if f.held_out else "the training text (too short to split)"
    section(f"perplexity {f.perplexity_before:.2f} before, {f.perplexity_after:.2f} after, on {where}", texts)
    marks, verdicts = "+-" if console.options.ascii_only else "✓✗", _grid()
    verdicts.add_column(justify="right")
    for claim in judged:
        mark = Text(marks[0], style="bold green") if claim.holds else Text(marks[1], style="bold red")
        verdicts.add_row(mark, claim.sentence, claim.figure, style="" if claim.holds else "red")
    section("claims, each computed from this run", verdicts)
    cost = Table("per token", *_COSTS, box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), show_edge=False)
    for stage, ledger, tokens in (
        ("in training", f.ledger, f.trained_tokens),
        ("in generation", f.generation, len(f.tokens_after)),
    ):
        trips, *sizes = (getattr(ledger, name) / max(tokens, 1) for name in _COSTS.values())
        cost.add_row(stage, f"{trips:.3f}", *map(size, sizes))
    share = f.tenant_bytes / f.full_bytes
    memory = f"base model in memory: {size(f.tenant_bytes)} on the tenant, of {size(f.full_bytes)} ({share:.1%})"
    section("cost", cost, Text(memory), Text("visible to providers: row counts, timing, stage, when generation ends"))
    failed, seconds = sum(not claim.holds for claim in judged), sum(f.seconds.values())
    if failed:
        console.print(f"\n[bold red]{failed} of {len(judged)} claims failed[/] in {seconds:.0f} s")
    else:
        console.print(f"\n[bold green]all {len(judged)} claims hold[/] in {seconds:.0f} s")
    return not failed


def _grid() -> Table:
    grid = Table(box=None, show_header=False, expand=True, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column()
    grid.add_column(ratio=1)
    return grid
