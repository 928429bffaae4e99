"""The error that refuses one request."""

from __future__ import annotations

from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.network.wire import ErrorCode, QuotaLimit


class Refusal(SymbiosisError):
    """A request is not carried out, and the tenant is told why.

    Args:
        code: goes over the wire.
        detail: goes over the wire. It quotes no other tenant.
        limit: the tenant's quota, if the request is over it.
    """

    def __init__(self, code: ErrorCode, detail: str, *, limit: QuotaLimit | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.limit = limit
