"""The options of a split model. `RemoteConfig` (`tenant.model.hf`) has the same fields, vetted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tenant.connections.channel import Wiretap
from tenant.core.verifier import DEFAULT_COLUMNS


@dataclass(kw_only=True)
class Options:
    """How to split a model.

    Args:
        federation: path of `federation.toml`. Not needed for "simulate".
        masking: the scheme's name, and so who can read your rows (`tenant/masking/`):
            "pad" nobody, unless the executor and every helper collude (default);
            "local" nobody at all, but the tenant needs the full checkpoint and does the providers' work ahead of time;
            "none" every executor; for providers you trust;
            "paper-pool" every executor, in practice (opt-in);
            "simulate" nobody: the same arithmetic on this machine, no providers.
        weight_bits: integer bits of a weight, for "simulate" only; otherwise the federation file says it.
        checkpoint: the full base checkpoint, when the model's own folder holds only the tenant's tensors. It is read
            once, to make the verification keys.
        deadline_s: how long one request may take in seconds, reconnecting to a restarted provider included.
            A needed provider that refuses the first connection of a session is given up after 5 s.
        pool_memory_mib: memory for pads drawn ahead.
        row_bucket: row counts are rounded up to a multiple of this before anything is sent, so that providers learn
            batch and prompt sizes only that finely. Costs the added rows (rule 9 of the threat model).
        verify_columns: m, of the keys that say who lied; whether something is wrong does not depend on them.
        cache: folder for quantised weights and verification keys; the user's cache folder if None.
        masking_options: options of the scheme itself, by name; its module in `tenant/masking/` declares them.
        status: a file that is kept up to date with how each provider is doing, for `symbiosis-priv federation top
            --status`; it holds names, states and counts, and is readable by you alone.
        wiretap: an observer of every frame on the wire, for tests and reviewers.
        surface: how messages name these options: as arguments in "python", or as flags of the "command line".
    """

    federation: str | Path | None = None
    masking: str = "pad"
    weight_bits: int | None = None
    checkpoint: str | Path | None = None
    deadline_s: float = 120.0
    pool_memory_mib: int = 256
    row_bucket: int = 1
    verify_columns: int = DEFAULT_COLUMNS
    cache: str | Path | None = None
    masking_options: Mapping[str, object] = field(default_factory=dict)
    status: str | Path | None = None
    wiretap: Wiretap | None = None
    surface: Literal["python", "command line"] = "python"

    def option(self, name: str, example: str | None = None) -> str:
        """What the user would write to set an option, to `example` for instance."""
        if self.surface == "python":
            return f"RemoteConfig({name}={'...' if example is None else repr(example)})"
        return f"--{name.replace('_', '-')}" + (f" {example}" if example else "")
