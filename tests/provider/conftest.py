"""Fixtures: a tiny Llama and a tiny GPT-2, certificates, providers, and connections to them."""

import contextlib
import functools
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from provider.config.schema import ProviderConfig
from provider.products.model import ServedModel
from provider.serve import Provider
from symbiosis_priv.certificates import issuing
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import client_context
from tests.provider.clients import Client, Service, config_of


@dataclass(frozen=True, eq=False)
class Keys:
    """One authority, a provider and four tenants. Another authority has issued `stranger` and a second alice."""

    authority: Identity
    other_authority: Identity
    provider: Identity
    tenants: dict[str, Identity]
    stranger: Identity
    namesake: Identity

    @functools.cache  # noqa: B019 - one instance per session
    def context(self, tenant: str = "alice") -> ssl.SSLContext:
        others = {"stranger": self.stranger, "namesake": self.namesake}
        identity = others.get(tenant) or self.tenants[tenant]
        return client_context(certificate=identity.certificate, key=identity.key, pins=[self.provider.certificate])


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    authority = issuing.create_authority(folder)
    other = issuing.create_authority(folder, name="other")

    def tenant(name: str, signer: Identity = authority) -> Identity:
        return issuing.issue(folder, authority=signer, kind=Kind.TENANT, name=name)

    return Keys(
        authority=authority,
        other_authority=other,
        provider=issuing.issue(folder, authority=None, kind=Kind.PROVIDER, name="alpha"),
        tenants={name: tenant(name) for name in ("alice", "bob", "carol", "dave")},
        stranger=tenant("stranger", other),
        namesake=issuing.issue(folder / "other", authority=other, kind=Kind.TENANT, name="alice"),
    )


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def llama(save_llama: Callable[..., Path]) -> Path:
    return save_llama()


@pytest.fixture(scope="session")
def gpt2(save_gpt2: Callable[..., Path]) -> Path:
    return save_gpt2(vocab_size=61, n_positions=32, n_embd=48, n_layer=1)


@pytest.fixture(scope="session")
def store(llama: Path, cache: Path) -> WeightStore:
    return WeightStore(llama, cache=cache)


@pytest.fixture(scope="session")
def gpt2_store(gpt2: Path, cache: Path) -> WeightStore:
    return WeightStore(gpt2, cache=cache)


Configure = Callable[..., ProviderConfig]


@pytest.fixture(scope="session")
def configure(keys: Keys, cache: Path, llama: Path) -> Configure:
    """A configuration for tests: `configure(checkpoint=..., layers=..., max_payload_mib=..., revoked=..., quota=...)`,
    with the fields of `Limits`, of `TlsConfig` and of `ProviderConfig`."""

    sizes = {"max_payload_mib": 8, "max_inflight_mib": 64}

    def configure(*, checkpoint: Path = llama, **options: Any) -> ProviderConfig:
        own, authority = keys.provider, keys.authority
        return config_of(checkpoint, cache=cache, own=own, authority=authority, **sizes | options)

    return configure


@pytest.fixture(scope="session")
def provider(configure: Configure) -> Iterator[Provider]:
    """One provider for all tests that need no special configuration."""
    with Provider(configure()) as provider:
        yield provider


Connect = Callable[..., Client]


@pytest.fixture
def connect(provider: Provider, keys: Keys) -> Iterator[Connect]:
    """`connect()`: an authenticated connection that has sent its hello, unless `role=None`. `to=` names another
    provider, `source=` another source address."""
    with contextlib.ExitStack() as clients:

        def connect(
            tenant: str | None = None,
            *,
            role: wire.Role | None = "executor",
            to: Provider | Service = provider,
            context: ssl.SSLContext | None = None,
            source: str = "",
        ) -> Client:
            # Different tenants for the two roles, because an earlier connection may not have ended yet.
            own = context or keys.context(tenant or ("carol" if role == "helper" else "alice"))
            client = Client(to.address, own, source=source)
            clients.callback(client.close)
            if role is not None:
                reply = client.hello(to.model_digest, role)
                assert isinstance(reply, wire.Welcome), reply
            return client

        yield connect


Hold = Callable[[], tuple[threading.Event, threading.Event]]


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Hold:
    """`begun, go_on = hold()`: from now on products wait for the second event; the first one says that one waits."""

    def hold() -> tuple[threading.Event, threading.Event]:
        begun, go_on, product = threading.Event(), threading.Event(), ServedModel.product

        def held(*args: Any, **kwargs: Any) -> Tensor:
            begun.set()
            assert go_on.wait(20)
            return product(*args, **kwargs)

        monkeypatch.setattr(ServedModel, "product", held)
        return begun, go_on

    return hold


Launch = Callable[..., Service]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Start `provider serve` in a process of its own; stopped after the module if it still runs."""
    with contextlib.ExitStack() as services:

        def launch(config: ProviderConfig) -> Service:
            service = Service(config, tmp_path_factory.mktemp("service"))
            services.callback(service.stop)
            return service

        yield launch
