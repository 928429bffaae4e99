"""Executors from registries: for any listings, in any order, a registry can only deny service."""

import itertools
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.certificates import issuing
from symbiosis_priv.certificates.reading import Kind
from symbiosis_priv.errors import CertificateError
from symbiosis_priv.federation import Company, Federation, Peer, Registries
from symbiosis_priv.registry.descriptor import CLOCK_TOLERANCE_S, MAX_LIFETIME_S, MS, verify
from tenant.routing.discovery import MAX_FOUND, Discovery, admitted
from tests.registries import LyingRegistry, registry_config
from tests.vouching import DIGEST, Vouching, newest
from tests.waiting import until

NAMES = ("gamma", "delta", "epsilon")
PORTS = {"gamma": 7001, "delta": 7002, "epsilon": 7003}


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Vouching:
    """Another federation's authority, with executors of the same names."""
    return Vouching.in_folder(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def federation(vouching: Vouching) -> Federation:
    """A tenant's file: an executor, a helper of beta AG, and a registry that does not run."""
    folder = vouching.folder / "pinned"

    def pinned(name: str, role: str, port: int) -> Peer:
        own = issuing.issue(folder, authority=None, kind=Kind.PROVIDER, name=name)
        assert role in ("executor", "helper")
        return Peer(name, f"{name} AG", role, "localhost", port, own.certificate)  # type: ignore[arg-type]

    return Federation(
        model_digest=DIGEST,
        weight_bits=10,
        tenant_certificate=folder / "alice.pem",
        tenant_key=folder / "alice.key",
        peers=(pinned("alpha", "executor", 6001), pinned("beta", "helper", 6002)),
        companies=(Company("Holding SE", members=("beta",), operators=("zeta AG",)),),
        registries=Registries(("127.0.0.1:1",), vouching.authority.certificate),
    )


def says(vouching: Vouching, name: str, **changes: Any) -> bytes:
    return vouching.says(name, **{"address": ("localhost", PORTS[name]), **changes})


def discovery(federation: Federation, *, now: float) -> Discovery:
    return Discovery(federation, clock=lambda: now)


# Listings of a registry


def test_a_registry_can_deny_service_and_nothing_else(
    federation: Federation, vouching: Vouching, stranger: Vouching
) -> None:
    """Forged, stale, repeated, reordered and withheld descriptors, in any rounds. Each accepted executor has signed its
    current descriptor itself. The file's providers do not change, and no older descriptor replaces a newer one."""
    now = vouching.began / MS
    old, new = ({"after_ms": 0, "layers": "0-1"}, {"after_ms": 1000, "layers": "2-3"})
    genuine = [says(vouching, name, **change) for name in NAMES for change in (old, new)]
    leaving = [says(vouching, "gamma", after_ms=2000, draining=True)]
    useless = [
        says(vouching, "delta", after_ms=3000, model_digest="sha256:" + "8" * 64),
        says(vouching, "epsilon", after_ms=-3_600_000),
        *(says(stranger, name, after_ms=9000) for name in NAMES),
        genuine[0][:-1] + bytes([genuine[0][-1] ^ 1]),
        b"",
    ]
    before = (federation.peers, federation.helpers, federation.pad_helpers)

    @given(rounds=st.lists(st.lists(st.sampled_from(genuine + leaving + useless), max_size=8), max_size=5))
    def lie(rounds: list[list[bytes]]) -> None:
        found = discovery(federation, now=now)
        heard: list[bytes] = []
        last: dict[str, int] = {}
        for listed in rounds:
            found.add(listed)
            heard += [data for data in listed if data in genuine + leaving + useless[:1]]
            truth = newest(verify(data, vouching.trust, now=now) for data in heard)
            expected = {
                (one.name, one.descriptor.layers, one.operator, "executor")
                for one in truth.values()
                if not one.descriptor.draining and one.descriptor.model_digest == DIGEST
            }
            assert {(p.name, p.layers, p.operator, p.role) for p in found.update()} == expected
            for one in truth.values():
                assert last.get(one.key, 0) <= one.descriptor.issued
                last[one.key] = one.descriptor.issued
        assert (federation.peers, federation.helpers, federation.pad_helpers) == before

    lie()


@given(order=st.permutations(range(6)), repeats=st.lists(st.integers(0, 5), max_size=4))
def test_order_and_repetition_make_no_difference(
    federation: Federation, vouching: Vouching, order: list[int], repeats: list[int]
) -> None:
    """Two executors may claim one address: the later descriptor counts."""
    ports = (7001, 7001, 7002, 7002, 7003, 7001)
    everybody = [
        vouching.said(f"x{number}", after_ms=number, address=("localhost", port)) for number, port in enumerate(ports)
    ]
    shown = newest(everybody[number] for number in [*order, *repeats])
    found = admitted(federation, shown.values(), now=vouching.began / MS)
    assert [peer.name for peer in found.executors] == ["x3", "x4", "x5"]
    assert set(found.refused) == {"x0", "x1", "x2"}


def test_an_older_descriptor_is_refused_after_the_newest_has_expired(
    federation: Federation, vouching: Vouching
) -> None:
    """A long lifetime is announced and then a short one; the registry waits until the short one is over."""
    clock = [vouching.began / MS]
    found = Discovery(federation, clock=lambda: clock[0])
    long = says(vouching, "gamma", lifetime_s=float(MAX_LIFETIME_S))
    assert not found.add([long])
    assert not found.add([says(vouching, "gamma", after_ms=1, lifetime_s=1.0, draining=True)])
    for hours in (0, 1, 12, 23):
        clock[0] = vouching.began / MS + 3600 * hours
        assert found.update() == ()
        assert found.add([long]).total() == 1
    clock[0] += 3 * 3600
    assert found.update() == ()
    assert not found._newest  # forgotten, because no older descriptor can be valid now
    assert found.add([long]).total() == 1


def test_an_executor_stays_until_its_last_descriptor_expires(federation: Federation, vouching: Vouching) -> None:
    clock = [vouching.began / MS]
    changes: list[tuple[Peer, ...]] = []
    found = Discovery(federation, clock=lambda: clock[0], changed=changes.append)
    found.add([says(vouching, "gamma", lifetime_s=600.0)])
    assert [peer.name for peer in found.update()] == ["gamma"]
    clock[0] += 600 + CLOCK_TOLERANCE_S - 1
    assert len(found.update()) == 1
    clock[0] += 2
    assert found.update() == ()
    assert [len(peers) for peers in changes] == [1, 0]  # called when the list changes, and only then


# Rules 8 and 11


def test_no_executor_replaces_a_provider_of_the_file(federation: Federation, vouching: Vouching) -> None:
    claims = {
        "Alpha": {"address": ("localhost", 7001)},
        "near": {"address": ("localhost", 6001)},
        "same machine": {"address": ("127.0.0.1", 6002)},
    }
    for name, change in claims.items():
        one = vouching.said(name.replace(" ", "-"), **change)
        found = admitted(federation, [one], now=vouching.began / MS)
        assert found.executors == ()
        assert "a provider of the federation file has the same" in found.refused[one.name]


@given(subset=st.sets(st.sampled_from(["q1", "q3", "gamma", "delta", "Alpha", "near"])))
def test_every_accepted_executor_is_admissible_with_every_helper(
    federation: Federation, vouching: Vouching, subset: set[str]
) -> None:
    for name, operator in (("q1", "beta AG"), ("q3", "Zeta AG")):
        vouching.identity(name, operator=operator)
    found = admitted(federation, [vouching.said(name) for name in subset], now=vouching.began / MS)
    everybody = (*federation.peers, *found.executors)
    for executor, helper in itertools.product(found.executors, federation.helpers):
        assert not federation.one_company(executor, helper)
    assert len({peer.name.casefold() for peer in everybody}) == len(everybody)
    assert len({peer.key_fingerprint for peer in everybody}) == len(everybody)


def test_operators_share_the_limit_of_executors(federation: Federation, vouching: Vouching) -> None:
    """One operator's executors, however many, leave room for others."""
    names = [f"m{number:03}" for number in range(MAX_FOUND + 3)]
    for name in names:
        vouching.identity(name, operator="Mass AG")
    said = [vouching.said(name, address=("localhost", 8000 + number)) for number, name in enumerate(names)]
    now = vouching.began / MS
    found = admitted(federation, said, now=now)
    assert len(found.executors) == MAX_FOUND
    assert len(found.refused) == 3
    honest = [vouching.said(f"z{number}", address=("localhost", 9000 + number)) for number in range(5)]
    shared = admitted(federation, [*said, *honest], now=now)
    assert {one.name for one in honest} < {peer.name for peer in shared.executors}
    assert len(shared.executors) == MAX_FOUND
    again = [vouching.said(name, address=("localhost", 8000 + n), after_ms=n % 7) for n, name in enumerate(names)]
    assert admitted(federation, [*again, *honest], now=now).executors == shared.executors  # the list does not change


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "169.254.169.254", "fe80::1", "224.0.0.1"]
)
def test_no_registry_leads_connections_to_this_machine(federation: Federation, vouching: Vouching, host: str) -> None:
    """Unless everything in the file is on this machine. The address of a name is checked when it is connected."""
    name = f"s{host.replace(':', '-')}"
    vouching.known[name] = issuing.issue(
        vouching.folder,
        authority=vouching.authority,
        kind=Kind.PROVIDER,
        name=name,
        operator="S",
        hosts=[host, "s.example"],
    )
    steering, named = (vouching.said(name, address=(there, 7001)) for there in (host, "s.example"))
    now = vouching.began / MS
    (found,) = admitted(federation, [steering], now=now).executors
    assert not found.remote_only
    assert federation.registries is not None
    elsewhere = msgspec.structs.replace(federation.registries, addresses=("localhost:1", "registry.example:7500"))
    for file in (
        replace(federation, registries=elsewhere),
        replace(federation, peers=(replace(federation.peers[0], host="alpha.example"), *federation.peers[1:])),
    ):
        refused = admitted(file, [steering], now=now)
        assert refused.executors == ()
        assert "not an address" in refused.refused[name]
        (found,) = admitted(file, [named], now=now).executors
        assert found.remote_only


