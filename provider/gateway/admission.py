"""Admission of requests: memory for their payloads, and the role of each tenant."""

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from provider.config.schema import MIB, Limits
from provider.gateway.credentials import Party
from provider.refusal import Refusal
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.network.wire import ErrorCode, Role

_AT_ONCE = nullcontext()


@dataclass(eq=False)
class _Claim:
    """Bytes that one request waits for or holds."""

    tenant: TenantIdentity
    size: int
    granted: bool = False


class ByteBudget:
    """Limits the bytes of payloads in memory, in total and per tenant. Thread-safe.

    A request takes its bytes before the gateway allocates the memory, and holds them until the memory is free, so the
    limit holds for any number of connections. A quarter of the memory is reserved for small requests, with room for
    one per connection: small requests never wait. Large requests share the rest. Tenants take turns, and a request
    whose tenant is next is not overtaken. A tenant that holds bytes gets no more than `pool / (tenants + 1)`, so that
    one more tenant finds room.
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
        """Wait for `size` bytes and hold them.

        Args:
            timeout: seconds.

        Raises, when the context is entered:
            Refusal: BUSY if the bytes do not become free in time, TOO_LARGE if the request exceeds the tenant's limit.
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
        """Grant free bytes to waiting requests, in the order of their tenants' last turns."""
        tenants = len(self._held.keys() | {claim.tenant for claim in self._waiting})
        fair = self._pool // (tenants + 1)
        for claim in sorted(self._waiting, key=lambda c: self._last_turn.get(c.tenant, 0)):
            held = self._held[claim.tenant]
            if held and held + claim.size > min(self._share, fair):
                continue  # the tenant waits for its own bytes, and other tenants may go first
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
    """Counts the products and connections of each tenant, and keeps its role (rule 8). Thread-safe."""

    def __init__(self) -> None:
        self._visits: Counter[Party] = Counter()
        self._requests: Counter[TenantIdentity] = Counter()
        self._roles: dict[TenantIdentity, Counter[Role]] = {}
        self._lock = threading.Lock()
        self.last_request = -math.inf
        """Time of the last answered product, by `time.monotonic`."""

    def count_request(self, tenant: TenantIdentity) -> None:
        with self._lock:
            self._requests[tenant] += 1
            self.last_request = time.monotonic()

    def requests_of(self, tenant: TenantIdentity) -> int:
        """Number of products of one tenant."""
        with self._lock:
            return self._requests[tenant]

    def count_visit(self, party: Party) -> None:
        """Count a connection, whether it is served or refused."""
        with self._lock:
            self._visits[party] += 1

    def visits(self) -> dict[Party, int]:
        """Number of connections that each tenant or helper has opened, including refused connections."""
        with self._lock:
            return dict(self._visits)

    @property
    def requests(self) -> int:
        """Number of products of all tenants."""
        with self._lock:
            return self._requests.total()

    def take_role(self, tenant: TenantIdentity, role: Role) -> None:
        """Bind a connection of the tenant to a role.

        Raises:
            Refusal: ROLE_REFUSED while another connection of the tenant has the other role: a helper that expands the
                seeds of a tenant's pads must not see rows that the tenant masks.
        """
        with self._lock:
            roles = self._roles.setdefault(tenant, Counter())
            if roles.keys() - {role}:
                raise Refusal(ErrorCode.ROLE_REFUSED, "this provider serves this tenant in the other role (rule 8)")
            roles[role] += 1

    def drop_role(self, tenant: TenantIdentity, role: Role) -> None:
        """Undo one `take_role`."""
        with self._lock:
            roles = self._roles[tenant]
            roles[role] -= 1
            if not roles[role]:
                del self._roles[tenant]
