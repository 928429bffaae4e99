"""A provider announces itself: contents and times of announcements; registries cannot harm its tenants. The choice of
layers for a new provider is compared with an exhaustive search.
"""

import contextlib
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st

from provider.announce.placement import (
    Placed,
    Placement,
    Rebalancer,
    Served,
    better,
    coverage,
    has_turn,
    most_needed,
    placed,
    unplaced,
)
from provider.config.schema import AnnounceConfig, ProviderConfig, TlsConfig
from provider.logs import JsonLines
from provider.products.model import open_store
from provider.registry.server import RegistryServer
from provider.serve import Provider
from symbiosis_priv.certificates import issuing
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.errors import CertificateError, ConfigError
from symbiosis_priv.network.tls import client_context
from symbiosis_priv.registry.descriptor import VerifiedDescriptor, newest, verify
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
    return {announced.name: announced for announced in newest(found).values()}


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
    announcing: Announcing, vouching: Vouching, registry: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provider.announce.announcer.LIFETIME_S", 3.0)
    with Provider(announcing("delta")) as provider:
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


@pytest.mark.parametrize("lacking", ["memory", "disk"])
def test_an_executor_stays_where_it_is_while_the_new_weights_do_not_fit(
    announcing: Announcing,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lacking: str,
) -> None:
    """Layer 1 has no operator, so the executor would move there. It moves once there is room."""
    config = announcing("mover", layers="auto", capacity_layers=1, rebalance_s=0.1)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, cache=tmp_path))
    others = [Placed(name, name, LayerRange(0, 0)) for name in ("one", "two")]
    monkeypatch.setattr(Placement, "others", lambda self: others)
    moved: list[ProviderConfig] = []
    rebalancer = Rebalancer(config, layers=LayerRange(0, 0), move=moved.append)
    with monkeypatch.context() as small, contextlib.ExitStack() as full:
        if lacking == "memory":
            small.setattr("provider.config.memory_plan._container_limit", lambda: 10 << 20)
        else:
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            full.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        rebalancer.periodic.start()
        until(lambda: "cannot_move" in caplog.messages)
        assert not moved
    until(lambda: bool(moved))
    rebalancer.periodic.close(20)
    assert moved[0].model.layers == "1"


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


@given(layers=st.integers(1, 40), length=st.integers(1, 12))
def test_providers_that_join_one_after_the_other_cover_all_layers(layers: int, length: int) -> None:
    """Enough providers cover all layers: none is left out while another layer is served twice as often as necessary."""
    counts = [0] * layers
    for _ in range(2 * math.ceil(layers / length)):
        chosen = most_needed([Served(1, count) for count in counts], length)
        for layer in range(chosen.first, chosen.last + 1):
            counts[layer] += 1
    assert min(counts) >= 1


# Moving while running


def at(key: str, layers: str, *, operator: str | None = None) -> Placed:
    return Placed(key, operator or key, LayerRange.parse(layers))


PLACES = st.lists(
    st.builds(
        lambda first, length, operator: (f"{first}-{min(first + length, 7)}", operator),
        st.integers(0, 7), st.integers(0, 7), st.sampled_from("abcd"),
    ),
    max_size=8,
)  # fmt: skip


@given(places=PLACES, first=st.integers(0, 6), period=st.integers(0, 30))
def test_a_move_helps_the_least_served_layers_and_leaves_no_layer_alone(
    places: list[tuple[str, str]], first: int, period: int
) -> None:
    others = [at(str(i), layers, operator=who) for i, (layers, who) in enumerate(places)]
    own = at("own", f"{first}-{first + 1}")
    if (to := better(8, own, others, period=period)) is not None:
        before, after = coverage(8, [*others, own]), coverage(8, [*others, own._replace(layers=to)])
        assert sorted(after) > sorted(before)
        assert all(after[layer].operators for layer in (first, first + 1))
        assert all(better(8, own._replace(layers=to), others, period=later) is None for later in range(8))


def test_only_a_clear_lack_is_worth_a_move() -> None:
    """Less than three quarters of the mean is a lack."""
    others = [at(key, "0") for key in "abc"] + [at("a1", "1", operator="a")]
    others += [at(key, "1") for key in "de"]
    moves = [better(2, at("own", "1"), others, period=period) for period in range(8)]
    assert moves == [None] * 8  # 3 of 3.5
    others += [at("f", "1"), at("g", "1"), at("h", "1")]  # 3 of 5
    moves = [better(2, at("own", "1"), others, period=period) for period in range(8)]
    assert sorted(map(str, moves)) == ["0"] + ["None"] * 7  # in its turn


def test_executors_of_one_operator_take_turns() -> None:
    fleet = [at(key, "0", operator="one") for key in "abc"]
    for turns in (1, 8):
        for period in range(16):
            assert sum(has_turn(own, fleet, period=period, turns=turns) for own in fleet) <= 1
        for own in fleet:
            assert any(has_turn(own, fleet, period=period, turns=turns) for period in range(8))
    assert all(has_turn(at("z", "0"), fleet, period=period, turns=1) for period in range(8))


def test_a_swarm_settles_and_does_not_oscillate() -> None:
    """Two hundred executors look at random times. Every second period some
    leave and others join, and most executors of the last twelve layers leave in period 12. A move takes a fifth
    of a period, in which the executor serves nothing. Then nobody joins or leaves. Fixed seed.
    """
    random = Random(5)
    layers, served = 24, list[Placed]()
    worst, moves = [], []

    def join(number: int) -> None:
        length = random.choice([4, 8, 8, 16])
        where = most_needed(coverage(layers, served), length)
        served.append(at(f"{number:05}", str(where), operator=str(number % 90)))

    for number in range(200):
        join(number)
    for period in range(40):
        if period < 16 and period % 2 == 0:
            random.shuffle(served)
            del served[:10]
            for number in range(10):
                join(1000 + 100 * period + number)
        if period == 12:
            served = [one for one in served if one.layers.first < 12 or random.random() < 0.3]
        before = coverage(layers, served)
        worst.append(min(before).executors / statistics.fmean(one.executors for one in before))
        moving: list[tuple[float, Placed]] = []
        moves.append(0)
        for moment, own in sorted((random.random(), own) for own in served):
            served += [one for until_, one in moving if until_ <= moment]
            moving = [(until_, one) for until_, one in moving if until_ > moment]
            others = [one for one in served if one.key != own.key]
            if (to := better(layers, own, others, period=period)) is not None:
                served.remove(own)
                moving.append((moment + 0.2, own._replace(layers=to)))
                moves[-1] += 1
        served += [one for _, one in moving]
    assert min(coverage(layers, served)).operators == 2
    assert max(moves) <= len(served) / 8
    assert moves[30:] == [0] * 10
    assert worst[12] < 0.65
    assert worst[24] >= 0.75
