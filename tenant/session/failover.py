"""The attempts of one request: who is asked, and what is tried after a failure.

If an executor is lost, late, busy or refuses, another executor that may see rows under the same pads gets identical
bytes. If there is no such executor, or if an effect is lost or late and another helper could compute one, the rows get
fresh pads and are sent again. A provider whose result is wrong is quarantined before the next request leaves;
`tenant.core.blame` finds out who it is.

`session.send_part` has the only loop. Its `Attempts` hold all that the request remembers. They cannot weaken a promise:
rows leave only as `MaskedRows` and through the gate, and results are checked.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import cached_property

from torch import Tensor

from symbiosis_priv.errors import (
    CertificateError,
    CheckpointError,
    DeadlineExceededError,
    ProtocolError,
    ProviderError,
    QuarantinedError,
    SymbiosisError,
    TransportError,
    UncoveredError,
    VerificationError,
)
from symbiosis_priv.federation import Peer
from symbiosis_priv.system.pacing import Backoff
from tenant.connections.executor_client import Answer, NoFreeChannelError
from tenant.core.blame import attribute
from tenant.core.pads import Pad, PadOrder, Share, with_first_rows
from tenant.core.parts import Part
from tenant.routing.known_provider import KnownProvider
from tenant.session.lane import Attempt
from tenant.session.runtime import Runtime
from tenant.session.supply import is_lost
from tenant.session.tally import after_answer, clock, record, sights

log = logging.getLogger(__name__)

_MANY_REDRAWS = 4  # after more redraws, all helpers fail, and retrying without a pause does not help
_LOOK_AGAIN_S = 1.0  # how often a waiting request looks for another helper


class Attempts:
    """The state of one request, and the decision what is tried next."""

    def __init__(
        self, runtime: Runtime, part: Part, preferred: KnownProvider | None, made: Attempt | None = None
    ) -> None:
        self._runtime, self._routes, self._tally = runtime, runtime.routes, runtime.tally
        self._part, self._preferred, self._made = part, preferred, made
        self._asked_at = self._began = began = time.monotonic() if made is None else made.began
        self._deadline = began + runtime.options.deadline_s
        self._usual = True  # no provider has failed, or is not known yet
        self._patience_s = 0.0
        # executors that were lost, late or busy, or refused, with the time of their first failure; the last one
        self._failed: dict[KnownProvider, float] = {}
        self._last: KnownProvider | None = None
        self._error: Exception | None = None
        self._refused: set[KnownProvider] = set()  # executors that answered with an error
        self._declined: set[Peer] = set()  # helpers that answered with an error
        self._late: set[Peer] = set()  # helpers whose effects have not come in time
        self._effect_error: BaseException | None = None
        self._redraws = 0
        self._fault: Exception | None = None  # to be raised if no provider is left
        self._faults = 0

    # The next executor

    @cached_property
    def _backoff(self) -> Backoff:  # most requests need none
        return Backoff(0.015, 0.75, jitter=1 / 3)

    def choose(self) -> KnownProvider:
        """Choose the executor to ask. Waits until one is available. Replaces pads if an effect of them was lost, or if
        no executor may see rows under them. Raises `DeadlineExceededError`, or the last fault."""
        if self._made is not None:
            return self._made.provider
        if self._usual and self._routes.all_up and (provider := self._able()) is not None:
            return provider
        self._usual = False
        while True:
            self._replace_spoilt_pads()
            provider = self._next()
            if self._routes.may_be_asked(provider, self._part.index):
                self._asked_at = time.monotonic()
                return provider
            self._routes.cancelled(provider)

    def ask(self, provider: KnownProvider, *, meanwhile: Callable[[], None]) -> Answer:
        """Send the request to an executor once, unless a lane has done so. Raises what `ExecutorClient.ask` raises;
        then call `failed`."""
        part, routes = self._part, self._routes
        self._patience_s = routes.patience_s(provider, part.index, part.size, left_s=self._deadline - self._asked_at)
        made, self._made = self._made, None
        outcome = made.outcome if made is not None else None
        if isinstance(outcome, BaseException):
            raise outcome
        answer = outcome or self._runtime.executors[provider].ask(
            part, patience_s=self._patience_s, deadline=self._deadline, since=self._began, meanwhile=meanwhile
        )
        routes.answered(provider, seconds=answer.seconds, size=part.size)
        return answer

    def succeeded(self, provider: KnownProvider, *, corrected: int, repeated: int) -> bool:
        """Count a part whose product passed the check, except for `corrected` rows and rows that must be `repeated`.
        Count a takeover if another executor had failed before. Returns True if nothing was unusual."""
        part, counts = self._part, self._tally.counts
        with self._tally.lock:
            counts.answers_verified += part.count
            counts.effects_verified += part.count if part.sent.holders else 0
            counts.rows_corrected += corrected
            counts.rows_repeated += repeated
        if sights:
            after_answer(part.sent, ring_bits=part.rows.ring_bits)
        self._routes.record_verified(provider, part.sent.holders)
        for other, since in self._failed.items():
            if other is not provider:  # the first that has failed
                seconds = time.monotonic() - since
                with self._tally.lock:
                    counts.takeovers += 1
                    counts.takeover_s += seconds
                log.info("%s took over from %s within %.2f s", provider, other, seconds)
                break
        return self._usual

    def _able(self) -> KnownProvider | None:
        part = self._part
        return self._routes.choose(part.index, part.size, holders=part.sent.holders, prefer=self._preferred)

    def _next(self) -> KnownProvider:
        part = self._part
        while True:
            self._runtime.prober.reconnect()
            self._check()
            provider = self._able()
            other = None if provider else self._routes.choose(part.index, part.size, holders=None)
            if provider is None and other is None:
                self._runtime.prober.reconnect(urgent=self._routes.executors)
            taken = provider or other
            try:
                if other is not None:
                    self._replace_pads(other, spoilt=lambda pad: True)
                pause = taken is None or provider is self._last or self._redraws > _MANY_REDRAWS
                if time.monotonic() + (self._backoff.next_s if pause else 0.0) >= self._deadline:
                    raise self._too_late()
                if pause:
                    if self._last is not None:
                        since, until, why = self._began, self._deadline, str(self._error)
                        self._runtime.notices.waiting(self._last.peer.label, since=since, until=until, why=why)
                    if self._runtime.closing.wait(self._backoff.failed()):
                        raise SymbiosisError("this session is closed; load the model again")
            except BaseException:
                if taken:
                    self._routes.cancelled(taken)
                raise
            if taken:
                return taken

    def _too_late(self) -> Exception:
        error: BaseException | None
        if self._failed:
            error, names = self._error, " nor ".join(provider.peer.label for provider in self._failed)
            running = "Is it running?" if len(self._failed) == 1 else "Are they running?"
            late = self._deadline_error(f"no answer from {names}", f" (last: {error}). {running}")
        elif (error := self._effect_error) is not None:
            late = self._deadline_error("no effects from the helpers", f" (last: {error}). Are they running?")
        else:
            why = self._deadline_error("no executor of these layers was available", ". Are they running?")
            return self._fault or UncoveredError(str(why))
        late.__cause__ = error
        return late

    def _deadline_error(self, what: str, why: str) -> DeadlineExceededError:
        seconds = self._runtime.options.deadline_s
        return DeadlineExceededError(f"{what} within {seconds:g} s{why} RemoteConfig(deadline_s=...) waits longer.")

    # A request that failed

    def failed(self, provider: KnownProvider, error: BaseException) -> None:
        """Handle a request that failed. Returns normally if the part may be sent again, and raises `error`, or an error
        that explains it, if no other provider can be asked."""
        self._usual = False
        if isinstance(error, NoFreeChannelError):
            self._routes.cancelled(provider)
            why = f": {error} by other threads of this program. Use fewer threads at once;"
            raise self._deadline_error(f"{provider} was not asked", why) from error
        if isinstance(error, TransportError | ProviderError | CertificateError):
            if self._runtime.closing.is_set():
                raise error
            # the rest of the time was spent waiting for a connection
            waited_s = min(self._patience_s, time.monotonic() - self._asked_at)
            self._routes.failed(provider, error, waited_s=waited_s)
            self._has_failed(provider, error)
            if isinstance(error, TransportError):
                for channel in self._runtime.executors[provider].channels:
                    channel.drop_if_idle()
            else:
                self._refused.add(provider)
                if self._refused.issuperset(self._routes.able(self._part.index)):
                    raise error
            return
        self._routes.cancelled(provider)
        if isinstance(error, ProtocolError):
            self._quarantine(provider.peer)
            self._has_failed(provider, error)
            self._has_faulted(error)
        elif not isinstance(error, QuarantinedError):
            raise error

    def _has_failed(self, provider: KnownProvider, error: Exception) -> None:
        self._last, self._error = provider, error
        self._failed.setdefault(provider, time.monotonic())

    # Effects that are late or lost

    def effects_are_there(self) -> bool:
        """Wait for the effects of the part's pads. Returns False if pads must be replaced. Raises the error of an
        effect that no other helper can compute."""
        # without a lock, so an effect that has just arrived may be among them
        if all(share.effect.kept is not None for share in _shares(self._part)):
            return True
        started = clock()
        self._wait_for_effects()
        record("wait for effects", since=started)
        self._usual = False
        for share in _shares(self._part):
            if share.holder in self._late:
                return False
            error = share.effect.exception()
            if error is None:
                continue
            # the tenant's own effects use no protocol
            assert share.holder is not None or not isinstance(error, ProtocolError)
            if share.holder is not None and isinstance(error, ProtocolError):
                self._quarantine(share.holder)
                fault = self._verification_error([share.holder], what="an effect")
                fault.__cause__ = error
                self._has_faulted(fault)
                return False
            if share.holder is None or not self._routes.has_spares:
                raise error
            self._effect_error = error
            if isinstance(error, ProviderError | CertificateError):
                self._declined.add(share.holder)
                left = self._routes.holders(self._part.index, without=self._declined)
                if len(left) < self._routes.helpers_per_pad:
                    raise error
            return False
        return True

    def _wait_for_effects(self) -> None:
        """Wait until all effects have arrived, or until the missing effects are late and their pads can be replaced."""
        part, routes = self._part, self._routes
        missing = self._missing()
        # not the part's deadline: a pad drawn ahead waits behind earlier requests to its helper
        began = time.monotonic()
        until = began + self._runtime.options.deadline_s
        while missing:
            left = until - time.monotonic()
            if left <= 0:
                raise self._deadline_error("no effects from the helpers", ". Are they running?")
            holders = {share.holder for share in missing if share.holder is not None}
            spare = bool(holders) and routes.can_replace(part.index, holders)
            if spare:
                in_time = self._deadline - time.monotonic()
                patience = routes.patience_with_helpers_s(part.index, holders, part.size, left_s=in_time)
            else:
                patience = min(left, _LOOK_AGAIN_S)
                waited = time.monotonic() - began
                others = routes.replacements(part.index, holders, part.size, waited_s=waited)
                self._runtime.prober.reconnect(urgent=others)
            wait([share.effect for share in missing], max(0.0, patience))
            late = [share for share in missing if not share.effect.done()]
            missing = self._missing()
            if late and spare:
                self._late |= {share.holder for share in late if share.holder is not None}
                routes.late(self._late, waited_s=patience)
                return

    def _missing(self) -> list[Share]:
        return [share for share in _shares(self._part) if not share.effect.done()]

    def _replace_spoilt_pads(self) -> None:
        """Replace pads of helpers that were lost or late, or are quarantined."""
        part = self._part
        suspects = [peer for peer in part.sent.holders if peer in self._late or peer in self._routes.quarantined]

        def spoilt(pad: Pad) -> bool:
            return is_lost(pad) or any(share.holder in suspects for share in pad.shares)

        if part.pads and any(map(spoilt, part.pads)):
            self._check()
            self._replace_pads(None, spoilt=spoilt)
            self._late.clear()

    def _replace_pads(self, executor: KnownProvider | None, *, spoilt: Callable[[Pad], bool]) -> None:
        part, peer = self._part, None if executor is None else executor.peer
        self._redraws += 1
        fresh = {}
        for number, (first, pad) in enumerate(with_first_rows(part.pads)):
            if spoilt(pad):
                counts = part.counts_of(first, pad.rows)
                order = PadOrder(part.index, part.direction, pad.rows, counts, executor=peer)
                fresh[number] = self._runtime.pads.draw(order)
        part.remask(fresh)
        with self._tally.lock:
            self._tally.counts.pads_redrawn += sum(pad.rows for pad in fresh.values())

    # Results that are wrong

    def refused(self, provider: KnownProvider, answer: Tensor, *, may_wrap: bool = False) -> bool:
        """Handle a product that failed the check: the answer or an effect is wrong; or, if `may_wrap`, the product has
        left a narrow ring. Returns False if that is possible, and the keys find no error: no provider is suspected.
        Raises `VerificationError`: the remaining providers cannot compute the product; `CheckpointError`: the tenant's
        own packed weights are damaged."""
        runtime, part = self._runtime, self._part
        with runtime.gate.attributing:
            involved = [executor := provider.peer, *part.sent.holders]
            # another part may have found the same fault already, and the keys that attribute faults may be deleted
            found = [peer for peer in involved if peer in self._routes.quarantined]
            if not found:
                found, own = attribute(runtime.preparation.blame, executor, part, answer)
                if own:
                    self._quarantine(*found, rejected=0)
                    raise CheckpointError(
                        f"this machine's own packed weights of {self._group_name} in "
                        f"{runtime.store and runtime.store.cache} are damaged: an effect that was computed from them "
                        f"is not the product of the pinned weights. No provider is to blame for it. Delete that folder "
                        f"and load the model again."
                    )
                if not found and may_wrap:
                    return False
            suspects = list(dict.fromkeys(found or involved))
            self._quarantine(*suspects, rejected=len(suspects) if found else 1)
        what = "an answer" if executor in suspects else "an effect"
        error = self._verification_error(suspects, what=what, certain=bool(found))
        if executor in suspects:
            self._has_failed(provider, error)
        self._has_faulted(error)
        return True

    def _has_faulted(self, fault: Exception) -> None:
        self._fault = fault
        self._faults += 1
        self._check()

    def _check(self) -> None:
        """Raise the last fault if the providers that are not quarantined cannot compute the product."""
        try:
            self._routes.check(self._part.index)
        except QuarantinedError as error:
            raise self._fault or error from None
        if self._fault is not None and self._faults > len(self._routes.executors) + len(self._routes.helpers):
            # each provider is found at fault once at most; another fault means that a quarantined provider was asked
            raise self._fault

    def _quarantine(self, *suspects: Peer, rejected: int = 1) -> None:
        with self._tally.lock:
            self._tally.counts.answers_rejected += rejected
        if suspects:
            self._routes.quarantine(*suspects)
            self._runtime.preparation.forget_keys()

    def _verification_error(self, peers: Sequence[Peer], *, what: str, certain: bool = True) -> VerificationError:
        return VerificationError(
            provider=(" and " if certain else " or ").join(peer.name for peer in peers),
            group_name=self._group_name,
            direction=self._part.direction,
            what=what,
        )

    @property
    def _group_name(self) -> str:
        return self._runtime.preparation.facts[self._part.index].entry.name


def _shares(part: Part) -> list[Share]:
    return [share for pad in part.pads for share in pad.shares]
