"""The state that all routes share: the service, the settings and the metrics of one endpoint."""

from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request

from tenant.endpoint.api.http_server import CONNECTIONS
from tenant.endpoint.api.metrics import EndpointMetrics
from tenant.endpoint.api.service import Service


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Access rules and limits of an endpoint.

    Args:
        keys: API keys. Each key is a client, and clients get equal shares.
        hosts: names that the `Host` header may have, besides IP addresses. A web page that rebinds its own name to this
            machine (DNS rebinding) has another name.
        body_limit: bytes of a request's body.
        body_s: seconds in which a body must arrive.
        requests: requests in progress; more are refused. No client has more of them than places that stay free.
        drain_s: seconds that answers may go on when the server stops.
        adapters: folder whose adapters may be loaded at run time; None for none.
        open_paths: paths that need no key.
        streamed_paths: paths whose routes read large bodies themselves and limit them.
    """

    keys: tuple[str, ...]
    hosts: frozenset[str] = frozenset({"localhost"})
    body_limit: int = 8 << 20
    body_s: float = 30.0
    requests: int = CONNECTIONS
    drain_s: float = 30.0
    adapters: Path | None = None
    open_paths: frozenset[str] = frozenset({"/", "/health", "/openapi.json"})
    streamed_paths: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One endpoint; `app.state.endpoint` of its application."""

    service: Service
    settings: Settings
    metrics: EndpointMetrics

    def client(self, http: Request) -> str:
        """Return the name of the client for the engine: a digest of its key."""
        return str(http.scope["state"]["client"])


def endpoint_of(http: Request) -> Endpoint:
    """Return the endpoint that a request has reached."""
    endpoint: Endpoint = http.app.state.endpoint
    return endpoint
