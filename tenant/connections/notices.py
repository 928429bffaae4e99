"""Saying what a program is waiting for: whom, since when, and until when at most.

After two seconds without an answer, and again while it lasts, as warnings in the log of this module (which Python shows
on a terminal unless the program has set up logging of its own), and once more when the answer comes.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from symbiosis_priv.network.wire import QuotaLimit

log = logging.getLogger(__name__)

FIRST_S = 2.0
"""How long nothing is said."""
_AGAIN_S = 10.0
_SLOW_S = 300.0  # between two words about one that does answer, only slowly
_LIMITED_AGAIN_S = 60.0
_REMEMBERED = 256  # names: executors of registries choose their addresses


@dataclass
class _Said:
    at: float
    since: float
    answered: bool = False


class Notices:
    """What has been said, so that nothing is said too often: the connections of a session share one.

    Args:
        option: what sets the deadline, as the user would write it.
    """

    def __init__(self, *, option: str) -> None:
        self.option = option
        self._said: dict[str, _Said] = {}
        self._limited: dict[str, float] = {}
        self._lock = threading.Lock()

    def waiting(self, whom: str, *, since: float, until: float, why: str) -> None:
        """Say it if it is time to.

        Args:
            whom: the provider.
            since: when the request began, by `time.monotonic`.
            until: its deadline.
            why: what has happened so far.
        """
        now = time.monotonic()
        if now - since < FIRST_S:
            return
        with self._lock:
            said = self._said.get(whom)
            if said is not None and now - said.at < (_SLOW_S if said.answered else _AGAIN_S):
                return
            self._said[whom] = _Said(now, since if said is None or said.answered else min(since, said.since))
            if len(self._said) > _REMEMBERED:
                del self._said[next(iter(self._said))]
        log.warning(
            "waiting for %s since %s (%.0f s), until %s at most: %s. %s changes how long.",
            whom,
            _clock(since - now),
            now - since,
            _clock(until - now),
            why,
            self.option,
        )

    def limited(self, whom: str, limit: QuotaLimit) -> None:
        """Say that a provider's quota slows the work down, at once and then once a minute at most.

        Args:
            whom: the provider's name.
            limit: what it has told.
        """
        now = time.monotonic()
        with self._lock:
            if now - self._limited.get(whom, -_LIMITED_AGAIN_S) < _LIMITED_AGAIN_S:
                return
            self._limited[whom] = now
            if len(self._limited) > _REMEMBERED:
                del self._limited[next(iter(self._limited))]
        log.warning(
            "%s limits you to %s, and requests wait for that: ask its operator for a larger quota, or go on slower",
            whom,
            limit,
        )

    def answered(self, whom: str) -> None:
        """Say that the wait is over, if anything was said about it."""
        said = self._said.get(whom)  # without the lock: this is asked for every answer
        if said is not None and not said.answered:
            said.answered = True
            log.warning("%s has answered after %.0f s", whom, time.monotonic() - said.since)


def _clock(offset: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() + offset))
