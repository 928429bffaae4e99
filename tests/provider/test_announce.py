"""A provider announces itself: contents and times of announcements; registries cannot harm its tenants. The choice of
layers for a new provider is compared with an exhaustive search.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st

from provider.announce.placement import coverage, most_needed, placed
from provider.config.provider_toml import template
from provider.config.schema import AnnounceConfig, ProviderConfig, TlsConfig
from provider.logs import JsonLines
from provider.products.model import open_store
from provider.registry.server import RegistryServer
from provider.serve import Provider
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.errors import CertificateError, ConfigError
from symbiosis_priv.network.addresses import bound_address
from symbiosis_priv.network.tls import client_context
from symbiosis_priv.registry.descriptor import VerifiedDescriptor, verify
from tests.provider.clients import execute
from tests.provider.conftest import Configure, Connect, Keys
from tests.registries import LyingRegistry, registry_config
from tests.vouching import Vouching
from tests.waiting import until

WIDTH = 64  # layers of the tiny Llama


@pytest.fixture(scope="module")
def registry(vouching: Vouching) -> Iterator[RegistryServer]:
    with RegistryServer(registry_config(vouching)) as server:
        yield server


Announcing = Callable[..., ProviderConfig]


@pytest.fixture
def announcing(configure: Configure, vouching: Vouching, registry: RegistryServer) -> Announcing:
    """`announcing("gamma", layers=..., announce=..., <fields of [registry]>)`: a provider's configuration."""

    def announcing(name: str, *, layers: str | None = None, **changes: Any) -> ProviderConfig:
        own = vouching.identity(name)
        values: dict[str, Any] = {"announce": (registry.address,), "authority": vouching.authority.certificate}
        names: dict[str, Any] = {"name": name, "roles": ("executor",), "certificate": own.certificate, "key": own.key}
        return configure(**names, layers=layers, registry=AnnounceConfig(**(values | changes)))

    return announcing


def listed(vouching: Vouching, registry: RegistryServer, digest: str) -> dict[str, VerifiedDescriptor]:
    """The executors that the registry lists, by name."""
    with vouching.client(registry.address) as client:
        found = [verify(data, vouching.trust, now=time.time()) for data in client.list(digest)]
    return {announced.name: announced for announced in found}


def test_a_provider_is_listed_with_its_layers_and_announces_its_end(
    announcing: Announcing, vouching: Vouching, registry: RegistryServer
) -> None:
    with Provider(announcing("gamma", layers="1")) as provider:
        until(lambda: provider.status().registries == {registry.address: True})
        digest = provider.model_digest
        said = listed(vouching, registry, digest)["gamma"].descriptor
        assert (said.address, said.layers) == (provider.address, LayerRange(1, 1))
        assert not said.draining
    left = listed(vouching, registry, digest)["gamma"].descriptor
    assert left.draining
    assert left.issued > said.issued


