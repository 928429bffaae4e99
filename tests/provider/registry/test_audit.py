"""Replicas and audits: what a registry cannot take back, and that a contradiction is found and named."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from typer.testing import CliRunner

from provider.registry.audit import View, contradictions, differences, view
from provider.registry.cli import app
from provider.registry.replica import Follower
from provider.registry.server import RegistryServer
from provider.registry.storage import Log
from symbiosis_priv.errors import DescriptorError, ProviderError, StorageError, TransportError
from symbiosis_priv.registry.descriptor import MAX_LIFETIME_S
from symbiosis_priv.registry.statements import MS
from tests.vouching import DIGEST, Vouching

if TYPE_CHECKING:
    from tests.provider.registry.conftest import Serve


def announce(vouching: Vouching, server: RegistryServer, *descriptors: bytes) -> None:
    with vouching.client(server.address) as registry:
        for data in descriptors:
            registry.announce(data)


def follow(vouching: Vouching, replica: RegistryServer, source: RegistryServer, *, later_s: float = 0.0) -> int:
    return Follower(
        replica.log,
        source=source.address,
        trust=lambda: vouching.trust,
        clock=lambda: time.time() + later_s,
    ).look()


def run(vouching: Vouching, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*words, "--authority", str(vouching.authority.certificate)])
    return result.exit_code, result.output


def test_a_replica_has_the_same_log_and_passes_it_on(serve: Serve, vouching: Vouching) -> None:
    server = serve()
    replica = serve(name="replica", replica_of="registry")
    with vouching.client(replica.address) as client, pytest.raises(ProviderError, match="not reached its registry"):
        client.history(after=0, trust=vouching.trust)
    announce(vouching, server, vouching.says("gamma"), vouching.says("delta"))
    assert follow(vouching, replica, server) == 2
    assert replica.log.position == server.log.position
    announce(vouching, server, leaving := vouching.says("gamma", after_ms=1, draining=True))
    assert follow(vouching, replica, server) == 1
    assert follow(vouching, replica, server) == 0
    second = serve(name="second", replica_of="registry")
    assert follow(vouching, second, replica) == 3  # a replica of a replica
    server.stop()
    with vouching.client(second.address) as client:
        assert leaving in client.list(DIGEST)
        with pytest.raises(ProviderError, match="announce it there"):
            client.announce(vouching.says("gamma", after_ms=2))
    status, output = run(vouching, "audit", replica.address, second.address)
    assert status == 0, output
    assert output.count("log of registry, entries 1 to 3") == 2


def test_a_replica_that_catches_up_shows_what_its_head_counts(serve: Serve, vouching: Vouching) -> None:
    """Or whoever reads it meanwhile takes it for a liar, and a registry that shows no end of its log mutes it."""
    server, replica = serve(), serve(name="replica", replica_of="registry")
    announce(vouching, server, vouching.says("gamma"))
    follow(vouching, replica, server)
    replica.log.extend([vouching.said("delta"), vouching.said("gamma", after_ms=1)], head=replica.log.head)
    found = view(replica.address, vouching.trust)
    assert (max(found.hashes), found.head.said.entries) == (1, 1)
    with vouching.client(replica.address) as client, pytest.raises(ProviderError, match="not reached its registry"):
        client.history(after=2, trust=vouching.trust)


def test_a_replica_that_was_away_for_too_long_begins_later(serve: Serve, vouching: Vouching) -> None:
    server, replica = serve(), serve(name="replica", replica_of="registry")
    now = vouching.began / MS
    announce(vouching, server, vouching.says("gamma", lifetime_s=1.0))
    follow(vouching, replica, server)
    announce(vouching, server, vouching.says("gamma", after_ms=1, lifetime_s=1.0), vouching.says("delta"))
    server.log.forget(expired_before=now + 100)
    assert follow(vouching, replica, server, later_s=MAX_LIFETIME_S) == 1
    assert replica.log.position == server.log.position
    assert contradictions([view(one.address, vouching.trust) for one in (server, replica)]) == []


def two_faced(serve: Serve, vouching: Vouching, tmp_path: Path) -> tuple[RegistryServer, RegistryServer]:
    """One registry by its key and name, with two logs: the second knows nothing of delta."""
    one, other = serve(), serve(database=tmp_path / "other face.sqlite")
    announce(vouching, one, gamma := vouching.says("gamma"), vouching.says("delta"))
    announce(vouching, other, gamma, vouching.says("epsilon"))
    return one, other


def test_a_registry_with_two_faces_is_found_out(serve: Serve, vouching: Vouching, tmp_path: Path) -> None:
    one, other = two_faced(serve, vouching, tmp_path)
    (found,) = contradictions([view(face.address, vouching.trust) for face in (one, other)])
    assert "EQUIVOCATION: registry 'registry'" in found
    assert "from entry 2 on" in found
    status, output = run(vouching, "audit", one.address, other.address)
    assert status == 1
    assert "EQUIVOCATION" in output


def test_a_replica_does_not_follow_a_registry_that_contradicts_itself(
    serve: Serve, vouching: Vouching, tmp_path: Path
) -> None:
    one, other = two_faced(serve, vouching, tmp_path)
    replica = serve(name="replica", replica_of="registry")
    follow(vouching, replica, one)
    position = replica.log.position
    with pytest.raises(DescriptorError, match=r"EQUIVOCATION: .* keep this database"):
        follow(vouching, replica, other)
    rewound = serve(database=tmp_path / "rewound.sqlite")
    with pytest.raises(DescriptorError, match="EQUIVOCATION"):
        follow(vouching, replica, rewound)  # it has lost what it has signed
    assert replica.log.position == position
    stranger = serve(name="stranger")
    with pytest.raises(DescriptorError, match="the log of 'stranger'"):
        follow(vouching, replica, stranger)


def test_a_registry_cannot_have_a_replica_forget_what_it_has_shown(
    serve: Serve, vouching: Vouching, tmp_path: Path
) -> None:
    one, other = serve(), serve(database=tmp_path / "other face.sqlite")
    replica = serve(name="replica", replica_of="registry")
    announce(vouching, one, vouching.says("gamma"))
    follow(vouching, replica, one)
    position = replica.log.position
    forgotten = [vouching.says("delta", after_ms=step, lifetime_s=1.0) for step in range(2)]
    announce(vouching, other, *forgotten, vouching.says("epsilon"))
    other.log.forget(expired_before=vouching.began / MS + 100)
    with pytest.raises(DescriptorError, match=r"EQUIVOCATION: .* none may be forgotten yet"):
        follow(vouching, replica, other)
    assert replica.log.position == position


def test_what_is_dated_ahead_is_not_followed_and_fails_the_audit(
    serve: Serve, vouching: Vouching, tmp_path: Path
) -> None:
    """A registry and an executor of one mind: a replica would have to keep it, and all that follows, until then."""
    registry, replica = serve(), serve(name="replica", replica_of="registry")
    announce(vouching, registry, vouching.says("gamma"))
    follow(vouching, replica, registry)
    registry.log.append(vouching.said("delta", after_ms=3_600_000))
    with pytest.raises(DescriptorError, match="future"):
        follow(vouching, replica, registry)
    assert replica.log.position[0] == 1
    with pytest.raises(DescriptorError, match="entry 2: it comes from the future"):
        view(registry.address, vouching.trust)
    assert follow(vouching, replica, registry, later_s=3600) == 1


def test_a_replica_gives_a_registry_no_more_room_than_it_has_said(
    serve: Serve, vouching: Vouching, tmp_path: Path
) -> None:
    """An executor's key signs as much as it likes, and a registry of one mind with it shows all of that."""
    registry, database = serve(), tmp_path / "replica.sqlite"
    for number in range(150):
        registry.log.append(vouching.said("gamma", after_ms=number - 1000))
    own = Log(database, name="registry", max_bytes=1 << 17)
    follower = Follower(own, source=registry.address, trust=lambda: vouching.trust)
    with pytest.raises(StorageError, match="--max-log-mib"):
        follower.look()
    assert database.stat().st_size <= 1 << 17
    own.close()
    own = Log(database, name="registry")
    assert Follower(own, source=registry.address, trust=lambda: vouching.trust).look() == 150
    own.close()


