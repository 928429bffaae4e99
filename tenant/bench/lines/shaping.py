"""When what is sent arrives: the arithmetic of one direction of a line, without clocks or sockets."""

from __future__ import annotations

import math
import random

from tenant.bench.lines.condition import Condition


class Way:
    """One direction of a line. What is sent leaves in order, as fast as the bandwidth allows, and arrives later.

    Args:
        condition: the line.
        seed: of what gets lost.
    """

    def __init__(self, condition: Condition, *, seed: int) -> None:
        self._condition = condition
        self._chance = random.Random(seed)
        self._free = -math.inf  # when the last byte so far has left

    def arrival(self, now: float, size: int) -> float:
        """When the last of `size` bytes that are sent at `now` (seconds) arrives. Times must not decrease."""
        self._free = max(now, self._free) + size / self._condition.bytes_per_s
        return self._free + self._condition.delay_s

    def waiting(self, now: float) -> float:
        """Bytes that have not left by then; 0 without a limit."""
        late = self._free - now
        return late * self._condition.bytes_per_s if late > 0 else 0.0

    def lost(self, packets: int) -> int:
        """How many of so many packets get lost."""
        if not self._condition.loss:
            return 0
        return sum(self._chance.random() < self._condition.loss for _ in range(packets))
