"""`federation top`: providers that answer, fall silent, lie in a session, or have never answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from typer.testing import CliRunner

from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.federation import Federation
from tenant.core.prepared import Preparation
from tenant.federation import cli as federation_cli
from tenant.federation.probe import ProviderProbe
from tenant.federation.top import Observation, Watcher, render
from tenant.routing.route import ProviderFigures
from tenant.session.published import SessionStatus, write_status

if TYPE_CHECKING:
    from tests.tenant.conftest import NewFederation, ScriptedProvider

TIMEOUT_S = 20.0


def text_of(renderable: object, *, width: int = 260) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def seen_now(federation: Federation) -> list[Observation | None]:
    """One probe of each provider."""
    found: list[Observation | None] = []
    for peer in federation.peers:
        probe = ProviderProbe(federation, peer, None)
        found.append(Observation(probe.glance(2.0), 0.0))
        probe.close()
    return found


def session_of(federation: Federation, *, rejected: int = 0, written: float | None = None) -> SessionStatus:
    figures = [
        ProviderFigures(
            name=peer.name,
            role=peer.role,
            state="in use",
            requests=1234,
            latency_s=0.0021,
            verified=98765,
            rejected=rejected,
        )
        for peer in federation.executors
    ]
    now = time.time() if written is None else written
    return SessionStatus(pid=4711, written=now, model_digest=federation.model_digest, providers=figures)


def test_probes_share_a_connection_and_reconnect_after_a_loss(
    new_federation: NewFederation, executor: ScriptedProvider, helper: ScriptedProvider
) -> None:
    federation = new_federation([executor], [helper])
    for provider, peer in zip((executor, helper), federation.peers, strict=True):
        probe = ProviderProbe(federation, peer, None)
        for _ in range(3):
            finding = probe.glance(TIMEOUT_S)
            assert finding.failure is None
            assert finding.groups == dict.fromkeys(DIRECTIONS, range(9))
            assert finding.round_trip_s is not None
            assert finding.days_left is not None
        assert len(provider.hellos) == 1
        provider.hang_up()
        assert probe.glance(TIMEOUT_S).failure is not None
        assert probe.glance(TIMEOUT_S).failure is None
        assert len(provider.hellos) == 2
        probe.close()
        assert all(heard.request.rows == 0 for heard in provider.heard)


def test_a_watcher_probes_again_and_computes_the_rate(
    new_federation: NewFederation, executor: ScriptedProvider
) -> None:
    federation = new_federation([executor])
    watcher = Watcher(federation, federation.peers[0], interval=0.01, timeout=TIMEOUT_S)
    watcher.start()
    deadline = time.monotonic() + TIMEOUT_S
    while watcher.seen is None or watcher.seen.requests_per_s is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert watcher.seen.requests_per_s == 0  # its own round trips are not counted
    other = ProviderProbe(federation, federation.peers[0], None)
    while not watcher.seen.requests_per_s:
        assert time.monotonic() < deadline
        assert other.glance(TIMEOUT_S).failure is None
    other.close()
    watcher.close()


def test_the_screen_shows_served_and_missing_layers(
    new_federation: NewFederation, executor: ScriptedProvider, helper: ScriptedProvider, preparation: Preparation
) -> None:
    federation = new_federation([executor], [helper])
    good = seen_now(federation)
    shown = text_of(render(federation, good, preparation, None))
    assert "all helpers share every pad" in shown
    assert shown.count(" ok ") == 2
    assert shown.count(" 0-1 ") == 2
    assert "nobody" not in shown
    assert " 0-8 " in text_of(render(federation, good, None, None))
    helper.close()
    shown = text_of(render(federation, seen_now(federation), preparation, None))
    assert "cannot reach helper" in shown
    assert "no pads without helper" in shown
    assert "not probed yet" in text_of(render(federation, [None, good[1]], preparation, None))


def test_the_screen_shows_a_sessions_figures(new_federation: NewFederation, executor: ScriptedProvider) -> None:
    federation = new_federation([executor])
    seen = seen_now(federation)
    shown = text_of(render(federation, seen, None, session_of(federation, rejected=7)))
    for figure in ("in use", "2.10 ms", "1,234", "98,765", " 7 ", "session of process 4711, 0 s ago"):
        assert figure in shown, figure
    assert "cannot read" in text_of(render(federation, seen, None, "cannot read it"))


def test_no_column_is_cut_off(new_federation: NewFederation, executor: ScriptedProvider) -> None:
    """With few providers and with many, probed or not, in the session or not."""
    federation = new_federation([executor])
    seen = seen_now(federation)
    status = session_of(federation)
    peers = [replace(federation.peers[0], name=f"provider-number-{i}") for i in range(20)]
    for some, looks in ((federation.peers, seen), (peers, [None] * 10 + seen * 10)):
        shown = text_of(render(replace(federation, peers=tuple(some)), looks, None, status), width=140)
        assert "…" not in shown


def test_the_command_prints_the_screen_once(
    new_federation: NewFederation,
    federation_file: Callable[[Federation], Path],
    executor: ScriptedProvider,
    tmp_path: Path,
) -> None:
    federation = new_federation([executor])
    write_status(tmp_path / "status.json", session_of(federation))
    arguments = ["top", "-f", str(federation_file(federation)), "--once", "--status", str(tmp_path / "status.json")]
    result = CliRunner().invoke(federation_cli.app, arguments, env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    assert federation.peers[0].name in result.output
    assert "98,765" in result.output
