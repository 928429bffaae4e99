"""Circuit breakers and costs, decision by decision: no sockets, and a clock that the test sets."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.certificates.reading import load_certificates
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.federation import Federation, Peer
from tenant.core.masked import Quarantine
from tenant.routing.known_provider import ProviderHealth, State
from tenant.routing.routes import Routes
from tests.vouching import Vouching


def steady(jitter: float = 0.5) -> ProviderHealth:
    return ProviderHealth(jitter=lambda: jitter)


def test_every_failure_in_a_row_is_followed_by_a_longer_pause() -> None:
    health, now, pauses = steady(), 0.0, []
    for _ in range(12):
        health.failed(now)
        pauses.append(health.retry_at - now)
        now = health.retry_at
    assert pauses[:4] == pytest.approx([0.25, 0.5, 1.0, 2.0])
    assert pauses == sorted(pauses)
    assert pauses[-1] == 30.0


def test_a_breaker_closes_with_the_answer_to_its_trial() -> None:
    health = steady()
    health.failed(0.0)
    assert health.state is State.DOWN
    health.connected()
    assert str(health.state) == "trial"
    assert not health.failed(5.0)  # it was never up
    assert health.retry_at == 5.5
    health.connected()
    assert health.answered(6.0, seconds=0.1, size=10)
    assert str(health.state) == "up"
    assert health.failed(7.0)
    assert health.retry_at == 7.25  # as at the start


@given(latency=st.floats(1e-4, 1.0), rate=st.floats(1e-9, 1e-6))
def test_cost_is_latency_and_bytes(latency: float, rate: float) -> None:
    health, large = steady(), 1 << 24
    for now in range(8):
        health.answered(float(now), seconds=latency, size=1000)
        health.answered(float(now), seconds=latency + large * rate, size=large)
    assert health.seconds_for(100) == pytest.approx(latency + 100 * rate, rel=1e-2)
    assert health.seconds_for(large // 2) == pytest.approx(latency + large // 2 * rate, rel=1e-2)


@given(sizes=st.lists(st.integers(0, 1 << 24), min_size=1, max_size=30))
def test_a_provider_that_becomes_slower_does_not_increase_its_own_patience(sizes: list[int]) -> None:
    """A provider chooses its own cost, so the cost of other providers is the measure."""
    health = steady()
    for now, size in enumerate(sizes):
        patience = health.patience_s(size, others_s=0.3)
        assert patience <= max(2.0, 8 * 0.3)
        health.answered(float(now), seconds=0.99 * patience, size=size)


def test_a_wait_without_an_answer_brings_a_penalty_of_many_times_its_length() -> None:
    health = steady()
    for now in (0.0, 1000.0):
        health.failed(now, wasted_s=2.0)
        assert health.retry_at == now + 40.0
        health.connected()
        health.answered(now + 50.0, seconds=0.001, size=10)  # it makes no difference to the next pause
    health.failed(2000.0)
    assert health.retry_at == 2000.25
    health.failed(2000.1, wasted_s=2.0)  # another request that was lost at the same time
    assert health.retry_at == pytest.approx(2040.1)
    health.failed(3000.0, wasted_s=100.0)
    assert health.retry_at == 3600.0


# Probes, and the data that is kept about executors that come and go


def test_announcing_other_layers_does_not_reset_an_executors_health(
    new_federation: Callable[..., Federation], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Otherwise it would get a trial, and cause a wait, after each new announcement."""
    vouching = Vouching.in_folder(tmp_path_factory.mktemp("vouching"))

    def peer(name: str, port: int) -> Peer:
        certificate = load_certificates(vouching.identity(name).certificate)[0]
        return Peer(name, f"{name} AG", "executor", "127.0.0.1", port, certificate)

    gamma, delta = peer("gamma", 7001), peer("delta", 7002)
    routes = Routes(new_federation([]), with_helpers=False)
    routes.update([gamma])
    [first] = routes.executors
    routes.failed(first, "late")
    routes.update([replace(gamma, layers=LayerRange(0, 3))])
    [second] = routes.executors
    assert second is not first
    assert second.health.state is State.DOWN
    routes.update([])
    routes.update([delta, replace(gamma, layers=LayerRange(1, 3))])
    assert [str(provider.health.state) for provider in routes.executors] == ["up", "down"]


# A quarantined provider stays quarantined after changes of its name, key, address or layers


def found(vouching: Vouching, who: str, **changes: object) -> Peer:
    """An executor as a registry lists it."""
    certificate = load_certificates(vouching.identity(who, operator="Liar AG").certificate)[0]
    peer = Peer(who, "Liar AG", "executor", "liar.example", 7401, certificate, layers=LayerRange(0, 3))
    return replace(peer, **changes)  # type: ignore[arg-type]


@given(name=st.booleans(), key=st.booleans(), address=st.booleans(), layers=st.integers(3, 5))
def test_one_unchanged_trait_identifies_a_quarantined_provider(
    vouching: Vouching, name: bool, key: bool, address: bool, layers: int
) -> None:
    """A provider can change each trait with the help of its authority; one unchanged trait is enough. Another executor
    of its operator has none of them."""
    quarantine = Quarantine()
    quarantine.add(found(vouching, "liar"))
    again = found(
        vouching,
        "liar" if key else "fresh",
        name="LIAR" if name else "somebody",
        port=7401 if address else 7402,
        layers=LayerRange(0, layers),
    )
    assert (again in quarantine) == (name or key or address)


def test_changes_of_a_pinned_file_make_no_difference(vouching: Vouching, tmp_path: Path) -> None:
    pinned = tmp_path / "liar.pem"
    pinned.write_bytes(vouching.identity("liar").certificate.read_bytes())
    peer = found(vouching, "liar", certificate=pinned)
    quarantine = Quarantine()
    quarantine.add(peer)
    pinned.unlink()
    assert peer in quarantine
