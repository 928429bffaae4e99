"""Who may come in, in which role, and with how many bytes at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from provider.config import MIB, Limits
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.tls import TenantIdentity
from symbiosis_priv.wire import ErrorCode, Role


class Refusal(SymbiosisError):
    """A request is not carried out; the tenant is told why. `detail` goes over the wire: it quotes nobody else."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class ByteBudget:
    """Bytes of payloads that may be in memory at once, over all and per tenant.

    Taken before the memory is, so that no number of connections can make the gateway hold more.
    """

    def __init__(self, limits: Limits) -> None:
        self._total = limits.max_inflight_mib * MIB
        self._share = limits.max_inflight_mib_per_tenant * MIB
        self._used: Counter[TenantIdentity] = Counter()
        self._all_used = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, tenant: TenantIdentity, size: int, *, timeout: float) -> Iterator[None]:
        """Hold `size` bytes; waits for them.

        Raises:
            Refusal: BUSY if they do not come free in time, TOO_LARGE if they never can.
        """
        if size > self._share:
            raise Refusal(ErrorCode.TOO_LARGE, f"{size} bytes for a request and its reply; at most {self._share}")

        def free() -> bool:
            return self._all_used + size <= self._total and self._used[tenant] + size <= self._share

        with self._changed:
            if not self._changed.wait_for(free, timeout):
                raise Refusal(ErrorCode.BUSY, "too many bytes are in flight; ask again later")
            self._all_used += size
            self._used[tenant] += size
        try:
            yield
        finally:
            with self._changed:
                self._all_used -= size
                self._used[tenant] -= size
                if not self._used[tenant]:
                    del self._used[tenant]
                self._changed.notify_all()


class Register:
    """Which tenants are connected, how often, in which role (rule 8), and how much they have asked."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._connections: Counter[TenantIdentity] = Counter()
        self._requests: Counter[TenantIdentity] = Counter()
        self._roles: dict[TenantIdentity, Counter[Role]] = {}
        self._lock = threading.Lock()

    def count_request(self, tenant: TenantIdentity) -> None:
        """One more product for the tenant."""
        with self._lock:
            self._requests[tenant] += 1

    def counts(self, tenant: TenantIdentity) -> tuple[int, int]:
        """(products, open connections) of one tenant: what it may know, and no other."""
        with self._lock:
            return self._requests[tenant], self._connections[tenant]

    @property
    def requests(self) -> int:
        """Products of all tenants: for the operator's log."""
        with self._lock:
            return self._requests.total()

    @contextmanager
    def connected(self, tenant: TenantIdentity) -> Iterator[None]:
        """Count a connection. Refusal BUSY if there are too many."""
        with self._lock:
            if self._connections.total() >= self._limits.max_connections:
                raise Refusal(ErrorCode.BUSY, "the provider has too many connections")
            if self._connections[tenant] >= self._limits.max_connections_per_tenant:
                raise Refusal(ErrorCode.BUSY, "this tenant has too many connections")
            self._connections[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._connections[tenant] -= 1
                if not self._connections[tenant]:
                    del self._connections[tenant]

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
