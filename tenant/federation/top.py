"""`symbiosis-priv federation top`: shows the state of each provider of a federation on one screen.

One thread per provider probes it repeatedly on one connection. The screen shows the latest finding of each provider, so
a slow provider does not delay the others.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.checkpoints.layers import spans
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.federation import Federation, Peer
from tenant.core.prepared import Preparation
from tenant.federation.coverage import lacking
from tenant.federation.probe import GLANCE_ROUND_TRIPS, Finding, ProviderProbe
from tenant.routing.discovery import DEADLINE_S, Discovery
from tenant.routing.route import ProviderFigures
from tenant.session.published import SessionStatus, read_status

_STALE_S = 10.0  # a session that has not written for this long has ended or hangs
_POLL_S = 0.02


@dataclass(frozen=True)
class Observation:
    """A finding and the one before it, with the times when they were made (`time.monotonic`)."""

    finding: Finding
    when: float
    before: Finding | None = None
    before_when: float = 0.0

    @property
    def requests_per_s(self) -> float | None:
        """Requests per second of all sessions of this tenant, without those of `top`; None after one finding."""
        now, before = self.finding.report, None if self.before is None else self.before.report
        if now is None or before is None:
            return None
        others = max(0, now.requests - before.requests - GLANCE_ROUND_TRIPS)
        return others / max(1e-9, self.when - self.before_when)


class Watcher:
    """Probes one provider repeatedly in a thread.

    Args:
        interval: seconds between two probes.
        timeout: seconds for one probe.
    """

    def __init__(self, federation: Federation, peer: Peer, *, interval: float, timeout: float) -> None:
        self.peer = peer
        self.seen: Observation | None = None
        self._probe = ProviderProbe(federation, peer, None)
        self._interval, self._timeout = interval, timeout
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watch-{peer.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread without waiting for a probe in flight, which ends at its deadline."""
        self._closed.set()
        self._thread.join(_POLL_S)

    def _watch(self) -> None:
        while not self._closed.is_set():
            finding, now, last = self._probe.glance(self._timeout), time.monotonic(), self.seen
            self.seen = (
                Observation(finding, now) if last is None else Observation(finding, now, last.finding, last.when)
            )
            self._closed.wait(self._interval)
        self._probe.close()