def test_announcements_are_repeated_periodically_and_after_a_reload(
    announcing: Announcing,
    vouching: Vouching,
    registry: RegistryServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("provider.announce.announcer.LIFETIME_S", 3.0)
    with Provider(announcing("delta")) as provider:
        until(lambda: "delta" in listed(vouching, registry, provider.model_digest))
        first = listed(vouching, registry, provider.model_digest)["delta"]
        until(lambda: listed(vouching, registry, provider.model_digest)["delta"].age > first.age)  # once a second
        own = vouching.identity("delta")
        renewed = Vouching(tmp_path, vouching.authority).identity("delta")
        for path, other in ((own.key, renewed.key), (own.certificate, renewed.certificate)):
            path.write_bytes(other.read_bytes())
        until(lambda: listed(vouching, registry, provider.model_digest)["delta"].key != first.key)


def test_registries_that_are_away_or_refuse_do_not_disturb_the_provider(
    announcing: Announcing, vouching: Vouching, keys: Keys, connect: Connect, tmp_path: Path
) -> None:
    stranger = Vouching.in_folder(tmp_path)
    alice = keys.tenants["alice"]
    with RegistryServer(registry_config(stranger)) as foreign:
        gone = ("127.0.0.1:1", foreign.address)
        with Provider(announcing("epsilon", announce=gone)) as provider:
            assert provider.status().registries == dict.fromkeys(gone, False)
            pins = [vouching.identity("epsilon").certificate]
            context = client_context(certificate=alice.certificate, key=alice.key, pins=pins)
            client = connect(to=provider, context=context)
            assert client.product(execute(0, 1), torch.ones(1, WIDTH, dtype=torch.int32)).shape[0] == 1
            began = time.monotonic()
        assert time.monotonic() - began < 10  # it stops without them


def test_silent_registries_are_told_of_the_end_at_the_same_time(
    announcing: Announcing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provider.announce.announcer._LEAVE_S", 1.0)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(20)]
        addresses = tuple(map(bound_address, silent))
        with Provider(announcing("theta", announce=addresses)) as provider:
            assert provider._announcer is not None
            provider._announcer.accepted = dict.fromkeys(addresses, True)
            began = time.monotonic()
    assert time.monotonic() - began < 10


def test_an_executor_that_the_registry_cannot_reach_is_not_listed_and_logs_why(
    announcing: Announcing, vouching: Vouching, registry: RegistryServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with Provider(announcing("zeta", address="localhost:1")) as provider:
        until(lambda: "not_announced" in caplog.messages)
        assert "zeta" not in listed(vouching, registry, provider.model_digest)
    (reason,) = {JsonLines().format(record) for record in caplog.records if record.getMessage() == "not_announced"}
    assert "cannot connect to localhost:1" in reason


def test_a_descriptor_that_tenants_would_refuse_is_an_error_at_the_start(
    announcing: Announcing, keys: Keys, registry: RegistryServer
) -> None:
    with pytest.raises(ConfigError, match=r"claims a host .* set address to one of its hosts"):
        Provider(announcing("gamma", address="elsewhere.example:1")).start()
    config = announcing("gamma")
    own = TlsConfig(
        certificate=keys.provider.certificate, key=keys.provider.key, tenant_authority=keys.authority.certificate
    )
    with pytest.raises(ConfigError, match=r"authority has issued.* keys request --provider"):
        Provider(msgspec.structs.replace(config, tls=own)).start()
    with pytest.raises(CertificateError, match="holds no CA certificate"):
        Provider(announcing("gamma", authority=keys.provider.certificate)).start()


def test_a_provider_that_joins_takes_the_layers_that_are_lacking(
    announcing: Announcing, registry: RegistryServer
) -> None:
    """Providers join one after the other over two layers; each sees the announcements of those before it."""
    layers, providers = [], list[Provider]()
    try:
        for name in ("one", "two", "three", "four"):
            if name == "four":
                providers.pop(1).stop()  # it announces that it is leaving
            providers.append(Provider(announcing(name, layers="auto:1")).start())
            until(lambda: all(providers[-1].status().registries.values()))
            layers.append(providers[-1].config.model.layers)
        assert layers == ["0", "1", "0", "1"]
        assert placed(announcing("one", layers="auto:1")).model.layers == "0"  # its own announcement does not count
    finally:
        for provider in providers:
            provider.stop()


def test_another_number_of_chosen_layers_needs_a_restart(
    announcing: Announcing, registry: RegistryServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    source = tmp_path / "provider.toml"
    source.write_text(template())
    found = [announcing("one", layers="auto:1")]
    with Provider(found[0], source=source, adapt=lambda _: found[0]) as provider:
        for layers, logged in (("auto:1", False), ("auto:2", True)):
            found[0], before = announcing("one", layers=layers), len(caplog.records)
            provider._reload()
            [line] = [JsonLines().format(one) for one in caplog.records[before:] if one.getMessage() == "reloaded"]
            assert ('"needs_restart": "yes' in line) == logged


def test_a_lying_registry_can_only_cause_a_bad_choice_of_layers(
    announcing: Announcing, vouching: Vouching, tmp_path: Path
) -> None:
    """Descriptors that a registry invents are not valid, so they do not count as coverage."""
    stranger = Vouching.in_folder(tmp_path)
    with LyingRegistry(registry_config(vouching)) as liar:
        joining = announcing("six", layers="auto:1", announce=(liar.address, "localhost:9"))  # one is away
        digest = open_store(joining.before_layers_are_chosen()).manifest().digest
        for says, chosen in ((vouching.says, "1"), (stranger.says, "0")):
            liar.show(says("seven", layers="0", model_digest=digest), b"what?", vouching.says("seven", after_ms=-1))
            assert placed(joining).model.layers == chosen
    with pytest.raises(ConfigError, match="needs a registry, and none can be reached"):
        placed(joining)


SERVED = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=12)


@given(layers=SERVED, length=st.integers(1, 15))
def test_no_other_range_is_served_less(layers: list[tuple[int, int]], length: int) -> None:
    chosen = most_needed(layers, length)
    wanted = min(length, len(layers))
    ranges = [range(first, first + wanted) for first in range(len(layers) - wanted + 1)]
    least = min(sorted(layers[layer] for layer in one) for one in ranges)
    found = [one for one in ranges if sorted(layers[layer] for layer in one) == least]
    assert range(chosen.first, chosen.last + 1) == found[0]  # of equal ranges the first: all providers decide alike


def test_layers_of_one_operator_come_before_layers_of_two() -> None:
    there = [("one", LayerRange(0, 0)), ("two", LayerRange(0, 9)), *[("two", LayerRange(1, 1))] * 3]
    assert most_needed(coverage(2, there), 1) == LayerRange(1, 1)