# Over the network


@pytest.fixture
def liars(vouching: Vouching) -> Iterator[list[LyingRegistry]]:
    with (
        LyingRegistry(registry_config(vouching)) as one,
        LyingRegistry(registry_config(vouching, name="second")) as other,
    ):
        yield [one, other]


def asking(federation: Federation, vouching: Vouching, *addresses: str) -> Federation:
    return replace(federation, registries=Registries(addresses, vouching.authority.certificate))


def now_says(vouching: Vouching, name: str) -> bytes:
    return says(vouching, name, issued=round(MS * time.time()))


def test_another_registry_shows_what_one_registry_withholds(
    federation: Federation, vouching: Vouching, liars: list[LyingRegistry], caplog: pytest.LogCaptureFixture
) -> None:
    gone = "127.0.0.1:1"
    found = Discovery(asking(federation, vouching, liars[0].address, gone, liars[1].address))
    liars[1].show(gamma := now_says(vouching, "gamma"))
    with caplog.at_level(logging.INFO, "tenant.routing.discovery"):
        assert [peer.name for peer in found.refresh()] == ["gamma"]
        found.refresh()
        liars[0].show(now_says(vouching, "delta"), gamma, b"rubbish")
        liars[1].show()
        assert [peer.name for peer in found.refresh()] == ["delta", "gamma"]
    assert caplog.text.count(f"registry {gone} cannot be used now") == 1
    assert caplog.text.count("lists 1 invalid descriptors of 3: it is malformed") == 1
    assert found.found.executors == found.refresh()


