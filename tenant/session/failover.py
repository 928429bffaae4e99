"""What a product does when a provider fails: ask another executor, or replace pads.

If an executor is lost, late, busy or refuses, another executor that may see rows under the same pads gets identical
bytes. If there is no such executor, or if an effect is lost or late and another helper could compute one, the rows get
fresh pads and are sent again. `retry.RetryState` records the failures and the deadline.

This module cannot weaken a promise: rows leave only as `MaskedRows` and through the gate, and results are checked.
"""

import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

from symbiosis_priv.errors import (
    CertificateError,
    DeadlineExceededError,
    ProtocolError,
    ProviderError,
    QuarantinedError,
    TransportError,
)
from tenant.connections.executor_client import NoFreeChannelError, blocks_of, fetch_effects
from tenant.core.pads import Pad, Share, with_first_rows
from tenant.core.parts import Part
from tenant.routing.route import Route
from tenant.routing.routes import Routes
from tenant.session.faults import Faults
from tenant.session.options import SessionOptions
from tenant.session.pools import is_lost
from tenant.session.retry import RetryState
from tenant.session.runtime import Runtime
from tenant.session.tally import Tally
from tenant.worker import Promise

_LOOK_AGAIN_S = 1.0  # how often a waiting request looks for another helper


@dataclass(frozen=True)
class Failover:
    """Decides which executor is asked next, and under which pads.

    Args:
        routes: the providers that may be asked.
    """

    options: SessionOptions
    routes: Routes
    runtime: Runtime
    tally: Tally
    faults: Faults

    def choose(self, part: Part, preferred: Route | None, retry: RetryState) -> Route:
        """Choose the executor to ask. Waits until an executor is available. Replaces pads if no executor may see rows
        under the present ones.

        Args:
            preferred: the executor to ask if it is open.

        Raises:
            DeadlineExceededError: no executor came back in time.
            SymbiosisError: the error of the last executor that was asked.
        """
        if self.routes.all_up and retry.asked_at == retry.began:  # the common case: nothing has failed
            retry.asked_at = time.monotonic()
            if (usual := self._open_for(part, preferred)) is not None:
                return usual
        while True:
            self._replace_spoilt_pads(part, retry)
            route = self._next(part, preferred, retry)
            if self.routes.may_be_asked(route, part.index):
                retry.asked_at = time.monotonic()
                return route
            self.routes.cancelled(route)

    def after(self, error: BaseException, route: Route, part: Part, retry: RetryState) -> None:
        """Handle a request that failed. Returns normally if the part may be sent again.

        Raises:
            BaseException: `error`, or an error that explains it, if no other provider can be asked.
        """
        # the rest of the time was spent waiting for a connection
        waited_s = min(retry.patience_s, time.monotonic() - retry.asked_at)
        if isinstance(error, QuarantinedError):
            self.routes.cancelled(route)
        elif isinstance(error, NoFreeChannelError):
            self.routes.cancelled(route)
            raise DeadlineExceededError(
                f"{route} was not asked within {self.options.deadline_s:g} s: {error} by other threads of this "
                f"program. Use fewer threads at once; {self.options.deadline_option} waits longer."
            ) from error
        elif isinstance(error, TransportError):
            self._failed(route, error, retry, waited_s=waited_s)
            self.runtime.executor(route).pool.drop_idle()
        elif isinstance(error, ProviderError | CertificateError):
            self._failed(route, error, retry, waited_s=waited_s)
            retry.refused.add(route)
            if retry.refused.issuperset(self.routes.able(part.index)):
                raise error
        elif isinstance(error, ProtocolError):
            self.routes.cancelled(route)
            self.faults.malformed_answer(route, part, error, retry)
        else:
            self.routes.cancelled(route)
            raise error

    def effects_are_there(self, part: Part, retry: RetryState) -> bool:
        """Wait for the effects of the part's pads. Returns False if pads must be replaced.

        Raises:
            SymbiosisError: effects are missing, and no other helper can compute them.
        """
        if not retry.late and _has_effects(part):
            return True
        self._wait_for_effects(part, retry)
        for share in _shares(part):
            if share.holder in retry.late:
                return False
            error = share.effect.exception()
            if error is None:
                continue
            # the tenant's own effects use no protocol
            assert share.holder is not None or not isinstance(error, ProtocolError)
            if share.holder is not None and isinstance(error, ProtocolError):
                self.faults.malformed_effect(share.holder, part, error, retry)
                return False
            if share.holder is None or not self.routes.has_spares:
                raise error
            retry.effect_error = error
            if isinstance(error, ProviderError | CertificateError):
                retry.declined.add(share.holder)
                if len(self.routes.holders(part.index, without=retry.declined)) < self.routes.helpers_per_pad:
                    raise error
            return False
        return True

    def _next(self, part: Part, preferred: Route | None, retry: RetryState) -> Route:
        while True:
            self.runtime.prober.reconnect()
            self.faults.check(part, retry)
            route = self._open_for(part, preferred)
            other = None if route else self.routes.choose(part.index, part.size, holders=None)
            if route is None and other is None:
                self.runtime.prober.reconnect(urgent=self.routes.executors)
            try:
                if other is not None:
                    self._replace_pads(part, retry, other, spoilt=lambda pad: True)
                retry.before_request(pause=route is retry.last if route else other is None)
            except BaseException:
                if taken := route or other:
                    self.routes.cancelled(taken)
                raise
            if taken := route or other:
                return taken

    def _open_for(self, part: Part, preferred: Route | None) -> Route | None:
        """Choose an open executor that may see rows under the part's pads."""
        relays = part.pads and self.runtime.relays is not None
        blocks = blocks_of(part.pads[0])[:1] if relays else []
        return self.routes.choose(
            part.index,
            part.size,
            holders=part.sent.holders,
            prefer=preferred,
            relayed_to=blocks[0].executor if blocks else None,
        )

    def _failed(self, route: Route, error: Exception, retry: RetryState, *, waited_s: float) -> None:
        if self.runtime.closing.is_set():
            raise error
        self.routes.failed(route, error, waited_s=waited_s)
        retry.failed(route, error)

    def _wait_for_effects(self, part: Part, retry: RetryState) -> None:
        """Wait until all effects have arrived, or until the missing effects are late and their pads can be replaced."""
        missing = self._missing(part)
        # not the part's deadline: a pad drawn ahead waits behind earlier requests to its helper
        longest = self.options.deadline_s
        began = time.monotonic()
        until = began + longest
        while missing:
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineExceededError(
                    f"no effects from the helpers within {longest:g} s. Are they running? "
                    f"{self.options.deadline_option} waits longer."
                )
            holders = {share.holder for share in missing if share.holder is not None}
            spare = bool(holders) and self.routes.can_replace(part.index, holders)
            if spare:
                in_time = retry.deadline - time.monotonic()
                patience = self.routes.patience_with_helpers_s(part.index, holders, part.size, left_s=in_time)
            else:
                patience = min(left, _LOOK_AGAIN_S)
                waited = time.monotonic() - began
                others = self.routes.replacements(part.index, holders, part.size, waited_s=waited)
                self.runtime.prober.reconnect(urgent=others)
            effects: list[Promise[Any]] = [share.effect for share in missing]
            wait(effects, max(0.0, patience))
            late = [share for share in missing if not share.effect.done()]
            missing = self._missing(part)
            if late and spare:
                retry.late |= {share.holder for share in late if share.holder is not None}
                self.routes.late(retry.late, waited_s=patience)
                return

    def _missing(self, part: Part) -> list[Share]:
        """Return the shares whose effects have not arrived. Requests the effects that were relayed."""
        for pad in part.pads:
            fetch_effects(pad)
        return [share for share in _shares(part) if not share.effect.done()]

    def _replace_spoilt_pads(self, part: Part, retry: RetryState) -> None:
        """Replace pads of helpers that were lost or late, or are quarantined."""
        suspects = [peer for peer in part.sent.holders if peer in retry.late or peer in self.routes.quarantined]

        def spoilt(pad: Pad) -> bool:
            return is_lost(pad) or any(share.holder in suspects for share in pad.shares)

        if part.pads and any(map(spoilt, part.pads)):
            self.faults.check(part, retry)
            self._replace_pads(part, retry, None, spoilt=spoilt)
            retry.late.clear()

    def _replace_pads(
        self, part: Part, retry: RetryState, executor: Route | None, *, spoilt: Callable[[Pad], bool]
    ) -> None:
        def draw(first: int, rows: int) -> Pad:
            counts = part.counts_of(first, rows)
            return self.runtime.draw(part.index, part.direction, rows, counts=counts, executor=executor)

        retry.redraws += 1
        numbered = enumerate(with_first_rows(part.pads))
        fresh = {number: draw(first, pad.rows) for number, (first, pad) in numbered if spoilt(pad)}
        part.remask(fresh)
        self.tally.add(pads_redrawn=sum(pad.rows for pad in fresh.values()))


def _shares(part: Part) -> list[Share]:
    """Return all shares of a part's pads."""
    return [share for pad in part.pads for share in pad.shares]


def _has_effects(part: Part) -> bool:
    """Returns True if every effect has arrived. Takes no lock, so it may return False just after the last arrival."""
    return all(share.effect.kept is not None for pad in part.pads for share in pad.shares)
