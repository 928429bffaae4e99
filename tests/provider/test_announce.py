"""A provider announces itself: contents and times of announcements; registries cannot harm its tenants. The choice of
layers for a new provider is compared with an exhaustive search.
"""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st

from provider.announce import Served, coverage, most_needed, placed, unplaced
from provider.config.provider_toml import load, template
from provider.config.schema import AnnounceConfig, ModelConfig, ProviderConfig, TlsConfig
from provider.products.model import open_store
from provider.registry.server import RegistryServer
from provider.serve import Provider
from symbiosis_priv.certificates import issuing
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.errors import CertificateError, ConfigError
from symbiosis_priv.network.tls import client_context
from symbiosis_priv.registry.descriptor import VerifiedDescriptor, newest, verify
from tests.provider.clients import execute
from tests.provider.conftest import Configure, Connect, Keys, Launch
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
        identity = vouching.identity(name)
        config = configure(roles=("executor",))
        values: dict[str, Any] = {"announce": (registry.address,), "authority": vouching.authority.certificate}
        return msgspec.structs.replace(
            config,
            name=name,
            tls=msgspec.structs.replace(config.tls, certificate=identity.certificate, key=identity.key),
            model=msgspec.structs.replace(config.model, layers=layers),
            registry=AnnounceConfig(**(values | changes)),
        )

    return announcing


def listed(vouching: Vouching, registry: RegistryServer, digest: str) -> dict[str, VerifiedDescriptor]:
    """The executors that the registry lists, by name."""
    with vouching.client(registry.address) as client:
        found = [verify(data, vouching.trust, now=time.time()) for data in client.list(digest)]
    return {announced.name: announced for announced in newest(found).values()}


def test_a_provider_is_listed_with_its_layers_and_announces_its_end(
    announcing: Announcing, vouching: Vouching, registry: RegistryServer
) -> None:
    with Provider(announcing("gamma", layers="1", capacity=2.5)) as provider:
        until(lambda: provider.status().registries == {registry.address: True})
        digest = provider.model_digest
        said = listed(vouching, registry, digest)["gamma"].descriptor
        assert (said.address, said.layers, said.capacity) == (provider.address, LayerRange(1, 1), 2.5)
        assert not said.draining
    left = listed(vouching, registry, digest)["gamma"].descriptor
    assert left.draining
    assert left.issued > said.issued


def test_announcements_are_repeated_periodically_and_after_a_reload(
    announcing: Announcing, vouching: Vouching, registry: RegistryServer
) -> None:
    with Provider(announcing("delta", lifetime_s=3.0)) as provider:
        until(lambda: "delta" in listed(vouching, registry, provider.model_digest))
        first = listed(vouching, registry, provider.model_digest)["delta"]
        until(lambda: listed(vouching, registry, provider.model_digest)["delta"].age > first.age)  # once a second
        issuing.rotate(vouching.identity("delta").certificate, authority=vouching.authority)
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

    def joining(name: str) -> Provider:
        return Provider(announcing(name, layers="auto", capacity_layers=1))

    layers = []
    providers: list[Provider] = []
    try:
        for name in ("one", "two", "three", "four"):
            provider = joining(name).start()
            providers.append(provider)
            until(lambda: all(providers[-1].status().registries.values()))
            layers.append(str(provider.config.model.layers))
        assert layers == ["0", "1", "0", "1"]
        providers.pop(1).stop()  # it announces that it is leaving
        again = joining("five").start()
        providers.append(again)
        assert again.config.model.layers == "1"
        own = placed(announcing("one", layers="auto", capacity_layers=1))
        assert own.model.layers == "0"  # a restart: its own announcement does not count
    finally:
        for provider in providers:
            provider.stop()


def test_a_lying_registry_can_only_cause_a_bad_choice_of_layers(
    announcing: Announcing, vouching: Vouching, tmp_path: Path
) -> None:
    """Descriptors that a registry invents are not valid, so they do not count as coverage."""
    stranger = Vouching.in_folder(tmp_path)
    with LyingRegistry(registry_config(vouching)) as liar:
        joining = announcing("six", layers="auto", capacity_layers=1, announce=(liar.address,))
        digest = open_store(unplaced(joining)).manifest().digest
        for says, chosen in ((vouching.says, "1"), (stranger.says, "0")):
            liar.show(says("seven", layers="0", model_digest=digest), b"what?", vouching.says("seven", after_ms=-1))
            assert placed(joining).model.layers == chosen