def watch(
    federation: Federation,
    preparation: Preparation | None,
    *,
    status: Path | None,
    interval: float,
    timeout: float,
    once: bool,
) -> None:
    """Show the screen until Ctrl-C; with `once`, print it once all providers were probed or `timeout` has passed.

    Args:
        preparation: maps layer groups to layer numbers; if None, the screen shows layer groups.
        status: the status file of a running session (`published`).
        interval: seconds between two updates.
        timeout: seconds for one probe.
        once: True to print the screen once.
    """
    discovery = Discovery(federation, deadline_s=min(timeout, DEADLINE_S)) if federation.registries else None
    watchers: dict[Peer, Watcher] = {}
    console = terminal.console()

    def everybody() -> Federation:
        """Return the federation with the executors of registries, and watch each of its providers."""
        found = discovery.executors if discovery else ()
        now = replace(federation, peers=(*federation.peers, *found))
        for peer in now.peers:
            if peer not in watchers:
                watchers[peer] = Watcher(federation, peer, interval=interval, timeout=timeout)
                watchers[peer].start()
        for gone in watchers.keys() - set(now.peers):
            watchers.pop(gone).close()
        return now

    def screen() -> RenderableType:
        now = everybody()
        return render(now, [watchers[peer].seen for peer in now.peers], preparation, _status(status))

    try:
        if discovery:
            discovery.refresh()
            discovery.start()
        everybody()
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(watcher.seen is None for watcher in watchers.values()):
            time.sleep(_POLL_S)
        if once:
            console.print(screen())
            return
        with Live(screen(), console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(screen(), refresh=True)
    finally:
        for watcher in watchers.values():
            watcher.close()
        if discovery:
            discovery.close(_POLL_S)


def render(
    federation: Federation,
    seen: Sequence[Observation | None],
    preparation: Preparation | None,
    status: SessionStatus | str | None,
) -> RenderableType:
    """Return the contents of the screen.

    Args:
        seen: the findings of each provider, in the federation's order; None if a provider has not been probed yet.
        preparation: maps layer groups to layer numbers; if None, the screen shows layer groups.
        status: the status of a session, or the reason why there is none; None if no status file was given.
    """
    parts: list[RenderableType] = [_headline(federation, status), _providers(federation, seen, preparation, status)]
    for one in seen:
        if one is not None and one.finding.failure:
            parts.append(Text(f"{one.finding.peer.name}: {one.finding.failure}", style="red"))
    if preparation is not None and all(one is not None for one in seen):
        serving = [s for one in seen if one is not None and (s := one.finding.serving)]
        parts += [Text(line, style="red") for line in lacking(federation, serving, preparation.manifest.layers)]
    return Group(*parts)


def _status(path: Path | None) -> SessionStatus | str | None:
    if path is None:
        return None
    try:
        return read_status(path)
    except SymbiosisError as error:
        return str(error)


def _headline(federation: Federation, status: SessionStatus | str | None) -> Text:
    k = federation.pad_helpers
    pads = "all helpers share every pad" if k is None else f"{k} of {len(federation.helpers)} helpers share each pad"
    line = Text.assemble(("model ", "bold"), federation.model_digest[:23], f"  {pads}" if federation.helpers else "")
    if isinstance(status, str):
        line.append(f"  {status}", style="yellow")
    elif status is not None:
        age = max(0.0, time.time() - status.written)
        line.append(
            f"  session of process {status.pid}, {age:,.0f} s ago", style="yellow" if age > _STALE_S else "green"
        )
    return line


def _providers(
    federation: Federation,
    seen: Sequence[Observation | None],
    preparation: Preparation | None,
    status: SessionStatus | str | None,
) -> Table:
    headings = ["provider", "operator", "role", "state", "layers" if preparation else "layer groups"]
    headings += ["round trip", "own requests/s", "connections", "loaded", "up"]
    figures: dict[tuple[str, str], ProviderFigures] = {}
    if isinstance(status, SessionStatus):
        figures = {(provider.name, provider.role): provider for provider in status.providers}
        headings += ["in the session", "latency", "requests", "verified", "rejected"]
    rows, styles = [], []
    for peer, one in zip(federation.peers, seen, strict=True):
        own = figures.get((peer.name, peer.role))
        cells = [*_cells(peer, one, preparation), *(_figures(own) if isinstance(status, SessionStatus) else ())]
        bad = (one is not None and one.finding.failure) or (own is not None and own.rejected)
        rows.append([escape(cell) for cell in cells])
        styles.append("red" if bad else "")
    return terminal.table(headings, rows, justify="right", styles=styles)


def _cells(peer: Peer, one: Observation | None, preparation: Preparation | None) -> list[str]:
    who = [peer.name, peer.operator, peer.role]
    if one is None:
        return [*who, "not probed yet", *[""] * 6]
    finding, rate = one.finding, one.requests_per_s
    report = None if finding.failure else finding.report
    return [
        *who,
        "failed" if finding.failure else "ok",
        _served(finding, preparation),
        "" if finding.round_trip_s is None else f"{1e3 * finding.round_trip_s:,.2f} ms",
        "" if rate is None else f"{rate:,.1f}",
        "" if report is None else f"{report.connections:,}",
        "" if report is None else f"{report.groups_loaded} of {report.groups}",
        "" if report is None else f"{report.uptime_s:,.0f} s",
    ]


def _served(finding: Finding, preparation: Preparation | None) -> str:
    groups = finding.groups.get(FORWARD)
    if not groups:
        return ""
    layers = range(groups.stop) if preparation is None else preparation.manifest.layers
    return ", ".join(map(str, spans(layers[group] for group in groups if group < len(layers))))


def _figures(own: ProviderFigures | None) -> list[str]:
    if own is None:
        return ["not used", *[""] * 4]
    latency = "" if own.latency_s is None else f"{1e3 * own.latency_s:,.2f} ms"
    return [own.state, latency, f"{own.requests:,}", f"{own.verified:,}", f"{own.rejected:,}"]
