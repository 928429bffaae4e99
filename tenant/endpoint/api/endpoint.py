"""The state that all routes share: the service, the settings and the metrics of one endpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request

from tenant.endpoint.api.http_server import CONNECTIONS
from tenant.endpoint.api.service import Service
from tenant.endpoint.engine.requests import Done, Engine

_PREFIX = "symbiosis_endpoint_"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


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
        uploads: paths to which clients may upload larger bodies, with their limits in bytes. Their routes read them.
    """

    keys: tuple[str, ...]
    hosts: frozenset[str] = frozenset({"localhost"})
    body_limit: int = 8 << 20
    body_s: float = 30.0
    requests: int = CONNECTIONS
    drain_s: float = 30.0
    adapters: Path | None = None
    open_paths: frozenset[str] = frozenset({"/", "/health", "/openapi.json"})
    uploads: Mapping[str, int] = field(default_factory=dict)


class EndpointMetrics(Collector):
    """Counts the requests of one endpoint, for Prometheus. Reveals nothing about the content of texts. `engine`: its
    load is read at every scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        self._prompt = Counter(_PREFIX + "prompt_tokens", "tokens of prompts", registry=registry)
        self._cached = Counter(_PREFIX + "cached_tokens", "tokens of prompts from the cache", registry=registry)
        self._finished = Counter(_PREFIX + "finished", "choices, by their end", ["finish"], registry=registry)
        self._whole = Histogram(_PREFIX + "answer_seconds", "from request to end", buckets=_SECONDS, registry=registry)
        self.first_token = Histogram(
            _PREFIX + "first_token_seconds", "from request to token", buckets=_SECONDS, registry=registry
        )
        self.answers = Counter(_PREFIX + "http_answers", "HTTP answers", ["route", "status"], registry=registry)
        """The route is the path's pattern, not the client's path."""

    def ended(self, done: Done, seconds: float) -> None:
        """Count the end of a choice."""
        self._finished.labels(done.finish).inc()
        self._prompt.inc(done.prompt_tokens)
        self._cached.inc(done.ledger.cached_tokens)
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        load = self._engine.load()
        yield GaugeMetricFamily(_PREFIX + "running", "requests that are computed", load.running)
        yield GaugeMetricFamily(_PREFIX + "waiting", "requests that wait", load.waiting)
        yield GaugeMetricFamily(_PREFIX + "memory_bytes", "keys and values", load.memory)
        yield GaugeMetricFamily(_PREFIX + "memory_limit_bytes", "limit of keys and values", load.memory_limit)
        yield CounterMetricFamily(_PREFIX + "steps", "forward passes", load.steps)
        yield CounterMetricFamily(_PREFIX + "tokens", "new tokens", load.tokens)
        yield CounterMetricFamily(_PREFIX + "rows", "masked rows sent", load.rows)


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
