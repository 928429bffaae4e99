"""The operator's own address: `/metrics` for Prometheus, `/healthz`, `/readyz`, and `/status` for `provider top`.

Every answer is made from one `Status`. Labels are tenants, roles, stages and layer groups, which the provider knows
anyway, and never content. There is no authentication, so the address should be on loopback or on a private network. A
web page that the operator visits could read tenants' names through a host name that resolves to loopback (DNS
rebinding). So requests for `/metrics` and `/status` must name an IP address, `localhost`, the host in `listen`, or one
of `hosts`.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from provider import logs
from provider.executor.queues import Histogram
from provider.gateway.listener import Listener, UnauthenticatedConnection
from provider.gateway.usage import COUNTED
from provider.operations.status import Status
from symbiosis_priv.network.addresses import names_host, parse_address

log = logs.EventLog(__name__)

_PREFIX = "symbiosis_provider_"
_CLIENT_S = 5.0  # seconds for each read of an operator's request
_MOST_CONNECTIONS = 16  # one more closes the oldest connection of the network with the most


Value = float | Mapping[Any, float]  # a figure, or figures by their labels


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, value: Value, *labels: str
) -> Metric:
    if not isinstance(value, Mapping):
        return kind(_PREFIX + name, text, value=value)
    family = kind(_PREFIX + name, text, labels=labels)
    for key, number in value.items():
        family.add_metric(key if isinstance(key, tuple) else (key,), number)
    return family


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def _histogram(
    name: str, text: str, values: dict[tuple[str, ...], Histogram], *, labels: list[str] | None = None
) -> Metric:
    family = HistogramMetricFamily(_PREFIX + name, text, labels=labels)
    for label, histogram in values.items():
        below, buckets = 0, []
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            below += count
            buckets.append((bound, below))
        family.add_metric(list(label), buckets, sum_value=histogram.total)
    return family


class _Collector:
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield _gauge("ready", "1 if requests are accepted and the executor answers", status.ready)
        yield _gauge("build_info", "1, with the version", {status.version: 1}, "version")
        yield _gauge(
            "certificate_expiry_timestamp_seconds",
            "when the next certificate of a file expires; 0 if the file cannot be read",
            status.certificates,
            "file",
        )
        yield _gauge("uptime_seconds", "seconds since the start", status.uptime_s)
        yield _gauge("last_reload_successful", "0 if changed files were refused: older settings apply", status.reloaded)
        yield _gauge("usage_unwritten_seconds", "time for which usage could not be written", status.usage_unwritten_s)
        yield _gauge("connections", "authenticated connections", status.connections)
        handshakes = status.handshakes
        yield _gauge("pending_handshakes", "connections that have not authenticated", handshakes.present)
        ended = {outcome: getattr(handshakes, outcome) for outcome in ("accepted", "refused", "late", "crowded_out")}
        yield _counter("handshakes", "handshakes that have ended, by outcome", ended, "outcome")
        yield _gauge("held_bytes", "bytes of large requests in flight", status.bytes_held)
        yield _gauge("waiting_for_bytes", "large requests that wait for memory", status.waiting_for_bytes)
        yield _counter("executor_restarts", "restarts of the executor", status.restarts)
        yield _counter("executor_hangs", "times that the executor did not answer for too long", status.hangs)
        for name in COUNTED:
            counts = {(one.tenant, one.role): getattr(one.counts, name) for one in status.tenants}
            yield _counter(f"tenant_{name}", "usage that `provider usage` bills", counts, "tenant", "role")
        yield _counter("tenant_connections", "connections that were opened", status.visits, "tenant")
        yield _counter("tenant_over_quota", "requests that a quota delayed or refused", status.over_quota, "tenant")
        yield _gauge("announced", "1 if the registry accepted the last announcement", status.registries, "registry")
        if (report := status.executor) is None:
            return
        yield _gauge("executor_resident_bytes", "resident memory of the executor's process", report.resident)
        yield _gauge("groups", "layer groups that are served", report.groups)
        yield _gauge("groups_loaded", "layer groups in memory", report.groups_loaded)
        yield _gauge("waiting", "requests in the executor's queue", report.waiting, "stage")
        ended = {reason: getattr(report, reason) for reason in ("late", "cancelled", "failed")}
        yield _counter("unanswered", "requests without a product", ended, "reason")
        yield _counter("product_seconds", "time in products", report.seconds)
        yield _counter("idle_seconds", "time without work", report.idle)
        rows_by_group = {str(group): rows for group, rows in enumerate(report.rows_by_group, report.first_group)}
        yield _counter("group_rows", "rows by layer group", rows_by_group, "group")
        yield _histogram("batch_rows", "rows of a product", {(): report.batch_rows})
        yield _histogram("batch_requests", "requests in a product", {(): report.batch_requests})
        waits: dict[tuple[str, ...], Histogram] = {(stage,): wait for stage, wait in report.waits.items()}
        yield _histogram("wait_seconds", "from a request's arrival to its first product", waits, labels=["stage"])


class MetricsServer:
    """Answers on the operator's address until closed. Every user of this machine can connect to loopback, so the number
    of connections is limited. Requests may use the host names in `hosts`, besides the one in `listen`. Raises
    `ConfigError` if it cannot listen there."""

    def __init__(self, listen: str, status: Callable[[], Status], *, hosts: Iterable[str] = ()) -> None:
        self.status = status
        host, _ = parse_address(listen)
        self.hosts = frozenset(name.lower() for name in ("localhost", host, *hosts))
        self._listener = Listener(
            listen, limit=_MOST_CONNECTIONS, greeting_s=_CLIENT_S, greet=lambda _: None, serve=self._serve
        )
        self._listener.start()

    @property
    def address(self) -> str:
        return self._listener.address

    def close(self) -> None:
        self._listener.stop(_CLIENT_S)

    def _serve(self, client: UnauthenticatedConnection, _: None) -> None:
        with contextlib.suppress(OSError):  # the client has left
            _Handler(client.socket, (client.network, 0), self)  # type: ignore[arg-type]  # no `BaseServer` is needed


class _Handler(MetricsHandler):
    timeout = _CLIENT_S
    server: MetricsServer  # type: ignore[assignment]

    def do_GET(self) -> None:
        """Answer one of four paths. Prometheus' client makes the answer to `/metrics`."""
        path = urlsplit(self.path).path
        if path == "/healthz":  # this process runs; its executor is restarted automatically
            self._answer(HTTPStatus.OK, b"alive\n")
        elif path not in ("/readyz", "/metrics", "/status"):
            self._answer(HTTPStatus.NOT_FOUND, b"try /metrics, /status, /healthz or /readyz\n")
        elif path != "/readyz" and not names_host(self.headers.get_all("Host", []), self.server.hosts):
            log.often("metrics_refused", reason="host")
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"add this host name to [metrics] hosts\n")
        elif path == "/metrics":
            self.registry = CollectorRegistry()
            self.registry.register(_Collector(self.server.status()))
            super().do_GET()
        elif path == "/status":
            self._answer(HTTPStatus.OK, msgspec.json.encode(self.server.status()), kind="application/json")
        elif self.server.status().ready:
            self._answer(HTTPStatus.OK, b"ready\n")
        else:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"not ready\n")

    def _answer(self, code: HTTPStatus, body: bytes, *, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
