"""Slots for authenticated connections: a limited number, shared between tenants.

While slots are free, a tenant may hold as many as its own limit allows. Once all are taken, a tenant that holds fewer
than the others still gets a slot: the idlest connection of the tenant that holds the most is closed. So no group of
tenants can shut out another one with connections that they do not use, and the shares of tenants that all want more
become equal. A helper that sends blocks counts as a tenant. A connection in the middle of a request counts as less idle
than every connection between two requests.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from provider.config.schema import Limits
from provider.gateway.credentials import Party
from provider.refusal import Refusal
from symbiosis_priv.network.wire import ErrorCode

_CLOSING_S = 2.0
"""Longest wait of a new connection for the end of the connection that is closed for it."""


@dataclass(eq=False)
class Slot:
    """The slot of one connection.

    Args:
        tenant: the client of the connection.
        close: closes the connection, from any thread.
    """

    tenant: Party
    close: Callable[[], None]
    _active: float = field(default_factory=time.monotonic)
    _busy: bool = False
    _ended: threading.Event = field(default_factory=threading.Event)

    def begin_request(self) -> None:
        """Record that the first bytes of a request have arrived."""
        self._busy = True

    def end_request(self) -> None:
        """Record that the request was answered."""
        self._busy, self._active = False, time.monotonic()

    @property
    def idle_since(self) -> float:
        """Time of the last answer, by `time.monotonic`; infinity during a request."""
        return math.inf if self._busy else self._active


class Slots:
    """The slots of all connections. Thread-safe.

    Args:
        limits: the number of slots, and the largest number that one tenant may hold.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: dict[Party, list[Slot]] = {}
        self._lock = threading.Lock()

    def count(self, tenant: Party) -> int:
        """Number of slots that a tenant holds."""
        with self._lock:
            return len(self._held.get(tenant, ()))

    @contextmanager
    def taken(self, tenant: Party, close: Callable[[], None]) -> Iterator[Slot]:
        """Hold a slot for a connection of `tenant`, which `close` closes from any thread.

        Raises, when the context is entered:
            Refusal: BUSY if the tenant holds as many slots as it may, or if all are taken and no tenant holds more.
        """
        slot = Slot(tenant, close)
        with self._lock:
            closed = self._make_room(tenant)
            self._held.setdefault(tenant, []).append(slot)
        try:
            if closed is not None:
                closed.close()
                if not closed._ended.wait(_CLOSING_S):  # the closed connection's thread still holds memory
                    raise Refusal(ErrorCode.BUSY, "the provider has too many connections")
            yield slot
        finally:
            with self._lock:
                self._free(slot)
            slot._ended.set()

    def _make_room(self, tenant: Party) -> Slot | None:
        """Return the slot whose connection must be closed for a new connection of `tenant`; None if a slot is free."""
        own = len(self._held.get(tenant, ()))
        if own >= self._limits.max_connections_per_tenant:
            raise Refusal(ErrorCode.BUSY, "this tenant has too many connections")
        if sum(map(len, self._held.values())) < self._limits.max_connections:
            return None
        most = max(map(len, self._held.values()))
        if most < own + 2:  # otherwise the two tenants would only swap their numbers
            raise Refusal(ErrorCode.BUSY, "the provider has too many connections")
        slots = (slot for held in self._held.values() if len(held) == most for slot in held)
        idlest = min(slots, key=lambda slot: slot.idle_since)
        self._free(idlest)
        return idlest

    def _free(self, slot: Slot) -> None:
        """Free a slot. Does nothing if the slot was freed when its connection was closed."""
        held = self._held.get(slot.tenant, [])
        if slot in held:
            held.remove(slot)
        if not held:
            self._held.pop(slot.tenant, None)