def test_two_faces_without_a_common_entry_are_found_out(serve: Serve, vouching: Vouching, tmp_path: Path) -> None:
    """Entries are counted by the registry itself: whoever begins the other log later shows no number twice."""
    one, other = serve(), serve(database=tmp_path / "other face.sqlite")
    announce(vouching, one, vouching.says("gamma"))
    forgotten = [vouching.says("delta", after_ms=step, lifetime_s=1.0) for step in range(2)]
    announce(vouching, other, *forgotten, vouching.says("epsilon"))
    other.log.forget(expired_before=vouching.began / MS + 100)
    views = [view(face.address, vouching.trust) for face in (one, other)]
    for order in (views, views[::-1]):
        (found,) = contradictions(order)
        assert f"{other.address} begins after entry 2, and none may be forgotten yet" in found
    status, output = run(vouching, "audit", one.address, other.address)
    assert status == 1, output


def test_a_later_head_with_fewer_entries_is_found_out(serve: Serve, vouching: Vouching, tmp_path: Path) -> None:
    one, rewound = serve(), serve(database=tmp_path / "rewound.sqlite")
    announce(vouching, one, gamma := vouching.says("gamma"), vouching.says("delta"))
    announce(vouching, rewound, gamma)
    shown = view(one.address, vouching.trust)

    def rewound_after(seconds: float) -> View:
        found = view(rewound.address, vouching.trust)
        said = msgspec.structs.replace(found.head.said, issued=shown.head.said.issued + round(MS * seconds))
        return replace(found, head=replace(found.head, said=said))

    assert contradictions([shown, rewound_after(-600)]) == []  # a replica that has not heard of delta yet
    assert contradictions([shown, rewound_after(30)]) == []  # a clock that was set back
    for order in ([shown, rewound_after(600)], [rewound_after(600), shown]):
        (found,) = contradictions(order)
        assert f"{rewound.address} ends with entry 1, and {one.address} had 2 before" in found


