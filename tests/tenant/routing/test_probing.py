"""Probes, and the data that is kept about executors that come and go."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from symbiosis_priv.certificates.reading import load_certificates
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.errors import ConnectionLostError
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.network import wire
from tenant.routing.known_provider import KnownProvider, State, Tolerance
from tenant.routing.probing import Prober
from tenant.routing.routes import Routes
from tests.vouching import Vouching


def test_nothing_is_kept_of_executors_that_have_left(
    new_federation: Callable[..., Federation], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An executor from a registry is another peer whenever it announces other layers, which its operator decides."""
    vouching = Vouching.in_folder(tmp_path_factory.mktemp("vouching"))
    certificate = load_certificates(vouching.identity("gamma").certificate)[0]
    peer = Peer("gamma", "gamma AG", "executor", "127.0.0.1", 7001, certificate)
    routes = Routes(new_federation([]), with_helpers=False, tolerance=Tolerance(first_pause_s=0.0, last_pause_s=0.0))
    heard = threading.Semaphore(0)

    def away(provider: KnownProvider) -> wire.Welcome:
        heard.release()
        raise ConnectionLostError("nobody there")

    prober = Prober(
        routes,
        Manifest(version=1, weight_bits=10, groups=()),
        retry=lambda provider, wanted: away(provider),
        try_once=away,
        closing=threading.Event(),
    )
    for last in range(20):
        routes.update([replace(peer, layers=LayerRange(0, last))])
        prober.reconnect()
        assert heard.acquire(timeout=20)
        for worker in prober.workers:
            assert worker.join(20)
    assert len(prober.workers) <= 1
    assert len(prober._errors) <= 1
    assert not [thread for thread in threading.enumerate() if thread.name == "probe-gamma"]


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
