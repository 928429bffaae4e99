"""The options of a split model, and those of its session. `RemoteConfig` (`tenant.model.hf`) has the fields of
`Options` and checks their values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from symbiosis_priv.checkpoints.layers import RoundTrips
from symbiosis_priv.limits import DEFAULT_RING_BITS, RingBits
from tenant.connections.channel import Wiretap
from tenant.routing.known_provider import USUAL, Tolerance

Experts = Literal["all", "flat", "local"]
"""Where the experts of a mixture run."""


MOST_ROWS: Final = 16
"""Most rows of a pass in two round trips per block (`Options.round_trips`)."""


@dataclass(kw_only=True)
class Options:
    """How to split a model.

    Args:
        federation: path of `federation.toml`. Not needed for "simulate".
        masking: name of the masking scheme (`tenant/masking/`):
            "pad" hides rows unless the executor and every helper of a pad collude (default);
            "local" hides rows from all providers, but the tenant needs the full checkpoint and does the providers' work
            ahead of time;
            "lwe" hides rows from a single provider under a lattice assumption, with gigabytes of hints on this machine
            (experimental; docs/lwe.md);
            "none" shows rows to every executor; for providers that you trust;
            "paper-pool" shows rows to every executor in practice (opt-in);
            "simulate" runs the same arithmetic on this machine, without providers.
        weight_bits: integer bits of a weight, for "simulate" only; otherwise the federation file sets them.
        ring_bits: bits of the integers on the wire: 32, or 24 for a quarter fewer bytes and rounding about as fine as
            bfloat16's (docs/benchmarks.md). None for `ring_bits` of the federation file, or 32. With the same
            `ring_bits`, results have the same bits under every masking.
        checkpoint: the full base checkpoint, if the model's folder holds only the tenant's tensors. It is read once, to
            make the verification keys.
        experts: where the experts of a mixture run (docs/experts.md). The router stays with the tenant in every mode:
            "all" sends every row to every expert, which shows nothing new and costs the number of experts divided by
            the number of experts per token, times more products and bytes;
            "flat" sends rows to their experts, filled with dummy rows to the largest count, which providers see; for
            training and prompts;
            "local" keeps the experts on the tenant, which needs the full checkpoint and the memory for them.
            By default "all" if it costs x4 or less, else "local"; loading logs the choice and its price.
        tied_head: offload the product of an LM head whose weight is the embedding table. The table stays with the
            tenant for look-ups. The providers must serve this product (`tied_head = true` under [model] of
            federation.toml). An LM head with a weight of its own is always offloaded.
        round_trips: round trips of a transformer block in passes without gradients of at most 16 rows, such as a
            decoded token: 2 sends two rows at a time, which pays over a distance (docs/federation.md). It needs
            providers with `round_trips = 2`. None for `round_trips` of the federation file, or 4. With the same
            `round_trips`, results have the same bits under every masking.
        deadline_s: seconds that one request may take, including reconnecting to a restarted provider. If a needed
            provider refuses the first connection of a session, the session gives up after 5 s.
        pool_memory_mib: memory in MiB for pads drawn ahead.
        row_bucket: row counts are rounded up to a multiple of this number, so that providers see rounded batch and
            prompt sizes only. The added rows cost time and traffic (rule 9 of the threat model).
        cache: folder for quantised weights and verification keys; the user's cache folder if None.
        masking_options: options of the masking scheme, by name; the scheme's module in `tenant/masking/` declares them.
        wiretap: an observer of every frame on the wire, for tests and reviewers.
    """

    federation: str | Path | None = None
    masking: str = "pad"
    weight_bits: int | None = None
    ring_bits: RingBits | None = None
    checkpoint: str | Path | None = None
    experts: Experts | None = None
    tied_head: bool = False
    round_trips: RoundTrips | None = None
    deadline_s: float = 120.0
    pool_memory_mib: int = 256
    row_bucket: int = 1
    cache: str | Path | None = None
    masking_options: Mapping[str, object] = field(default_factory=dict)
    wiretap: Wiretap | None = None


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Options of a session; those that are not listed here are as in `Options`.

    Args:
        masking: the name of a `SessionScheme`.
        pool_memory: bytes for pads that are drawn ahead.
        part_bytes: products of more than twice this size, rows and answers together, are sent in parts of about this
            size, over several connections.
        tolerance: when a provider counts as late, and how long a failed provider is not asked.
    """

    masking: str = "pad"
    deadline_s: float = 120.0
    pool_memory: int = 256 << 20
    row_bucket: int = 1
    ring_bits: RingBits = DEFAULT_RING_BITS
    part_bytes: int = 4 << 20
    tolerance: Tolerance = USUAL
    wiretap: Wiretap | None = None
