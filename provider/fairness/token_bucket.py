"""A token bucket. Quotas, handshakes and registries use it."""


class TokenBucket:
    """Tokens that are replenished at a rate. The bucket starts full, and may go into debt. Not thread-safe.

    Args:
        per_s: tokens per second; above 0.
        burst: tokens of a full bucket.
        now: seconds of a monotonic clock; the caller always passes the time.
    """

    def __init__(self, *, per_s: float, burst: float, now: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._when = burst, now

    def change(self, *, per_s: float, burst: float) -> None:
        """Set another rate, which takes effect with the next `tokens` or `delay`."""
        self._per_s, self._burst = per_s, burst

    def tokens(self, now: float) -> float:
        """Number of tokens, including fractions; negative in debt."""
        self._tokens = min(self._burst, self._tokens + self._per_s * (now - self._when))
        self._when = now
        return self._tokens

    def delay(self, now: float) -> float:
        """Seconds until the bucket is not in debt; 0.0 if it is not in debt."""
        return max(0.0, -self.tokens(now) / self._per_s)

    def take(self, amount: float) -> None:
        """Take tokens. The bucket may go into debt."""
        self._tokens -= amount
