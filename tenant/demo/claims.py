"""The demo's measurements and claims. Every claim is computed from measurements of the current run."""

from dataclasses import asdict, dataclass
from typing import Any

from tenant.session.tally import Ledger
from tenant.training.quantisation_error import Quality

MIN_TOP1 = 0.99
MAX_PERPLEXITY_CHANGE = 0.01


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """All measurements of the demo.

    Args:
        losses: loss of every step of the masked run, in nats per token.
        simulated_losses: loss of every step of the reference run.
        perplexity_before, perplexity_after: perplexity of the masked model on private text, before and after training.
        held_out: True if the text for perplexity was not trained on. Texts of a few lines are too short to hold out a
            part.
        adapter_tensors, adapter_tensors_equal: number of adapter tensors, and how many are equal in both runs.
        tokens_before, tokens_after: greedy continuation by the masked model, without and with the adapter.
        tokens_simulated: greedy continuation by the reference with its adapter.
        text_before, text_after: `tokens_before` and `tokens_after`, decoded.
        quality: comparison of the masked model and the unquantised fp32 model, both with the adapter.
        trained_tokens: number of tokens in masked training.
        killed: the executor that was killed in the middle of training.
        successor: the executor that answered in its place.
        recovery_s: seconds from the kill to the first answer of the successor.
        tampered, tampered_rejected: number of altered answers, and number of those that were refused.
        tenant_bytes: bytes of base model tensors on the tenant.
        offloaded_bytes: bytes of offloaded layers among `tenant_bytes`.
        full_bytes: bytes of the whole base model in the same precision.
        seconds: duration of each stage.
    """

    losses: tuple[float, ...]
    simulated_losses: tuple[float, ...]
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
    """Return the claims about these measurements."""
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
    """Return all measurements and claims as JSON values."""
    judged = claims(figures)
    return {
        "passed": all(claim.holds for claim in judged),
        "claims": [asdict(claim) for claim in judged],
        "figures": asdict(figures),
        "per_token": per_token(figures),
    }


def per_token(f: Measurements) -> dict[str, float]:
    """Return round trips and bytes per trained token (forward and backward) and per generated token."""
    trained, generated = max(f.trained_tokens, 1), max(len(f.tokens_after), 1)
    return {
        "training_round_trips": f.ledger.executor_round_trips / trained,
        "training_bytes_up": f.ledger.bytes_to_executors / trained,
        "training_bytes_down": f.ledger.bytes_from_executors / trained,
        "training_effect_bytes": f.ledger.bytes_from_helpers / trained,
        "generation_round_trips": f.generation.executor_round_trips / generated,
        "generation_bytes_up": f.generation.bytes_to_executors / generated,
        "generation_bytes_down": f.generation.bytes_from_executors / generated,
        "generation_effect_bytes": f.generation.bytes_from_helpers / generated,
    }
