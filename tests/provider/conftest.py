"""Fixtures: a tiny Llama and a tiny GPT-2, certificates, providers, and connections to them."""

import contextlib
import functools
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from provider.config.schema import ExecutorConfig, Limits, ModelConfig, ProviderConfig, TlsConfig
from provider.serve import Provider
from symbiosis_priv.certificates import issuing
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import client_context
from tests.provider.clients import Client, Service


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
    """A configuration for tests: `configure(checkpoint=..., max_payload_mib=..., quota=..., ...)`, with the fields of
    `Limits` and of `ProviderConfig`."""

    def configure(*, checkpoint: Path = llama, **options: Any) -> ProviderConfig:
        default = Limits(max_payload_mib=8, max_inflight_mib=64, max_inflight_mib_per_tenant=32)
        limits = {name: options.pop(name) for name in Limits.__struct_fields__ if name in options}
        config = ProviderConfig(
            name="alpha",
            listen="127.0.0.1:0",
            roles=("executor", "helper"),
            log_level="debug",
            model=ModelConfig(checkpoint=str(checkpoint), cache=cache),
            tls=TlsConfig(
                certificate=keys.provider.certificate,
                key=keys.provider.key,
                tenant_authority=keys.authority.certificate,
            ),
            limits=msgspec.structs.replace(default, **limits),
            executor=ExecutorConfig(threads=1),
        )
        return msgspec.structs.replace(config, **options)

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
