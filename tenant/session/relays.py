"""Decides to which executor the effects of the next pad are relayed, and holds the executors' permits.

An executor takes blocks only with a permit, which names the helpers. The tenant asks for it on its own connection. A
pad is relayed if all of its helpers have the permit; otherwise, and for a while after a failure, helpers send effects
to the tenant.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from symbiosis_priv.certificates.reading import fingerprint, load_pin
from symbiosis_priv.errors import ProtocolError, ProviderError, TransportError
from symbiosis_priv.federation import Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.executor_client import ExecutorClient
from tenant.connections.helper_client import RelayInstruction
from tenant.core.gate import Gate
from tenant.routing.route import Route
from tenant.routing.routes import Routes

log = logging.getLogger(__name__)

_PERMIT_S: Final = 5.0  # longest wait for a permit
_FIRST_PAUSE_S: Final = 1.0
_LAST_PAUSE_S: Final = 300.0
_USED_PART: Final = 0.5  # share of an executor's stated times that is used: clocks differ, and messages take time


class GrantedPermit(NamedTuple):
    """A permit, and the time of its renewal, by `time.monotonic`."""

    permit: wire.Permit
    renew_at: float


class Relays:
    """The relays of one process. Thread-safe.

    Args:
        gate: checks rule 8 before each order.
        client: returns the client of an executor.
    """

    def __init__(self, gate: Gate, routes: Routes, client: Callable[[Route], ExecutorClient]) -> None:
        self._gate, self._routes, self._client = gate, routes, client
        self._signers = {  # read once: a file that is replaced later must not convict the executor
            fingerprint(pin): (route.peer, load_pin(pin).public_key())
            for route in routes.helpers
            for pin in route.peer.pins
        }
        self._granted: dict[Peer, GrantedPermit] = {}
        self._paused: dict[Peer, tuple[float, float]] = {}  # end and length of each pause
        self._asking: dict[Peer, threading.Lock] = {}  # one request for a permit at a time from each executor

    def target(self, index: GroupIndex, executor: Route | None) -> Route | None:
        """Return the executor that receives the effects of a group's next pad; None if they are not relayed.

        Args:
            executor: the executor that will see rows under the pad, if that is known.
        """
        route = executor or self._routes.likely(index)
        if route is None or route.welcome is None or route.welcome.version < wire.RELAY_VERSION or not route.is_up:
            return None
        until, _ = self._paused.get(route.peer, (0.0, 0.0))
        return route if until <= time.monotonic() else None

    def order(self, route: Route, holders: Sequence[Peer]) -> RelayInstruction | None:
        """Return the instruction to relay effects of these helpers to an executor; None if they are not relayed.

        Raises:
            RoleConflictError: the executor belongs to a helper's company (rule 8).
        """
        with self._asking.setdefault(route.peer, threading.Lock()):
            permit, welcome = self._permit(route), route.welcome
        permitted = [] if permit is None else [self.signer(helper) for helper in permit.helpers]
        if permit is None or welcome is None or not set(holders) <= {found[0] for found in permitted if found}:
            return None
        self._gate.check_relay(route.peer, holders)
        return RelayInstruction(
            executor=route.peer,
            welcome=welcome,
            order=wire.RelayOrder(permit=permit.token, executor=fingerprint(route.peer.certificate)),
            max_bytes=permit.max_bytes,
            until=time.monotonic() + _USED_PART * permit.block_seconds,
            failed=lambda: self.pause(route.peer),
        )

    def signer(self, helper: str) -> tuple[Peer, PublicKeyTypes] | None:
        """Return the helper whose certificate has this `fingerprint`, and the certificate's key; None if there is
        none."""
        return self._signers.get(helper)

    def pause(self, executor: Peer, *, for_good: bool = False, first_s: float = _FIRST_PAUSE_S) -> None:
        """Relay nothing to an executor for a while, or for the rest of the session.

        Args:
            first_s: length of the first pause. Each pause is twice as long as the one before, up to 300 s. The next
                one is a first pause again if there was no failure for as long as the last pause.
        """
        now = time.monotonic()
        self._granted.pop(executor, None)  # a restarted executor has forgotten its permits
        until, length = self._paused.get(executor, (0.0, 0.0))
        if for_good:
            self._paused[executor] = (float("inf"), length)
        elif until <= now:
            length = max(2 * length if now < until + length else 0.0, first_s)
            length = min(length, _LAST_PAUSE_S)
            self._paused[executor] = (now + length, length)
            log.info("effects are not relayed to %s for %g s", executor.name, length)

    def _permit(self, route: Route) -> wire.Permit | None:
        granted, now = self._granted.get(route.peer), time.monotonic()
        if granted is not None and now < granted.renew_at:
            return granted.permit
        helpers = sorted(self._signers)
        try:
            permit = self._client(route).permit(helpers[: wire.MAX_HELPERS], deadline=now + _PERMIT_S)
        except (TransportError, ProviderError, ProtocolError) as error:
            log.info("effects are not relayed to %s: %s", route, error)
            late = time.monotonic() >= now + _PERMIT_S  # pads have waited that long
            self.pause(route.peer, first_s=_LAST_PAUSE_S if late else _FIRST_PAUSE_S)
            return None
        self._granted[route.peer] = GrantedPermit(permit, now + _USED_PART * permit.seconds)
        return permit
