"""One token bucket, for quotas, handshakes and registries."""

from __future__ import annotations


class TokenBucket:
    """Tokens that come back at a rate. It starts full, and may go into debt. Told the time; not thread-safe.

    Args:
        per_s: tokens that come back in a second; more than 0.
        burst: most tokens that it holds.
        now: seconds of a monotonic clock.
    """

    def __init__(self, *, per_s: float, burst: float, now: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._when = burst, now

    def change(self, *, per_s: float, burst: float) -> None:
        """Set another rate. Takes effect with the next `tokens` or `delay`."""
        self._per_s, self._burst = per_s, burst

    def tokens(self, now: float) -> float:
        """Tokens that are left, fractions included; negative in debt."""
        self._tokens = min(self._burst, self._tokens + self._per_s * (now - self._when))
        self._when = now
        return self._tokens

    def delay(self, now: float) -> float:
        """Seconds until it is not in debt; 0.0 if it is not."""
        return max(0.0, -self.tokens(now) / self._per_s)

    def take(self, amount: float) -> None:
        """Take tokens, whether they are there or not."""
        self._tokens -= amount
