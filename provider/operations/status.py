"""The status of a running provider for its operator: names, counts and times, and no data of tenants."""

import time
from contextlib import suppress

import msgspec

from provider.announce.announcer import Announcer
from provider.config.reload import Reloader
from provider.config.schema import ProviderConfig
from provider.executor.client import ExecutorHandle, ExecutorRequester
from provider.executor.queues import ExecutorReport
from provider.gateway.gateway import Gateway
from provider.gateway.listener import Handshakes
from provider.gateway.usage import BilledRole, UsageCounts
from provider.refusal import Refusal
from symbiosis_priv import __version__
from symbiosis_priv.certificates.reading import expiry
from symbiosis_priv.errors import CertificateError

_ASK_S = 1.0


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant has used in one role since the provider started."""

    tenant: str
    role: BilledRole
    counts: UsageCounts


def _expiry(config: ProviderConfig) -> dict[str, float]:
    tls, registry = config.tls, config.registry
    files = [tls.certificate, tls.tenant_authority]
    files += [registry.authority] if registry.announce and registry.authority else []
    found = dict.fromkeys(map(str, files), 0.0)
    for path in files:
        with suppress(CertificateError):
            found[str(path)] = expiry(path).timestamp()
    return found


class Status(msgspec.Struct, frozen=True, kw_only=True):
    provider: str
    version: str = ""
    model_digest: str
    uptime_s: float
    ready: bool  # it accepts requests and its executor answers
    connections: int
    handshakes: Handshakes
    visits: dict[str, int]  # connections that each tenant has opened since the start
    over_quota: dict[str, int]  # requests of each tenant that its quota made wait, or refused, since the start
    bytes_held: int  # of large requests in memory
    waiting_for_bytes: int  # large requests that wait for memory
    restarts: int  # of the executor
    hangs: int  # times that the executor did not answer for too long
    tenants: list[TenantStatus]
    executor: ExecutorReport | None  # None if it does not answer
    registries: dict[str, bool] = {}  # True if the registry accepted the last announcement
    certificates: dict[str, float] = {}  # Unix time at which each file's next one expires; 0: it cannot be read
    groups: list[str] = []  # names of the layer groups that are served
    reloaded: bool = True  # certificates, revocations and quotas; if not, the older settings are in use
    usage_unwritten_s: float = 0.0  # seconds since usage was last written to disk, if writing fails


def take_status(
    gateway: Gateway,
    executor: ExecutorHandle,
    announcer: Announcer | None,
    reloader: Reloader,
    config: ProviderConfig,
) -> Status:
    state, report = gateway.state, None
    with suppress(Refusal), ExecutorRequester(executor) as client:
        report = client.report(deadline=time.monotonic() + _ASK_S)
    return Status(
        provider=state.config.name,
        version=__version__,
        model_digest=state.digest,
        uptime_s=time.monotonic() - state.started,
        ready=report is not None and not state.stopping.is_set() and state.usage.can_bill,
        connections=len(gateway.peers),
        handshakes=gateway.listener.handshakes,
        visits={str(tenant): count for tenant, count in dict(state.register.visits).items()},
        over_quota={str(tenant): count for tenant, count in state.quotas.limited().items()},
        bytes_held=state.budget.used,
        waiting_for_bytes=state.budget.waiting,
        restarts=executor.generation,
        hangs=executor.hangs,
        tenants=[
            TenantStatus(tenant=str(tenant), role=role, counts=counts)
            for (tenant, role), counts in sorted(state.usage.totals().items(), key=str)
        ],
        executor=report,
        registries={} if announcer is None else announcer.accepted,
        usage_unwritten_s=state.usage.unwritten_s,
        certificates=_expiry(config),
        groups=[group.name for group in state.manifest.groups[state.served.start : state.served.stop]],
        reloaded=reloader.succeeded,
    )
