"""The error that refuses one request."""

from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.network.wire import ErrorCode, QuotaLimit


class Refusal(SymbiosisError):
    """The provider does not carry out a request, and tells the tenant why. `detail` names no other tenant. `limit` is
    the tenant's quota, if the request exceeds it."""

    def __init__(self, code: ErrorCode, detail: str, *, limit: QuotaLimit | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.limit = limit