def test_what_is_held_back_is_a_difference(serve: Serve, vouching: Vouching) -> None:
    one, other = serve(), serve(name="second")
    announce(vouching, one, gamma := vouching.says("gamma"), vouching.says("gamma", after_ms=9), vouching.says("delta"))
    announce(vouching, other, gamma)
    views = [view(server.address, vouching.trust) for server in (one, other)]
    found = differences(views, now=vouching.began / MS)
    assert contradictions(views) == []
    assert found == [
        f"{other.address} shows an older descriptor of executor 'gamma' of gamma AG",
        f"{other.address} does not show executor 'delta' of delta AG",
    ]
    assert differences(views, now=vouching.began / MS + 10_000) == []  # they have expired


def test_a_damaged_log_does_not_pass(serve: Serve, vouching: Vouching) -> None:
    server = serve()
    announce(vouching, server, vouching.says("gamma", after_ms=5))
    said = vouching.said("gamma")
    with server.log._transaction():  # a registry that goes back in time
        server.log._add(said)
    with pytest.raises(DescriptorError, match=r"entry 2: an earlier entry of the same key is as new"):
        view(server.address, vouching.trust)
    status, output = run(vouching, "audit", server.address, "127.0.0.1:1")
    assert status == 1
    assert "entry 2" in output


def test_a_revoked_executor_stays_in_the_log_that_is_audited(serve: Serve, vouching: Vouching, tmp_path: Path) -> None:
    from symbiosis_priv.certificates.revocation import revoke

    server = serve()
    announce(vouching, server, vouching.says("gamma"))
    revoked = tmp_path / "revoked.txt"
    revoke(revoked, [vouching.identity("gamma").certificate])
    status, output = run(vouching, "audit", server.address, "--revoked", str(revoked))
    assert status == 0, output
    strict = serve(name="strict", revoked=revoked)
    with vouching.client(strict.address) as registry, pytest.raises(ProviderError, match="revoked"):
        registry.announce(vouching.says("gamma"))


def test_show_prints_who_is_listed(serve: Serve, vouching: Vouching) -> None:
    server = serve()
    announce(vouching, server, vouching.says("gamma", issued=round(MS * time.time())))
    result = CliRunner().invoke(
        app, ["show", server.address, "--authority", str(vouching.authority.certificate)], env={"COLUMNS": "200"}
    )
    assert "gamma AG" in result.output
    assert "localhost:7401" in result.output


def test_a_follower_in_the_background_catches_up(serve: Serve, vouching: Vouching) -> None:
    server, replica = serve(), serve(name="replica", replica_of="registry")
    announce(vouching, server, vouching.says("gamma"))
    follower = Follower(replica.log, source=server.address, trust=lambda: vouching.trust, interval_s=0.02)
    follower.start()
    deadline = time.monotonic() + 20
    while replica.log.position != server.log.position:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    follower.stop()
    with pytest.raises(TransportError):
        Follower(replica.log, source="127.0.0.1:1", trust=lambda: vouching.trust).look()


def test_a_long_log_takes_more_requests_and_connections_than_one_may_last(
    serve: Serve, vouching: Vouching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provider.registry.storage.PAGE", 1)
    server = serve(requests_per_s=20.0, connection_s=0.3)  # 200 at once
    entries = [vouching.said("gamma", after_ms=step) for step in range(210)]
    server.log.extend(entries, head=b"")
    found = view(server.address, vouching.trust)
    assert len(found.hashes) == 211
    assert [one.data for one in found.executors.values()] == [entries[-1].data]
