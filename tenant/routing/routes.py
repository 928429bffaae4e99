"""Decides which executors receive the rows of a layer group and which helpers hold the seeds of its pads. Keeps the
health of every provider, and the quarantine.

`Routes` opens no socket and starts no thread, and its clock is an argument, so every decision can be tested on its own.
It survives forks: a forked child sends nothing to providers that its parent has quarantined.

An executor is *able* to take rows if it serves the layer group, is not quarantined, and is admissible: no helper of its
own company knows a seed of the rows' pads (`Federation.admissible` alone decides that). An able executor is *open* if
its breaker is closed or its trial is due (`known_provider`). Rows go to the open executor with the lowest measured
cost. They move away from the present executor only if another one costs clearly less. An executor without a recent
measurement gets one request as a measurement. If only one executor is able, it is asked even if its breaker is open.
"""

import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from symbiosis_priv.errors import QuarantinedError
from symbiosis_priv.federation import Federation, Peer, Traits, in_common, traits
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.core.masked import Quarantine
from tenant.routing.known_provider import (
    FEW_BYTES,
    USUAL,
    KnownProvider,
    ProviderHealth,
    State,
    Tolerance,
)

log = logging.getLogger(__name__)

_WORTH_A_MOVE = 0.75  # rows move to another executor if it costs less than this share of the present one's cost
_MOST_PARTIES = 4096  # limit of cached decisions on rule 8, and of remembered parties from registries
_USUAL_EFFECT = 1 << 20  # bytes, to compare the costs of helpers


