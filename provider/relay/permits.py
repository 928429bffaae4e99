"""Permits: which helpers may send blocks to this executor for which tenant.

A tenant asks for a permit on its own authenticated connection and names its helpers. The permit's token is random. The
tenant passes it to the helpers, so a helper can send blocks for a tenant only if that tenant has chosen it.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from provider.refusal import Refusal
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.network.wire import TOKEN_BYTES, ErrorCode

LIFETIME_S = 3600.0
_PER_TENANT = 64  # permits; one session needs one


class _Permit(NamedTuple):
    tenant: TenantIdentity
    helpers: frozenset[str]
    expires: float
    refusal: Callable[[], Refusal | None]


class Permits:
    """The permits of all tenants. Thread-safe.

    Args:
        allowed: `fingerprint` of the certificates of the helpers that the operator allows.
        now: seconds of a monotonic clock.
    """

    def __init__(self, allowed: frozenset[str], now: Callable[[], float] = time.monotonic) -> None:
        self._allowed = allowed
        self._now = now
        self._permits: OrderedDict[bytes, _Permit] = OrderedDict()  # in order of expiry
        self._by_tenant: dict[TenantIdentity, list[bytes]] = {}
        self._lock = threading.Lock()

    def renew(self, allowed: frozenset[str]) -> None:
        """Allow other helpers in later permits."""
        self._allowed = allowed

    def issue(
        self, tenant: TenantIdentity, helpers: Sequence[str], *, refusal: Callable[[], Refusal | None] = lambda: None
    ) -> tuple[bytes, tuple[str, ...]]:
        """Issue a permit. Returns its token, and the helpers that the operator allows.

        A tenant that has too many permits loses its oldest one.

        Args:
            helpers: `fingerprint` of the helpers' certificates.
            refusal: returns a refusal once the tenant's certificate is not accepted any more. The permit then ends.

        Raises:
            Refusal: the operator allows none of them.
        """
        named = tuple(helper for helper in helpers if helper in self._allowed)
        if not named:
            raise Refusal(ErrorCode.NOT_SERVED, "this executor accepts blocks of none of these helpers ([relay] from)")
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            self._expire()
            own = self._by_tenant.setdefault(tenant, [])
            if len(own) == _PER_TENANT:
                del self._permits[own.pop(0)]
            own.append(token)
            self._permits[token] = _Permit(tenant, frozenset(named), self._now() + LIFETIME_S, refusal)
        return token, named

    def tenant_of(self, token: bytes, *, helper: str) -> TenantIdentity:
        """The tenant that has permitted a helper.

        Raises:
            Refusal: there is no such permit, it does not name the helper, or the tenant's certificate is not accepted
                any more.
        """
        with self._lock:
            self._expire()
            permit = self._permits.get(token)
        if permit is None or helper not in permit.helpers or permit.refusal() is not None:
            raise Refusal(ErrorCode.REFUSED, "no permit for this helper: the tenant must ask for a new one")
        return permit.tenant

    def has_permit(self, tenant: TenantIdentity) -> bool:
        with self._lock:
            self._expire()
            return tenant in self._by_tenant

    def _expire(self) -> None:
        while self._permits and next(iter(self._permits.values())).expires <= self._now():
            token, permit = self._permits.popitem(last=False)
            own = self._by_tenant[permit.tenant]
            own.remove(token)
            if not own:
                del self._by_tenant[permit.tenant]
