"""`provider.toml`: the model that a provider serves, its tenants, and its limits.

`provider_toml.template` writes the "Args" below into the file that `provider init` makes, so operators read them there.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec

from symbiosis_priv.certificates.naming import NAME
from symbiosis_priv.checkpoints.layers import LayerRange, RoundTrips, Scope
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_PAYLOAD, MAX_SECONDS, Role, WeightBits
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.system.files import UNDECODABLE

MIB = 1 << 20
DEFAULT_LISTEN = "127.0.0.1:7401"
SLOWEST_BYTES_PER_S = 1 << 20
"""Slowest average transfer of a large matrix after the first seconds."""
MAX_BATCH_ROWS = 16_384
"""Most rows of one product."""
_TENANT = re.compile(rf"{NAME.pattern}(@sha256:[0-9a-f]{{16}}([0-9a-f]{{48}})?)?")

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Card = Annotated[str, msgspec.Meta(pattern="^cuda:[0-9]+$")]
_Device = Annotated[str, msgspec.Meta(pattern="^(cpu|cuda(:[0-9]+)?)$")]  # "cpu:0" would not be known as a CPU


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The public base model.

    Args:
        checkpoint: a folder (relative to the file) or a name on the Hugging Face hub.
        weight_bits: bits of a quantised weight. Every tenant of this provider uses the same value.
        tied_head: also serve the product of an LM head whose weight is the embedding table. Changes the digest.
        experts: serve the experts of a mixture. With false, tenants compute them. Changes the digest.
        round_trips: 2 also serves composed groups, with which a transformer block takes two round trips instead of four
            while tokens are decoded. They take about 1.4 times the memory of the model's other weights, and a decoded
            token about twice the work; the provider logs the factors when it starts. Changes the digest.
        cache: folder for quantised weights; the user's cache folder if left out.
        layers: first and last layer that is served; all if left out. "auto:16" takes, when the provider starts, the 16
            layers that the executors in the registries of `announce` serve least. The digest covers the whole model.
    """

    checkpoint: str
    weight_bits: WeightBits = DEFAULT_WEIGHT_BITS
    tied_head: bool = False
    experts: bool = True
    round_trips: RoundTrips = 4
    cache: Path | None = None
    layers: str | None = None

    def __post_init__(self) -> None:
        if self.auto_layers is not None:
            return
        if (self.layers or "").startswith("auto"):
            raise ValueError(f"layers = {self.layers!r}: write how many to take, as in 'auto:16'")
        _ = self.layer_range

    @property
    def layer_range(self) -> LayerRange | None:
        """The layers that are served; None for all. With `auto_layers`, call `placement.placed` first."""
        return None if self.layers is None else LayerRange.parse(self.layers)

    @property
    def auto_layers(self) -> int | None:
        """The number of layers of "auto:16"; None where they are named."""
        found = re.fullmatch(r"auto:([1-9]\d{0,4})", self.layers or "", re.ASCII)
        return None if found is None else int(found[1])

    @property
    def scope(self) -> Scope:
        return Scope(tied_head=self.tied_head, experts=self.experts, round_trips=self.round_trips)


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PEM files, made by `symbiosis-priv keys`. The provider reads them again when they change.

    Args:
        certificate: the provider's own certificate.
        key: the private key of the certificate.
        tenant_authority: the authority that signs tenants' certificates.
        revoked: tenants' certificates that are no longer accepted, as `symbiosis-priv keys revoke` lists them.
    """

    certificate: Path
    key: Path
    tenant_authority: Path
    revoked: Path | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on all memory and connections that clients can take.

    Args:
        max_payload_mib: largest matrix of a request or a reply, in MiB.
        max_inflight_mib: MiB for the matrices of all requests and replies, reserved before memory is allocated. A
            quarter is kept for small requests, with an equal part for every connection, so they never wait for large
            ones. One tenant may have half of all.
        max_connections: authenticated connections. One more closes the idlest connection of the tenant that has the
            most, if its own tenant has fewer; else it is refused.
        max_connections_per_tenant: one tenant's limit.
        frame_timeout_s: time to finish a frame that has begun, and to accept a reply. A large matrix must also take
            less than a second per MiB, because it holds bytes of `max_inflight_mib`.
        stop_timeout_s: time for requests in flight when the provider stops.
    """

    max_payload_mib: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAYLOAD // MIB)] = 256
    max_inflight_mib: _Count = 2048
    max_connections: _Count = 256
    max_connections_per_tenant: _Count = 64
    frame_timeout_s: _Seconds = 60.0
    stop_timeout_s: _Seconds = 10.0

    def __post_init__(self) -> None:
        if 4 * self.max_payload_mib > self.max_inflight_mib:
            raise ValueError("max_inflight_mib must hold requests of two tenants and their replies: 4 max_payload_mib")

    @property
    def small_request(self) -> int:
        """Largest size in bytes of a small request and its reply. Memory for one is reserved for each connection."""
        return self.max_inflight_mib * MIB // 4 // self.max_connections


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The executor: where and how products are computed.

    Args:
        own_process: true for a process of its own, which is restarted when it dies or hangs; false for a thread of the
            gateway's process.
        device: "cpu", "cuda", or a card such as "cuda:1".
        devices: "all", or a list such as ["cuda:0", "cuda:1"]: a process for each card, with a range of the layers and
            the next port. Replaces `device`. List the addresses under `address` in federation.toml.
        processes: the same on CPUs, for this number of processes.
        threads: torch threads; torch chooses if left out.
        ranks: number of processes that each hold a shard of the model and multiply together (`provider.shards`).
        hang_timeout_s: an executor that does not answer for this time is killed and restarted. Ranks wait as long for a
            running rank that does not take part, and the executor is given twice the time, so that the rank can be
            found. A rank that has died or stopped is noticed within seconds.
        float_memory_mib: also serve float products; so many MiB must hold all float weights. Only masking =
            "paper-pool" needs them.
    """

    own_process: bool = False
    device: _Device = "cpu"
    devices: Literal["all"] | Annotated[tuple[_Card, ...], msgspec.Meta(min_length=1)] | None = None
    processes: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    threads: _Count | None = None
    ranks: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    hang_timeout_s: _Seconds = 60.0
    float_memory_mib: _Count | None = None

    @property
    def float_memory(self) -> int | None:
        """Bytes for weights of the float path; None if it is off."""
        return None if self.float_memory_mib is None else self.float_memory_mib * MIB

    @property
    def per_card(self) -> bool:
        """True if each card or part of the CPU has a process of its own (`processes.cards`)."""
        return self.devices is not None or self.processes > 1

    def __post_init__(self) -> None:
        if self.per_card and (self.ranks > 1 or self.own_process or (self.devices and self.processes > 1)):
            raise ValueError("devices, processes, ranks and own_process exclude each other: keep one of them")
        if self.processes > 1 and self.device != "cpu":
            raise ValueError(f"processes is for CPUs: write devices = 'all' in place of device = {self.device!r}")
        if self.devices and len(set(self.devices)) < len(self.devices) and self.devices != "all":
            raise ValueError(f"devices = {list(self.devices)!r} has a card twice")
        if self.ranks > 1 and not hasattr(os, "memfd_create"):
            raise ValueError("ranks need Linux")
        if self.ranks > 1 and self.device.startswith("cuda:"):
            raise ValueError(f"device = {self.device!r}: every rank needs its own GPU; write device = 'cuda'")


class QuotaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on each tenant; no limit if left out. The provider reads them again on SIGHUP or when this file changes.

    Args:
        weight: the tenant's share of a busy executor, relative to other tenants.
        requests_per_s: products per second.
        rows_per_s: rows per second.
        giga_multiply_adds_per_s: work per second in 10^9 multiply-adds, including the keystream of effects.
    """

    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None
    requests_per_s: _Rate | None = None
    rows_per_s: _Rate | None = None
    giga_multiply_adds_per_s: _Rate | None = None

    @property
    def limits_nothing(self) -> bool:
        return (self.requests_per_s, self.rows_per_s, self.giga_multiply_adds_per_s) == (None, None, None)


class UsageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each tenant's usage.

    Args:
        database: the file of the counts, for `symbiosis-priv provider usage`; provider.usage.sqlite beside
            provider.toml if left out. A configuration that is made in code counts in memory only.
    """

    database: Path | None = None


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The operator's own address: Prometheus' metrics, health, readiness, and what `provider top` shows. The address
    has no authentication: keep it on loopback or on a private network.

    Args:
        listen: `host:port`; nothing listens if left out.
        hosts: host names by which operators reach it, besides the host in `listen` and localhost. Requests for metrics
            and status that name another host are refused; an IP address needs no entry.
    """

    listen: str | None = None
    hosts: list[str] = []

    def __post_init__(self) -> None:
        if self.listen is not None:
            parse_address(self.listen)


class AnnounceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Registries that list this executor, so that tenants can find it.

    Args:
        announce: addresses of registries; nothing is announced if left out.
        authority: the federation's authority, which has certified this provider and its operator's name.
        revoked: the authority's list of revoked certificates.
        address: where tenants reach this provider, `host:port`; `listen` if left out. The certificate names the host.
    """

    announce: tuple[str, ...] = ()
    authority: Path | None = None
    revoked: Path | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        for address in (*self.announce, *([] if self.address is None else [self.address])):
            parse_address(address)
        if self.announce and self.authority is None:
            raise ValueError("announce needs authority: the CA certificate of the federation's providers")


class ProviderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One provider.

    Args:
        name: the name in health reports and logs.
        listen: `host:port`; port 0 takes a free one.
        roles: `executor`, `helper` or both; one tenant is served in one role at a time (rule 8).
        log_level: `info`, `warning`, or `debug` for one line per request. No level logs content.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    listen: str = DEFAULT_LISTEN
    roles: Annotated[tuple[Role, ...], msgspec.Meta(min_length=1, max_length=2)] = ("executor",)
    log_level: Literal["debug", "info", "warning"] = "info"
    model: ModelConfig
    tls: TlsConfig
    limits: Limits = Limits()
    executor: ExecutorConfig = ExecutorConfig()
    quota: QuotaConfig = QuotaConfig()
    tenants: dict[str, QuotaConfig] = {}
    usage: UsageConfig = UsageConfig()
    metrics: MetricsConfig = MetricsConfig()
    registry: AnnounceConfig = AnnounceConfig()

    def __post_init__(self) -> None:
        parse_address(self.listen)
        if self.registry.announce and "executor" not in self.roles:
            raise ValueError("[registry] lists executors: tenants choose their helpers by hand. Remove announce")
        for tenant in self.tenants:
            if not _TENANT.fullmatch(tenant):
                raise ValueError(
                    f"[tenants.{tenant!a}] names no tenant: write the name in its certificate, or "
                    f'"NAME@sha256:0123456789abcdef" with 16 or all 64 digits of the key fingerprint '
                    "of its authority (`symbiosis-priv keys show`)"
                )
        if self.model.auto_layers is not None and not self.registry.announce:
            raise ValueError(f"layers = '{self.model.layers}' needs announce under [registry]")
        if self.executor.per_card:
            refused = {
                'roles = ["executor", "helper"]': len(self.roles) > 1,  # no process sees the roles of another one
                "[registry] announce": self.registry.announce,  # a descriptor has one address
                "[executor] float_memory_mib": self.executor.float_memory,  # floats come from one address
            }
            for name in (name for name, given in refused.items() if given):
                raise ValueError(
                    f"[executor] devices and processes give each card an address of its own: remove {name}"
                )

    def with_layers(self, layers: str) -> Self:
        return msgspec.structs.replace(self, model=msgspec.structs.replace(self.model, layers=layers))

    def before_layers_are_chosen(self) -> Self:
        """For the digest, which covers all layers: with "auto:16", layer 0 alone is packed on the way."""
        return self if self.model.auto_layers is None else self.with_layers("0")

    def quota_of(self, tenant: TenantIdentity) -> QuotaConfig:
        """A tenant's quota: its own values, and the default's where it has none."""
        names = f"{tenant.name}@{tenant.authority}", str(tenant), tenant.name
        own = next((self.tenants[name] for name in names if name in self.tenants), None)
        if own is None:
            return self.quota
        values = {name: value for name, value in msgspec.structs.asdict(own).items() if value is not None}
        return msgspec.structs.replace(self.quota, **values)


def to_json(config: ProviderConfig) -> bytes:
    """The configuration for the executor's process; `from_json` reads it."""
    return msgspec.json.encode(config, enc_hook=str)


def from_json(data: bytes) -> ProviderConfig:
    """The inverse of `to_json`. Raises `ConfigError`: the data is damaged."""
    try:
        return msgspec.json.decode(data, type=ProviderConfig, dec_hook=lambda kind, value: kind(value))
    except UNDECODABLE as error:
        raise ConfigError(f"not a provider's configuration: {error}") from error
