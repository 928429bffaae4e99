"""Predicts the next requests of tenants that are absent: all their requests are answered, and none has followed.

Tenants go through a model in the same order, and the pause of a tenant between two requests takes about as long as its
previous pause. `Absent` learns the order and the pauses from the requests that arrive.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from provider.scheduler.jobs import Key, Stage

_LATE = 2.0  # a tenant is expected until its pause is this many times its usual pause


class Expected(NamedTuple):
    """When requests for one layer group are expected: from `first` until `until`, in seconds of the scheduler's
    clock."""

    first: float
    until: float


_NONE_EXPECTED = Expected(math.inf, -math.inf)


class _Absence(NamedTuple):
    stage: Stage
    key: Key
    since: float


class Absent:
    """The absent tenants, and what they are expected to request.

    Args:
        horizon_s: a tenant that has been absent for longer is not expected any more.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._absent: OrderedDict[Hashable, _Absence] = OrderedDict()  # in order of their last answers
        self._pauses: dict[Hashable, float] = {}
        self._next: dict[tuple[Stage, Key], Key] = {}

    def departed(self, tenant: Hashable, stage: Stage, key: Key, now: float) -> None:
        """Record that all requests of the tenant are answered; the last one had this key."""
        self._absent.pop(tenant, None)
        self._absent[tenant] = _Absence(stage, key, now)
        while self._absent[oldest := next(iter(self._absent))].since < now - self._horizon_s:
            del self._absent[oldest]
            self._pauses.pop(oldest, None)

    def arrived(self, tenant: Hashable, stage: Stage, key: Key, now: float) -> None:
        """Record that the tenant asks for this key, and learn its pause and the order of keys."""
        absence = self._absent.pop(tenant, None)
        if absence is not None and absence.stage == stage:
            pause = max(0.0, now - absence.since)
            self._pauses[tenant] = (self._pauses.get(tenant, pause) + pause) / 2
            self._next[stage, absence.key] = key

    def is_only(self, tenant: Hashable) -> bool:
        """Returns True if no other tenant is absent."""
        return len(self._absent) == (tenant in self._absent)

    def after(self, stage: Stage, key: Key) -> Iterator[Key]:
        """Yield the known keys that follow a key. Never ends if the order of keys is a cycle."""
        while (found := self._next.get((stage, key))) is not None:
            yield (key := found)

    def expected(self, now: float, by: float) -> dict[tuple[Stage, Key], Expected]:
        """The requests that are expected between `now` and `by`, for each stage and key."""
        found: dict[tuple[Stage, Key], Expected] = {}
        for tenant, (stage, key, since) in reversed(self._absent.items()):
            if since < now - self._horizon_s:
                break
            pause = self._pauses.get(tenant)
            first = since + (pause or 0.0)
            until = since + (self._horizon_s if pause is None else _LATE * pause)
            if first <= by and now < until:
                coming = stage, self._next.get((stage, key), key)
                others = found.get(coming, _NONE_EXPECTED)
                found[coming] = Expected(min(max(now, first), others.first), max(until, others.until))
        return found
