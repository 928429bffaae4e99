"""A session's status file: its figures, its permissions, and that it holds nothing else."""

from __future__ import annotations

import json
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.errors import ConfigError, StorageError
from symbiosis_priv.network import wire
from tenant.model.hf import RemoteConfig
from tenant.routing.route import ProviderFigures
from tenant.session.published import SessionStatus, publish, read_status, status_of, write_status

if TYPE_CHECKING:
    from tests.tenant.conftest import Heard, NewProvider, NewSession, ScriptedProvider

TIMEOUT_S = 20.0


def rows(count: int = 4) -> Tensor:
    return torch.arange(count * 64, dtype=torch.int32).reshape(count, 64) % 7


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_status_shows_a_liar_and_the_others_work(
    new_session: NewSession,
    new_provider: NewProvider,
    executor: ScriptedProvider,
    helper: ScriptedProvider,
    frames: Callable[..., bytes],
) -> None:
    def lie(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        return frames(reply, answer + 1)

    liar = new_provider()
    liar.behaviour = lie
    session = new_session("pad", [liar, executor], [helper], pool_memory=0)
    session.product(0, FORWARD, rows())
    session.product(0, FORWARD, rows())
    status = status_of(session)
    found = {(figures.name, figures.role): figures for figures in status.providers}
    first, second, sharing = (
        found[peer.name, peer.role]
        for peer in (liar.peer("executor"), executor.peer("executor"), helper.peer("helper"))
    )
    assert (first.state, first.rejected, first.verified) == ("quarantined", 1, 0)
    assert (second.state, second.rejected) == ("up", 0)
    assert second.verified == 2
    assert second.requests >= 2
    assert second.latency_s is not None
    assert sharing.verified >= 2
    assert status.model_digest == session.preparation.manifest.digest


def test_the_file_follows_the_session_and_ends_with_it(
    new_session: NewSession, executor: ScriptedProvider, helper: ScriptedProvider, tmp_path: Path
) -> None:
    session = new_session("pad", [executor], [helper], pool_memory=0)
    path = tmp_path / "status.json"
    publish(session, path, interval_s=0.01)
    assert {figures.state for figures in read_status(path).providers} == {"not heard yet"}
    session.product(0, FORWARD, rows())
    until(lambda: all(figures.verified for figures in read_status(path).providers))
    said = json.loads(path.read_bytes())
    assert said.keys() == {"pid", "written", "model_digest", "providers"}
    assert set().union(*said["providers"]) == set(ProviderFigures.__struct_fields__)
    seeds = {heard.request.seed.hex() for heard in helper.effects if isinstance(heard.request, wire.Effect)}
    assert seeds
    assert not any(seed in path.read_text() for seed in seeds)
    written = read_status(path).written
    session.close()
    until(lambda: all(thread.name != "status" for thread in threading.enumerate()))
    assert read_status(path).written >= written  # one more write, and then no more


def test_a_status_is_private_and_whole(tmp_path: Path) -> None:
    status = SessionStatus(pid=1, written=2.0, model_digest="sha256:0", providers=[])
    path = tmp_path / "status.json"
    for _ in range(2):
        write_status(path, status)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_status(path) == status
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is not the status of a session"):
        read_status(path)
    with pytest.raises(ConfigError, match=r"RemoteConfig\(status"):
        read_status(tmp_path / "none.json")


def test_a_status_file_that_cannot_be_written_is_an_immediate_error(
    new_session: NewSession, executor: ScriptedProvider, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"status\.json"):
        publish(new_session("local", [executor]), tmp_path / "file" / "status.json")


def test_schemes_without_verified_providers_have_none(tmp_path: Path) -> None:
    for masking in ("simulate", "paper-pool"):
        federation = None if masking == "simulate" else tmp_path / "federation.toml"
        with pytest.raises(ConfigError, match="status is for sessions with verified providers"):
            RemoteConfig(masking=masking, federation=federation, status=tmp_path / "status.json")
