"""`symbiosis-priv provider top`: shows a provider's `/status` as a table."""

import http.client
import threading
import time

import msgspec
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from provider.executor.queues import Histogram
from provider.gateway.usage import UsageCounts
from provider.operations.status import Status
from symbiosis_priv.certificates.reading import SOON
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import ConnectionLostError, ProtocolError, one_line
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.stream import shut
from symbiosis_priv.system.files import UNDECODABLE

_TIMEOUT_S = 5.0
_MOST_BYTES = 16 << 20  # bytes of an answer
_BUSIEST = 10  # layer groups that are shown
_MIB = 1 << 20


def ask(address: str, *, timeout_s: float = _TIMEOUT_S) -> Status:
    """Fetch a provider's status. Raises ConnectionLostError without an answer in time, ProtocolError for a bad one."""
    host, port = parse_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.connect()
        late = threading.Timer(timeout_s, shut, (connection.sock,))  # a trickle of bytes must not extend the timeout
        late.daemon = True
        late.start()
        try:
            connection.request("GET", "/status")
            body = connection.getresponse().read(_MOST_BYTES)
        finally:
            late.cancel()
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionLostError(
            f'no provider answers at {address} ({error}); is it running, with [metrics] listen = "{address}"?'
        ) from error
    finally:
        connection.close()
    try:
        return msgspec.json.decode(body, type=Status)
    except UNDECODABLE as error:
        raise ProtocolError(f"{address} is not the [metrics] address of a provider of this release: {error}") from error


def watch(address: str, *, interval: float, once: bool) -> None:
    """Show the status until Ctrl-C, or once."""
    console = terminal.console()
    before, when = ask(address), time.monotonic()
    if once:
        console.print(render(before, None, 0.0))
        return
    with Live(render(before, None, 0.0), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            now, moment = ask(address), time.monotonic()
            live.update(render(now, before, moment - when), refresh=True)
            before, when = now, moment


def render(now: Status, before: Status | None, seconds: float) -> RenderableType:
    """Return the screen. The first screen shows totals; later screens show rates over the last `seconds`."""
    parts: list[RenderableType] = [_headline(now), _tenants(now, before, seconds)]
    if (report := now.executor) is not None:
        queue = Table("executor", "")
        for stage, count in report.waiting.items():
            queue.add_row(f"waiting, {stage.replace('_', '-')}", f"{count:,}")
        for stage, wait in report.waits.items():
            queue.add_row(f"mean wait, {stage.replace('_', '-')}", f"{1000 * _mean(wait):,.2f} ms")
        queue.add_row("mean rows of a product", f"{_mean(report.batch_rows):,.1f}")
        queue.add_row("mean requests in it", f"{_mean(report.batch_requests):,.2f}")
        queue.add_row("late, cancelled, failed", f"{report.late:,}, {report.cancelled:,}, {report.failed:,}")
        queue.add_row("layer groups loaded", f"{report.groups_loaded} of {report.groups}")
        totals = report.rows_by_group
        old = before.executor.rows_by_group if before is not None and before.executor is not None else [0] * len(totals)
        span = 1.0 if before is None else seconds
        rows = [(new - was) / span for new, was in zip(totals, old, strict=False)]
        busiest = Table("layer group", "rows" if before is None else "rows/s", "")
        top = max([*rows, 1.0])
        for group in sorted(range(len(rows)), key=lambda g: -rows[g])[:_BUSIEST]:
            bar = "█" * round(20 * rows[group] / top)
            name = now.groups[group] if group < len(now.groups) else str(report.first_group + group)
            busiest.add_row(escape(one_line(name)), f"{rows[group]:,.0f}", bar)
        parts.append(Columns([queue, busiest], padding=(0, 4)))
    return Group(*parts)


def _headline(status: Status) -> Text:
    state = ("ready", "bold green") if status.ready else ("not ready", "bold red")
    resident = 0 if status.executor is None else status.executor.resident
    return Text.assemble(
        (one_line(status.provider), "bold"),
        "  ",
        state,
        f"  up {status.uptime_s:,.0f} s  {status.connections} connections  "
        f"{status.handshakes.present} pending handshakes  "
        f"{resident / _MIB:,.0f} MiB  large requests: {status.bytes_held / _MIB:,.0f} MiB held, "
        f"{status.waiting_for_bytes} waiting  executor restarts: {status.restarts}",
        ""
        if not status.usage_unwritten_s
        else (f"  usage unwritten for {status.usage_unwritten_s:,.0f} s", "bold red"),
        _expiry(status),
        "" if status.reloaded else ("  changed files refused: see the log", "bold red"),
    )


def _expiry(status: Status) -> tuple[str, str] | str:
    if not status.certificates:
        return ""
    file, until = min(status.certificates.items(), key=lambda item: item[1])
    left_s = until - time.time()
    text = f"expires in {left_s / 86_400:,.0f} days" if left_s > 0 else "has expired" if until else "cannot be read"
    return f"  {one_line(file)} {text}", "bold red" if left_s < SOON.total_seconds() else ""


def _tenants(now: Status, before: Status | None, seconds: float) -> Table:
    unit, span, old = "", 1.0, {}
    if before is not None:
        unit, span, old = "/s", max(seconds, 1e-9), {(t.tenant, t.role): t.counts for t in before.tenants}
    rates = [("requests", "requests", 1), ("rows", "rows", 1), ("10⁹ work", "work", 1e9)]
    rates += [("MiB in", "bytes_received", _MIB), ("MiB out", "bytes_sent", _MIB)]
    totals = ["refused", "abandoned", "slow", "failed"]
    rows = []
    for tenant in now.tenants:
        counts, earlier = tenant.counts, old.get((tenant.tenant, tenant.role), UsageCounts())
        cells = [escape(one_line(tenant.tenant)), tenant.role]
        for _, name, scale in rates:
            cells.append(f"{(getattr(counts, name) - getattr(earlier, name)) / span / scale:,.1f}")
        rows.append([*cells, *(f"{getattr(counts, name):,}" for name in totals)])
    headings = ["tenant", "role", *(f"{heading}{unit}" for heading, _, _ in rates), *totals]
    return terminal.table(headings, rows, justify="right")


def _mean(histogram: Histogram) -> float:
    return histogram.total / max(1, sum(histogram.counts))
