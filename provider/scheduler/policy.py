"""What an operator chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["none", "lockstep", "opportunistic"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How jobs are batched and how long they wait for company.

    Args:
        name: `none`, `lockstep` or `opportunistic`.
        max_batch_rows: rows of one product.
        slice_s: what one product may be expected to take.
        wait_share: the share of its own product's time that a job waits for company, at most.
        max_wait_s: and never longer than this.
        lockstep_wait_s: how long `lockstep` waits for a tenant.
        inference_weight: how much more of the executor inference gets than fine-tuning when both want all of it.
    """

    name: PolicyName = "opportunistic"
    max_batch_rows: int = 16_384
    slice_s: float = 0.02
    wait_share: float = 0.5
    max_wait_s: float = 0.005
    lockstep_wait_s: float = 0.1
    inference_weight: float = 4.0
