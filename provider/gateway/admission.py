"""Who may come in, in which role, and with how many bytes at a time."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from provider.config.schema import MIB, Limits
from provider.refusal import Refusal
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.network.wire import ErrorCode, Role

_AT_ONCE = nullcontext()


@dataclass(eq=False)
class _Claim:
    """Bytes that somebody waits for, or holds."""

    tenant: TenantIdentity
    size: int
    granted: bool = False


class ByteBudget:
    """Bytes of payloads that may be in memory at once, over all and per tenant.

    Taken before the memory is, so that no number of connections can make the gateway hold more, and held until it
    is free. A quarter is set apart for small requests, one for every connection: they never wait. The rest is granted
    to tenants by turns, and whoever's turn it is is not overtaken; a tenant that holds something already leaves room
    for one that may come.
    """

    def __init__(self, limits: Limits) -> None:
        self._pool = limits.max_inflight_mib * MIB * 3 // 4
        self._share = limits.max_inflight_mib_per_tenant * MIB
        self._small = min(limits.small_request, self._share)
        self._free = self._pool
        self._held: Counter[TenantIdentity] = Counter()
        self._last_turn: dict[TenantIdentity, int] = {}
        self._turns = itertools.count(1)
        self._waiting: list[_Claim] = []
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes that large requests hold."""
        with self._changed:
            return self._pool - self._free

    @property
    def waiting(self) -> int:
        """Large requests that wait for bytes."""
        with self._changed:
            return len(self._waiting)

    def taken(self, tenant: TenantIdentity, size: int, *, timeout: float) -> AbstractContextManager[None]:
        """Hold `size` bytes; waits for them.

        Raises, when it is entered:
            Refusal: BUSY if they do not come free in time, TOO_LARGE if they never can.
        """
        return _AT_ONCE if size <= self._small else self._granted(tenant, size, timeout)

    @contextmanager
    def _granted(self, tenant: TenantIdentity, size: int, timeout: float) -> Iterator[None]:
        if size > self._share:
            raise Refusal(ErrorCode.TOO_LARGE, f"{size} bytes for a request and its reply; at most {self._share}")
        claim = _Claim(tenant, size)
        try:
            with self._changed:
                self._waiting.append(claim)
                self._grant()
                if not self._changed.wait_for(lambda: claim.granted, timeout):
                    raise Refusal(ErrorCode.BUSY, "too many bytes are in flight; ask again later")
            yield
        finally:
            with self._changed:
                self._release(claim)
                self._grant()

    def _grant(self) -> None:
        """Give what is free to those who wait, in the order of their tenants' turns."""
        tenants = len(self._held.keys() | {claim.tenant for claim in self._waiting})
        fair = self._pool // (tenants + 1)
        for claim in sorted(self._waiting, key=lambda c: self._last_turn.get(c.tenant, 0)):
            held = self._held[claim.tenant]
            if held and held + claim.size > min(self._share, fair):
                continue  # it waits for itself
            if claim.size > self._free:
                break
            claim.granted = True
            self._waiting.remove(claim)
            self._free -= claim.size
            self._held[claim.tenant] += claim.size
            self._last_turn[claim.tenant] = next(self._turns)
        self._changed.notify_all()

    def _release(self, claim: _Claim) -> None:
        if not claim.granted:
            self._waiting.remove(claim)
            return
        self._free += claim.size
        self._held[claim.tenant] -= claim.size
        if not self._held[claim.tenant]:
            del self._held[claim.tenant]


class Register:
    """What each tenant has asked for, how often it has connected, and the role that it is served in (rule 8)."""

    def __init__(self) -> None:
        self._visits: Counter[TenantIdentity] = Counter()
        self._requests: Counter[TenantIdentity] = Counter()
        self._roles: dict[TenantIdentity, Counter[Role]] = {}
        self._lock = threading.Lock()
        self.last_request = -math.inf
        """When the last product was there, by `time.monotonic`."""

    def count_request(self, tenant: TenantIdentity) -> None:
        """One more product for the tenant."""
        with self._lock:
            self._requests[tenant] += 1
            self.last_request = time.monotonic()

    def requests_of(self, tenant: TenantIdentity) -> int:
        """Number of products for one tenant."""
        with self._lock:
            return self._requests[tenant]

    def count_visit(self, tenant: TenantIdentity) -> None:
        """The tenant has opened one more connection, whether it is served or refused."""
        with self._lock:
            self._visits[tenant] += 1

    def visits(self) -> dict[TenantIdentity, int]:
        """Number of connections that each tenant has opened, refused ones included."""
        with self._lock:
            return dict(self._visits)

    @property
    def requests(self) -> int:
        """Products of all tenants: for the operator's log."""
        with self._lock:
            return self._requests.total()

    def take_role(self, tenant: TenantIdentity, role: Role) -> None:
        """Bind a connection of the tenant to a role.

        Raises:
            Refusal: ROLE_REFUSED while another of its connections has the other role: whoever expands a
                pad's seed for a tenant must not see rows that the tenant masks.
        """
        with self._lock:
            roles = self._roles.setdefault(tenant, Counter())
            if roles.keys() - {role}:
                raise Refusal(ErrorCode.ROLE_REFUSED, "this tenant is being served in the other role here (rule 8)")
            roles[role] += 1

    def drop_role(self, tenant: TenantIdentity, role: Role) -> None:
        """Undo one `take_role`."""
        with self._lock:
            roles = self._roles[tenant]
            roles[role] -= 1
            if not roles[role]:
                del self._roles[tenant]