def test_registries_are_asked_periodically_until_closing(
    federation: Federation, vouching: Vouching, liars: list[LyingRegistry]
) -> None:
    """A round that fails, for instance because no thread can be started, is followed by the next one."""
    changes: list[tuple[Peer, ...]] = []

    def changed(peers: tuple[Peer, ...]) -> None:
        changes.append(peers)
        if len(changes) == 1:
            raise RuntimeError("can't start new thread")

    found = Discovery(asking(federation, vouching, liars[0].address), changed=changed, interval_s=0.02)
    found.start()
    liars[0].show(now_says(vouching, "gamma"))
    until(lambda: len(changes) == 1)
    liars[0].show(now_says(vouching, "delta"))
    until(lambda: len(changes) == 2)
    assert found.close(timeout=20)
    liars[0].show()
    assert [len(peers) for peers in changes] == [1, 2]


def test_closing_does_not_wait_for_a_silent_registry(federation: Federation, vouching: Vouching) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        found = Discovery(asking(federation, vouching, address), interval_s=0.01, deadline_s=60.0)
        found.start()
        connection, _ = silent.accept()  # the registry is being asked
        began = time.monotonic()
        assert found.close(timeout=30)
        assert time.monotonic() - began < 20
        connection.close()


def test_discovery_needs_an_authority(federation: Federation, vouching: Vouching) -> None:
    for path in (vouching.identity("gamma").certificate, vouching.folder / "missing.pem"):
        with pytest.raises(CertificateError):
            Discovery(replace(federation, registries=Registries(("r.example:1",), path)))
