"""The error that refuses one request."""

from __future__ import annotations

from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.network.wire import ErrorCode


class Refusal(SymbiosisError):
    """A request is not carried out, and the tenant is told why.

    Args:
        code: goes over the wire.
        detail: goes over the wire. It quotes no other tenant.
    """

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