class Routes:
    """The providers of a session. Thread-safe. `with_helpers`: pads come from helpers.

    Attributes:
        executors: the executors of the federation in its order, then discovered ones; `version` changes with them. A
            provider of the file is known once for each of its addresses, which may serve different layers: one that is
            lost says nothing about the others, but all are quarantined together.
        quarantined: the providers that receive no more requests.
        all_up: True if every provider has answered, none has failed since, and none is quarantined. Then `to_probe` and
            `check` have nothing to do, and a session has connected to all of them.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        with_helpers: bool,
        tolerance: Tolerance = USUAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._known = functools.partial(KnownProvider, tolerance=tolerance)
        self._listed = tuple(one for peer in federation.executors for one in peer.by_address)
        self.executors = tuple(map(self._known, self._listed))
        helpers = federation.helpers if with_helpers else ()
        self.helpers = tuple(self._known(one) for peer in helpers for one in peer.by_address)
        k = federation.pad_helpers
        self.helpers_per_pad = len(helpers) if k is None else min(k, len(helpers))
        self.quarantined = Quarantine()
        self.version = 0
        self.all_up = False
        self._federation, self._clock = federation, clock
        self._admits = functools.lru_cache(_MOST_PARTIES)(federation.admissible)
        self._present: dict[tuple[GroupIndex, bool], KnownProvider] = {}
        self._reputations: deque[tuple[Traits, ProviderHealth]] = deque(maxlen=_MOST_PARTIES)
        self._lock = threading.Lock()

    @property
    def has_spares(self) -> bool:
        return len(self.helpers) > self.helpers_per_pad

    # Executors

    def update(self, joined: Sequence[Peer]) -> None:
        """Replace the discovered executors. An executor that is not in `joined` receives no more requests. An executor
        that shares a name, key or address with a party of the federation is refused (rule 11). Rule 8 applies to
        discovered executors as to all others."""
        with self._lock:
            known = {provider.peer: provider for provider in self.executors}
            parties = [traits(peer) for peer in self._federation.peers]
            taken = list(self._listed)
            for peer in joined:
                own = traits(peer)
                if shared := {what for party in parties for what in in_common(own, party)}:
                    log.warning(
                        "executor %s is not used: another provider has the same %s", peer.name, ", ".join(shared)
                    )
                    continue
                parties.append(own)
                taken.append(peer)
            self.executors = tuple(known.get(peer) or self._joined(peer) for peer in taken)
            self._present = {place: provider for place, provider in self._present.items() if provider in self.executors}
            self.version += 1
            self.all_up = False

    def _joined(self, peer: Peer) -> KnownProvider:  # one that announces other layers keeps its health
        own, provider = traits(peer), self._known(peer)
        for party, health in self._reputations:
            if in_common(own, party):
                provider.health = health
                return provider
        self._reputations.append((own, provider.health))
        return provider

    def able(self, index: GroupIndex, holders: Collection[Peer] = ()) -> list[KnownProvider]:
        """Return the executors that may see a group's rows under pads of these holders."""
        serving = [provider for provider in self.executors if provider.serves(index)]
        if not self.all_up and self.quarantined:
            serving = [provider for provider in serving if provider.peer not in self.quarantined]
        return self._admissible(serving, holders) if holders else serving

    def may_be_asked(self, provider: KnownProvider, index: GroupIndex) -> bool:
        """Returns True if an executor still belongs to the federation, serves a group and is not quarantined."""
        return provider in self.executors and provider.serves(index) and provider.peer not in self.quarantined

    def choose(
        self,
        index: GroupIndex,
        size: int,
        *,
        holders: Collection[Peer] | None,
        prefer: KnownProvider | None = None,
    ) -> KnownProvider | None:
        """Choose the executor of a request; None if no able executor is open. Report the outcome with `answered`,
        `failed` or `cancelled`. `size`: bytes of request and answer together. `holders`: the helpers that know the
        seeds of the rows' pads; None if new pads will be drawn for the executor. `prefer`: chosen if it is open."""
        with self._lock:
            able = serving = self.able(index)
            if holders:
                able = self._admissible(serving, holders)
            elif holders is None:
                able = [provider for provider in able if len(self.holders(index, provider)) == self.helpers_per_pad]
            if able and len(serving) == 1:
                provider: KnownProvider | None = able[0]
            else:
                provider = self._best([r for r in able if r.is_open], index, size, prefer)
            if provider is not None:
                provider.in_flight += 1
            return provider

    def taken(self, provider: KnownProvider) -> None:
        """Record that a provider gets a request without a choice; report the outcome as after `choose`."""
        with self._lock:
            provider.in_flight += 1

    def open_for(self, index: GroupIndex, size: int) -> list[KnownProvider]:
        """Return the executors that may share a large product, the one with the lowest cost first."""
        with self._lock:
            able = self.able(index)
            if len(able) == 1:
                return able
            open_ones = (provider for provider in able if provider.is_open)
            return sorted(open_ones, key=lambda provider: provider.health.seconds_for(size) or 0.0) or able[:1]

    def patience_s(self, provider: KnownProvider, index: GroupIndex, size: int, *, left_s: float) -> float:
        """Return the seconds to wait for an executor's answer: `left_s` if no other executor may serve the group."""
        if len(self.executors) == 1:
            return left_s
        others = [
            other
            for other in self.executors
            if other is not provider
            and other.peer not in self.quarantined
            and (other.welcome is None or other.serves(index))  # the provider may be away now
        ]
        if not others:
            return left_s
        up = [other.health.expected_s(size) for other in others if other.serves(index) and other.is_up]
        others_s = min(up) * max(1, provider.in_flight) if up else None  # requests in flight delay this one
        return min(left_s / 2, provider.health.patience_s(size, others_s=others_s))  # the next provider needs time, too

    def uncovered(self, groups: int) -> list[int]:
        """Return the layer groups below `groups` that no executor serves. Executors in quarantine do not count."""
        return [index for index in map(GroupIndex, range(groups)) if not self.able(index)]

    def _admissible(self, executors: Sequence[KnownProvider], holders: Collection[Peer]) -> list[KnownProvider]:
        known = tuple(holders)
        return [provider for provider in executors if self._admits(provider.peer, known)]

    def _best(
        self,
        open_ones: Sequence[KnownProvider],
        index: GroupIndex,
        size: int,
        prefer: KnownProvider | None,
    ) -> KnownProvider | None:
        if prefer in open_ones:
            return prefer
        now, few = self._clock(), size <= FEW_BYTES
        idle = (r for r in open_ones if not r.in_flight)
        if unsure := [r for r in idle if r.health.state is State.TRIAL or r.health.is_stale(now)]:
            # measure the present executor first, for comparison
            return min(unsure, key=lambda provider: provider.health.measurements)
        if not open_ones:
            return None
        best = min(open_ones, key=lambda provider: provider.cost(size))
        present = self._present.get((index, few))
        if present is not None and present in open_ones and best.cost(size) > _WORTH_A_MOVE * present.cost(size):
            return present
        self._present[index, few] = best
        return best

    # Helpers

    def holders(
        self, index: GroupIndex, executor: KnownProvider | None = None, *, without: Collection[Peer] = ()
    ) -> list[KnownProvider]:
        """Choose the helpers that share the next pad of a group, each of another company if the file has `[pads]`;
        fewer than a pad needs if there are not enough. `executor` will see the rows; None for any of the group.

        All are admissible with one executor: the first in order of preference that has enough healthy helpers, else the
        first that has enough. Helpers come first that have answered and whose breaker is closed; then those that are
        admissible with more executors, so that rows can move without a new pad; then those with a low cost. A helper
        without a measurement costs 0, so slow helpers are kept as spares."""
        able, present = self.able(index), self._present.get((index, True))

        def order(provider: KnownProvider) -> tuple[bool, bool, int, float]:
            refused = sum(not self._admits(other.peer, (provider.peer,)) for other in able)
            cost = provider.health.seconds_for(_USUAL_EFFECT) or 0.0
            return not provider.is_open, provider.welcome is None, refused, cost

        helpers = [
            provider
            for provider in sorted(self.helpers, key=order)
            if (provider.welcome is None or provider.serves(index))
            and provider.peer not in without
            and provider.peer not in self.quarantined
        ]
        there = [provider for provider in able if provider.is_open] or able
        targets = [executor] if executor else sorted(there, key=lambda provider: provider is not present)
        most: list[KnownProvider] = []
        for target in targets or (None,):
            taken: list[KnownProvider] = []
            for provider in helpers:
                if (
                    len(taken) < self.helpers_per_pad
                    and (target is None or self._admits(target.peer, (provider.peer,)))
                    and not any(self._share_one_part(provider.peer, other.peer) for other in taken)
                ):
                    taken.append(provider)
            if len(taken) == self.helpers_per_pad and all(provider.is_open for provider in taken):
                return taken
            if len(taken) > len(most):
                most = taken
        return most

    def _share_one_part(self, one: Peer, other: Peer) -> bool:  # of a pad
        same_name = self._federation.pad_helpers is None
        return one.name == other.name if same_name else self._federation.one_company(one, other)

    def can_replace(self, index: GroupIndex, holders: Collection[Peer]) -> bool:
        """Returns True if healthy helpers can make a pad without these helpers."""
        others = self.holders(index, without=holders)
        return len(others) == self.helpers_per_pad and all(provider.is_open for provider in others)

    def replacements(
        self, index: GroupIndex, holders: Collection[Peer], size: int, *, waited_s: float
    ) -> list[KnownProvider]:
        """Return the helpers that should replace `holders`, if these are away, or late after `waited_s`; else none."""
        if not self.has_spares:
            return []
        away = any(not provider.is_up for provider in self.helpers if provider.peer in holders)
        if not away and waited_s < self.patience_with_helpers_s(index, holders, size):
            return []
        return [provider for provider in self.helpers if provider.peer not in holders]

    # Outcomes of requests

    def answered(
        self, provider: KnownProvider, *, seconds: float, size: int, verified: Collection[Peer] | None = None
    ) -> None:
        """Record that a provider answered. `verified`: as for `record_verified`; None if it is not checked yet."""
        with self._lock:
            provider.requests += 1
            provider.in_flight = max(0, provider.in_flight - 1)
            now = self._clock()
            if provider.health.answered(now, seconds=seconds, size=size) and len(self._same_role(provider)) > 1:
                log.warning("%s answers again, after %.1f s", provider, now - provider.health.down_since)
            if verified is not None:
                self._verified(provider, verified)

    def failed(self, provider: KnownProvider, why: object, *, waited_s: float = 0.0) -> None:
        """Record that the provider was lost, late or busy, or refused, after a wait of `waited_s`."""
        with self._lock:
            self.all_up = False
            provider.requests += 1
            provider.in_flight = max(0, provider.in_flight - 1)
            opened = provider.health.failed(self._clock(), wasted_s=self._wasted(provider, waited_s))
            if opened and len(self._same_role(provider)) > 1:  # otherwise the request waits, and `notices` logs that
                log.warning("%s has failed: %s", provider, why)

    def late(self, holders: Collection[Peer], *, waited_s: float = 0.0) -> None:
        """Record that effects of these helpers are late."""
        with self._lock:
            self.all_up = False
            for provider in self.helpers:
                if provider.peer in holders and provider.health.state is not State.DOWN:
                    provider.health.failed(self._clock(), wasted_s=self._wasted(provider, waited_s))
                    log.warning("%s is late, others are asked meanwhile", provider)

    def patience_with_helpers_s(
        self, index: GroupIndex, holders: Collection[Peer], size: int, *, left_s: float = math.inf
    ) -> float:
        """Return the seconds to wait for effects of these helpers while other helpers are available."""
        others = self.holders(index, without=holders)
        up = len(others) == self.helpers_per_pad and all(other.is_up for other in others)
        others_s = max(other.health.expected_s(size) for other in others) if up else None
        asked = (provider.health for provider in self.helpers if provider.peer in holders)
        return min(left_s / 2, max(health.patience_s(size, others_s=others_s) for health in asked))

    def _wasted(self, provider: KnownProvider, waited_s: float) -> float:
        others = (other for other in self._same_role(provider) if other is not provider)
        return waited_s if any(other.is_up for other in others) else 0.0

    def _same_role(self, provider: KnownProvider) -> Sequence[KnownProvider]:
        return self.helpers if provider.peer.role == "helper" else self.executors

    def record_verified(self, executor: KnownProvider, holders: Collection[Peer]) -> None:
        """Record that an answer of the executor, and the effects of these helpers, passed the check."""
        with self._lock:
            self._verified(executor, holders)

    def _verified(self, executor: KnownProvider, holders: Collection[Peer]) -> None:
        executor.verified += 1
        for provider in self.helpers if holders else ():
            provider.verified += provider.peer in holders

    def cancelled(self, provider: KnownProvider) -> None:
        """Record that the chosen executor was not asked, or that its answer is not used."""
        with self._lock:
            provider.in_flight = max(0, provider.in_flight - 1)

    def connected(self, provider: KnownProvider, welcome: wire.Welcome) -> None:
        with self._lock:
            provider.welcome = welcome
            provider.health.connected()

    def to_probe(self, urgent: Collection[KnownProvider] = ()) -> list[KnownProvider]:
        """Return the providers to connect to: those whose pause is over, those that have never answered, and `urgent`
        ones even during their pause, because no other provider can be asked."""
        now, routes = self._clock(), (*self.executors, *self.helpers)
        with self._lock:
            self.all_up = not self.quarantined and all(provider.is_up for provider in routes)
        return [
            provider
            for provider in routes
            if (provider.welcome is None or provider.health.state is State.DOWN)
            and (provider.health.retry_at <= now or provider in urgent)
            and provider.peer not in self.quarantined
        ]

    # Quarantine

    def check(self, index: GroupIndex) -> None:
        """Raise `QuarantinedError` if the providers that are not quarantined cannot compute a product of this group."""
        if not self.quarantined:
            return
        liar = next((provider.peer for provider in self.helpers if provider.peer in self.quarantined), None)
        if liar is not None and self._federation.pad_helpers is None:
            raise QuarantinedError(f"helper {liar.name!r} is quarantined; nothing more is sent")
        if all(provider.peer in self.quarantined for provider in self.executors):
            raise QuarantinedError(
                "every executor of the federation is quarantined for this session; nothing more is sent"
            )
        able = self.able(index)
        honest = [provider for provider in self.executors if provider.peer not in self.quarantined]
        if not able and all(provider.welcome is not None for provider in honest):
            raise QuarantinedError(
                "every executor of the federation that serves these layers is quarantined; nothing more is sent"
            )
        if able and not any(len(self.holders(index, provider)) == self.helpers_per_pad for provider in able):
            raise QuarantinedError(
                f"too many helpers are quarantined: a pad needs {self.helpers_per_pad} of companies other than "
                f"the executor's; nothing more is sent"
            )

    def quarantine(self, *suspects: Peer) -> None:
        for provider in (*self.executors, *self.helpers):
            provider.rejected += provider.peer in suspects
        for peer in suspects:
            self.quarantined.add(peer)
        with self._lock:
            self.all_up = False

    def reset_after_fork(self) -> None:
        """In a forked child, replace the lock, which a thread of the parent may have held. The child connects again."""
        self._lock, self.all_up = threading.Lock(), False
        for provider in (*self.executors, *self.helpers):
            provider.in_flight = 0
