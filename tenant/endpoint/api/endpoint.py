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
        keys: API keys. Each key is one client, and clients get equal shares.
        hosts: names allowed in the `Host` header, besides IP addresses. Against DNS rebinding, in which a web page's
            own name resolves to this machine.
        body_limit: bytes of a request's body.
        body_s: seconds in which a body must arrive.
        requests: limit of requests in progress. A client may have at most as many of them as stay free.
        drain_s: seconds that answers may take to end when the server stops.
        adapters: folder whose adapters may be loaded at run time; None for none.
        open_paths: paths that need no key.
        streamed_paths: paths whose routes read and limit large bodies themselves.
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
    """What the routes of one endpoint use. Stored as `app.state.endpoint`."""

    service: Service
    settings: Settings
    metrics: EndpointMetrics

    def client(self, http: Request) -> str:
        """Return the name of the client for the engine: a digest of its key."""
        return str(http.scope["state"]["client"])


def endpoint_of(http: Request) -> Endpoint:
    """Return the endpoint of a request."""
    endpoint: Endpoint = http.app.state.endpoint
    return endpoint
