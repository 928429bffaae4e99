"""Tenants that have been answered and have not asked again: what for they will, and when.

Tenants go through a model in the same order, and what each does between two requests takes about as long as it did
before. Both are learned from those who come back.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from provider.scheduler.jobs import Key, Stage

_LATE = 2.0  # a tenant is expected back until its pause has been so many times the usual one


class Expected(NamedTuple):
    """Somebody will ask for a layer group: the first at `first`, and nobody after `until`."""

    first: float
    until: float


_NOBODY = Expected(math.inf, -math.inf)


class _Absence(NamedTuple):
    stage: Stage
    key: Key
    since: float


class Absent:
    """Who is away.

    Args:
        horizon_s: who has been away for longer is not expected.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._absent: OrderedDict[Hashable, _Absence] = OrderedDict()  # who left last is last
        self._pauses: dict[Hashable, float] = {}
        self._next: dict[tuple[Stage, Key], Key] = {}

    def leave(self, tenant: Hashable, stage: Stage, key: Key, now: float) -> None:
        """It has all its answers, the last one of this key."""
        self._absent.pop(tenant, None)
        self._absent[tenant] = _Absence(stage, key, now)
        while self._absent[oldest := next(iter(self._absent))].since < now - self._horizon_s:
            del self._absent[oldest]
            self._pauses.pop(oldest, None)

    def come(self, tenant: Hashable, stage: Stage, key: Key, now: float) -> None:
        """It asks for this key: how long it was away, and what comes after what, is learned from it."""
        absence = self._absent.pop(tenant, None)
        if absence is not None and absence.stage == stage:
            pause = max(0.0, now - absence.since)
            self._pauses[tenant] = (self._pauses.get(tenant, pause) + pause) / 2
            self._next[stage, absence.key] = key

    def after(self, stage: Stage, key: Key) -> Iterator[Key]:
        """What whoever has asked for this key will ask for next, and then: as far as it is known, around and around."""
        while (found := self._next.get((stage, key))) is not None:
            yield (key := found)

    def expected(self, now: float, by: float) -> dict[tuple[Stage, Key], Expected]:
        """Who is likely to be back by then, for what."""
        found: dict[tuple[Stage, Key], Expected] = {}
        for tenant, (stage, key, since) in reversed(self._absent.items()):
            if since < now - self._horizon_s:
                break
            pause = self._pauses.get(tenant)
            first = since + (pause or 0.0)
            until = since + (self._horizon_s if pause is None else _LATE * pause)
            if first <= by and now < until:
                will = stage, self._next.get((stage, key), key)
                others = found.get(will, _NOBODY)
                found[will] = Expected(min(max(now, first), others.first), max(until, others.until))
        return found
