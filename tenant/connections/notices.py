"""Logs warnings about requests that wait: for which provider, since when, and until when at most.

A warning is logged after two seconds without an answer and repeated during the wait, and another one when the answer
arrives. Python shows warnings on a terminal unless the program configures logging.
"""

import logging
import threading
import time

from symbiosis_priv.network.wire import QuotaLimit

log = logging.getLogger(__name__)

FIRST_S = 2.0
"""Seconds of waiting before the first warning."""
_AGAIN_S = 10.0  # seconds between two warnings about a provider that has not answered
_SLOW_S = 300.0  # seconds between two warnings about a provider that answers slowly
_LIMITED_AGAIN_S = 60.0  # seconds between two warnings about a provider's quota
_MOST_NAMES = 256  # of providers with warnings, because executors from registries choose their addresses


class Notices:
    """Logs warnings about waiting, each at most once per interval. The connections of a session share one instance.
    `waits`: since and until when requests wait for a provider that has not answered them within two seconds."""

    def __init__(self) -> None:
        self.waits: dict[str, tuple[float, float]] = {}
        self._silent_until: dict[str, float] = {}  # by what a warning is about
        self._lock = threading.Lock()

    def waiting(self, provider: str, *, since: float, until: float, why: str) -> None:
        """Log that a request waits, if a warning is due. `since` and `until` are the request's start and deadline, on
        the clock of `time.monotonic`."""
        now = time.monotonic()
        if now - since < FIRST_S:
            return
        with self._lock:
            if provider in self.waits or len(self.waits) < _MOST_NAMES:
                first, last = self.waits.get(provider, (since, until))
                self.waits[provider] = min(since, first), max(until, last)
        if self._is_due(provider, _AGAIN_S):
            began, end = (time.strftime("%H:%M:%S", time.localtime(time.time() + at - now)) for at in (since, until))
            wait = "waiting for %s since %s (%.0f s), until %s at most (deadline_s): %s"
            log.warning(wait, provider, began, now - since, end, why)

    def wait_for(self, provider: str) -> tuple[float, float] | None:
        """Return for how many seconds requests have waited for a provider, and in how many the last of them gives up;
        None if none has waited for two seconds, or the provider has answered since."""
        if (wait := self.waits.get(provider)) is None:
            return None
        now = time.monotonic()
        return now - wait[0], wait[1] - now

    def limited(self, provider: str, limit: QuotaLimit) -> None:
        """Log that a provider's quota delays requests: at once, and then at most once a minute."""
        if self._is_due(f"quota of {provider}", _LIMITED_AGAIN_S):
            advice = "ask the operator for a larger quota, or accept the lower speed"
            log.warning("%s limits you to %s, so requests wait: %s", provider, limit, advice)

    def answered(self, provider: str) -> None:
        """End the waits for a provider, and log that, if a warning is due."""
        wait = self.waits.pop(provider, None)
        if wait is not None and self._is_due(f"answer of {provider}", _SLOW_S):
            self._silent_until[provider] = time.monotonic() + _SLOW_S
            log.warning("%s has answered after %.0f s", provider, time.monotonic() - wait[0])

    def _is_due(self, about: str, every_s: float) -> bool:
        with self._lock:
            now = time.monotonic()
            if now < self._silent_until.get(about, now):
                return False
            self._silent_until[about] = now + every_s
            if len(self._silent_until) > _MOST_NAMES:
                del self._silent_until[next(iter(self._silent_until))]
            return True
