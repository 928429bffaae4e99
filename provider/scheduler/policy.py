"""The operator's options of the scheduler."""

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["none", "lockstep", "opportunistic"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How jobs are batched, and how long they wait to be batched.

    Args:
        name: `none`, `lockstep` or `opportunistic`.
        max_batch_rows: largest number of rows of a product.
        slice_s: the longest time that a product should take, in seconds.
        wait_share: a job waits to be batched for at most this share of the time of its own product.
        max_wait_s: longest time for which a job waits to be batched.
        lockstep_wait_s: longest time for which `lockstep` waits for a tenant.
        inference_weight: executor time of inference relative to fine-tuning when both have enough work.
    """

    name: PolicyName = "opportunistic"
    max_batch_rows: int = 16_384
    slice_s: float = 0.02
    wait_share: float = 0.5
    max_wait_s: float = 0.005
    lockstep_wait_s: float = 0.1
    inference_weight: float = 4.0