def test_choosing_layers_needs_a_registry(announcing: Announcing) -> None:
    with pytest.raises(ConfigError, match="none can be reached"):
        placed(announcing("gamma", layers="auto", capacity_layers=1, announce=("127.0.0.1:1",)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[registry]\nannounce = ["r.example:1"]', "announce needs authority"),
        ('[registry]\nannounce = ["r.example"]\nauthority = "a.pem"', "not host:port"),
        ('[registry]\nannounce = ["r.example:1"]\nauthority = "a.pem"\naddress = "here"', "not host:port"),
        ("[registry]\ncapacity = 0.0", "capacity"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "provider.toml"
    whole = template()
    path.write_text(whole[: whole.index("[registry]")] + text)
    with pytest.raises(ConfigError, match=words):
        load(path)


def test_only_executors_are_listed(configure: Configure, vouching: Vouching) -> None:
    registry = AnnounceConfig(announce=("r.example:1",), authority=vouching.authority.certificate)
    config = configure(roles=("helper",))
    with pytest.raises(ValueError, match="tenants choose their helpers by hand"):
        msgspec.structs.replace(config, registry=registry)
    with pytest.raises(ValueError, match="capacity_layers"):
        configure(model=ModelConfig(checkpoint="model", layers="auto"))


def test_a_provider_process_announces_its_end_on_sigterm(
    announcing: Announcing, vouching: Vouching, registry: RegistryServer, launch: Launch
) -> None:
    service = launch(announcing("eight", layers="auto", capacity_layers=1))
    until(lambda: "eight" in listed(vouching, registry, service.model_digest))
    assert not listed(vouching, registry, service.model_digest)["eight"].descriptor.draining
    assert service.stop() == 0
    assert listed(vouching, registry, service.model_digest)["eight"].descriptor.draining


# The choice of layers

NOBODY = Served()
SERVED = st.lists(
    st.just(NOBODY) | st.builds(Served, st.integers(1, 2), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=12
)


@given(layers=SERVED, length=st.integers(1, 15))
def test_no_other_range_is_served_less(layers: list[Served], length: int) -> None:
    chosen = most_needed(layers, length)
    wanted = min(length, len(layers))
    assert chosen.last - chosen.first + 1 == wanted
    assert 0 <= chosen.first <= chosen.last < len(layers)
    served = sorted(layers[chosen.first : chosen.last + 1])
    for first in range(len(layers) - wanted + 1):
        other = sorted(layers[first : first + wanted])
        assert served <= other
        if served == other:
            assert chosen.first <= first  # all providers decide alike


@given(layers=SERVED, length=st.integers(1, 15))
def test_an_unserved_layer_is_chosen_first(layers: list[Served], length: int) -> None:
    chosen = most_needed(layers, length)
    if NOBODY in layers:
        assert NOBODY in layers[chosen.first : chosen.last + 1]


@given(layers=st.integers(1, 40), length=st.integers(1, 12))
def test_providers_that_join_one_after_the_other_cover_all_layers(layers: int, length: int) -> None:
    """Enough providers cover all layers: none is left out while another layer is served twice as often as necessary."""
    capacities = [0.0] * layers
    for _ in range(2 * math.ceil(layers / length)):
        chosen = most_needed([Served(1, capacity) for capacity in capacities], length)
        for layer in range(chosen.first, chosen.last + 1):
            capacities[layer] += 1
    assert min(capacities) >= 1


def test_a_gap_is_filled_exactly() -> None:
    def chosen(capacities: list[float], length: int) -> LayerRange:
        return most_needed([Served(1, capacity) for capacity in capacities], length)

    assert chosen([1, 1, 0, 0, 1, 1], 2) == LayerRange(2, 3)
    assert chosen([1, 1, 0, 0, 1, 1], 3) == LayerRange(1, 3)
    assert chosen([3, 2, 2, 1], 2) == LayerRange(2, 3)
    assert chosen([1, 1, 1], 9) == LayerRange(0, 2)


@pytest.mark.parametrize("lied_about", ["0-3", "4-7"])
def test_a_huge_claimed_capacity_keeps_no_other_provider_away(vouching: Vouching, lied_about: str) -> None:
    """Some of four other providers, each with room for half of the model, also choose the layers of the claimant."""
    layers = LayerRange.parse(lied_about)
    there = [vouching.said("liar", layers=lied_about, capacity=1e9)]
    for name in ("gamma", "delta", "epsilon", "zeta"):
        chosen = most_needed(coverage(8, there), 4)
        there.append(vouching.said(name, layers=str(chosen)))
    served = coverage(8, there[1:])
    assert all(served[layer].operators for layer in range(layers.first, layers.last + 1))


def test_a_claimed_capacity_counts_up_to_four_times_the_median(vouching: Vouching) -> None:
    there = [
        vouching.said(name, layers="0", capacity=capacity)
        for name, capacity in (("gamma", 1.0), ("delta", 2.0), ("liar", 1e9))
    ]
    assert coverage(2, there) == [Served(2, 1.0 + 2.0 + 8.0), NOBODY]
    leaving = vouching.said("epsilon", layers="0-1", draining=True)
    assert coverage(2, [*there, leaving]) == coverage(2, there)
    assert coverage(1, []) == [NOBODY]
