"""A helper and an executor of one model, linked, and the matrices that they must answer with."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from provider.config.schema import RelayConfig, RelayTarget, TlsConfig
from provider.serve import Provider
from symbiosis_priv.arithmetic.keystream import Seed, expand, mask_key, relay_key
from symbiosis_priv.certificates import issuing
from symbiosis_priv.certificates.reading import Identity, Kind, fingerprint
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.network import wire
from symbiosis_priv.network.block_statement import block_id
from symbiosis_priv.network.tls import client_context
from tests.provider.clients import Client
from tests.provider.conftest import Configure, Connect, Keys


@dataclass(frozen=True)
class Pair:
    """A helper that may relay to an executor."""

    executor: Provider
    helper: Provider
    helper_identity: Identity
    executor_certificate: str
    helper_certificate: str


def configured(configure: Configure, identity: Identity, *, role: wire.Role, relay: RelayConfig, **options: Any) -> Any:
    config = configure(roles=(role,), **options)
    tls = TlsConfig(certificate=identity.certificate, key=identity.key, tenant_authority=config.tls.tenant_authority)
    return msgspec.structs.replace(config, name=role, tls=tls, relay=relay)


@pytest.fixture(scope="module")
def pair(
    configure: Configure, keys: Keys, store: WeightStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    model = {"checkpoint": store.path}
    folder = tmp_path_factory.mktemp("helper")
    identity = issuing.issue(folder, authority=None, kind=Kind.PROVIDER, name="beta")
    takes = RelayConfig(helpers=(identity.certificate,), memory_mib=1)
    with Provider(configured(configure, keys.provider, role="executor", relay=takes, **model)) as executor:
        sends = RelayConfig(to=(RelayTarget(address=executor.address, certificate=keys.provider.certificate),))
        with Provider(configured(configure, identity, role="helper", relay=sends, **model)) as helper:
            certificates = fingerprint(keys.provider.certificate), fingerprint(identity.certificate)
            yield Pair(executor, helper, identity, *certificates)


@dataclass
class Tenant:
    """A tenant's two connections and its permit."""

    executor: Client
    helper: Client
    permit: bytes
    pair: Pair
    store: WeightStore
    seed: Seed = field(default_factory=lambda: Seed(secrets.token_bytes(32)))

    def order(self, group: int, rows: int, *, first_row: int = 0, **options: Any) -> wire.Effect:
        """An effect that the helper sends to the executor."""
        return wire.Effect(
            nonce=secrets.token_bytes(16),
            group=group,
            rows=rows,
            arithmetic="ring",
            first_row=first_row,
            relay=wire.RelayOrder(permit=self.permit, executor=self.pair.executor_certificate),
            **{"direction": "forward", "seed": self.seed} | options,
        )

    def relay(self, group: int, rows: int, **options: Any) -> wire.Effect:
        """Order an effect, and check that it was relayed."""
        effect = self.order(group, rows, **options)
        self.helper.send(effect)
        reply, payload = self.helper.receive()
        assert reply == wire.Result.answering(effect, relayed=True), reply
        assert not payload
        return effect

    def product(self, rows: Tensor, effect: wire.Effect, **options: Any) -> tuple[wire.Result, Tensor]:
        """Send rows with the blocks of an effect; `options` replace fields of the request."""
        fields = {
            "blocks": (wire.BlockRows(block=block_id(effect), start=0, first=0, rows=len(rows)),),
            "nonce": secrets.token_bytes(16),
        }
        request = wire.Execute(
            group=effect.group,
            direction=effect.direction,
            arithmetic="ring",
            rows=len(rows),
            counts=effect.counts,
            ring_bits=effect.ring_bits,
            **fields | options,
        )
        self.executor.send(request, request.encoding.pack(rows))
        reply, payload = self.executor.receive()
        assert isinstance(reply, wire.Result), reply
        assert reply.answers(request)
        return reply, request.encoding.unpack(payload, rows=len(rows))

    def width(self, effect: wire.Effect) -> int:
        """The columns of a request's rows."""
        return self.store.manifest().groups[effect.group].columns(effect.direction)[0]

    def matrices(self, effect: wire.Effect) -> tuple[Tensor, Tensor]:
        """The mask's effect e and the hiding rows m of a request, int32 `[rows, outputs]`."""
        entry = self.store.manifest().groups[effect.group]
        inputs, outputs = entry.columns(effect.direction)
        named = {"group_name": entry.name, "direction": effect.direction}
        spans = {"first_row": effect.first_row, "rows": effect.rows}
        mask = expand(mask_key(effect.seed, **named), width=inputs, **spans)
        return self.times(mask, effect), expand(relay_key(effect.seed, **named), width=outputs, **spans)

    def times(self, rows: Tensor, effect: wire.Effect) -> Tensor:
        """The product with the quantised weights modulo 2^32."""
        weights = self.store.group(effect.group).weight.to(torch.int32)
        return rows @ (weights.T if effect.direction == "forward" else weights)


NewTenant = Callable[..., Tenant]


@pytest.fixture
def new_tenant(pair: Pair, connect: Connect, keys: Keys, store: WeightStore) -> NewTenant:
    """`new_tenant(name)`: a tenant with a permit for the helper."""

    def new_tenant(
        name: str = "alice", *, executor: Provider = pair.executor, helper: Provider = pair.helper
    ) -> Tenant:
        own, pins = keys.tenants[name], [pair.helper_identity.certificate]
        at_executor = connect(name, to=executor)
        permit = at_executor.ask(wire.PermitRequest(helpers=(pair.helper_certificate,)))
        assert isinstance(permit, wire.Permit), permit
        context = client_context(certificate=own.certificate, key=own.key, pins=pins)
        at_helper = connect(name, to=helper, role="helper", context=context)
        return Tenant(at_executor, at_helper, permit.token, pair, store)

    return new_tenant
