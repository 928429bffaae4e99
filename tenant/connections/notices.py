"""Logs warnings about requests that wait: for which provider, since when, and until when at most.

A warning is logged after two seconds without an answer and repeated during the wait, and another one when the answer
arrives. Python shows warnings on a terminal unless the program configures logging.
"""

import logging
import threading
import time
from dataclasses import dataclass

from symbiosis_priv.network.wire import QuotaLimit

log = logging.getLogger(__name__)

FIRST_S = 2.0
"""Seconds of waiting before the first warning."""
_AGAIN_S = 10.0  # seconds between two warnings about a provider that has not answered
_SLOW_S = 300.0  # seconds between two warnings about a provider that answers slowly
_LIMITED_AGAIN_S = 60.0  # seconds between two warnings about a provider's quota
_MOST_NAMES = 256  # of providers with warnings, because executors from registries choose their addresses


@dataclass
class _Logged:
    at: float
    since: float
    answered: bool = False


class Notices:
    """Logs warnings about waiting, each at most once per interval. The connections of a session share one instance.
    `logged`: the last warning about each provider; empty as long as everything is usual."""

    def __init__(self) -> None:
        self.logged: dict[str, _Logged] = {}
        self._limited: dict[str, float] = {}
        self._waits: dict[str, tuple[float, float]] = {}  # since and until when; none of them has been answered
        self._lock = threading.Lock()

    def waiting(self, provider: str, *, since: float, until: float, why: str) -> None:
        """Log that a request waits, if a warning is due. `since` and `until` are the request's start and deadline, on
        the clock of `time.monotonic`."""
        now = time.monotonic()
        if now - since < FIRST_S:
            return
        with self._lock:
            before = self._waits.get(provider)
            if before is not None:
                self._waits[provider] = min(since, before[0]), max(until, before[1])
            elif len(self._waits) < _MOST_NAMES:
                self._waits[provider] = since, until
            logged = self.logged.get(provider)
            if logged is not None and now - logged.at < (_SLOW_S if logged.answered else _AGAIN_S):
                return
            self.logged[provider] = _Logged(
                now, since if logged is None or logged.answered else min(since, logged.since)
            )
            if len(self.logged) > _MOST_NAMES:
                del self.logged[next(iter(self.logged))]
        log.warning(
            "waiting for %s since %s (%.0f s), until %s at most (deadline_s): %s",
            provider,
            _clock(since - now),
            now - since,
            _clock(until - now),
            why,
        )

    def wait_for(self, provider: str) -> tuple[float, float] | None:
        """Return for how many seconds requests have waited for a provider, and in how many the last of them gives up;
        None if none has waited for two seconds, or the provider has answered since."""
        if (wait := self._waits.get(provider)) is None:
            return None
        now = time.monotonic()
        return now - wait[0], wait[1] - now

    def limited(self, provider: str, limit: QuotaLimit) -> None:
        """Log that a provider's quota delays requests: at once, and then at most once a minute."""
        now = time.monotonic()
        with self._lock:
            if now - self._limited.get(provider, -_LIMITED_AGAIN_S) < _LIMITED_AGAIN_S:
                return
            self._limited[provider] = now
            if len(self._limited) > _MOST_NAMES:
                del self._limited[next(iter(self._limited))]
        log.warning(
            "%s limits you to %s, so requests wait: ask the operator for a larger quota, or accept the lower speed",
            provider,
            limit,
        )

    def answered(self, provider: str) -> None:
        """Log that the wait is over, if a warning was logged about it."""
        self._waits.pop(provider, None)
        logged = self.logged.get(provider)  # without the lock, because this runs for every answer
        if logged is not None and not logged.answered:
            logged.answered = True
            log.warning("%s has answered after %.0f s", provider, time.monotonic() - logged.since)


def _clock(offset: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() + offset))
