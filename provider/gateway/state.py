"""The state that all connections of a provider share."""

import threading
from dataclasses import dataclass, field

from provider.config.schema import ProviderConfig
from provider.executor.client import CachedReport
from provider.executor.envelope import Stages
from provider.gateway.admission import ByteBudget, Register
from provider.gateway.quota import QuotaGate
from provider.gateway.slots import Slots
from provider.gateway.usage import UsageCounters
from provider.relay.blocks import BlockStore
from provider.relay.links import Links
from provider.relay.permits import Permits
from symbiosis_priv.checkpoints.manifest import Manifest


@dataclass(frozen=True)
class GatewayState:
    """The state that all connections share.

    Args:
        manifest: manifest of the whole model.
        served: indices of the layer groups that are served here.
    """

    config: ProviderConfig
    manifest: Manifest
    served: range
    digest: str
    budget: ByteBudget
    register: Register
    slots: Slots
    quotas: QuotaGate
    usage: UsageCounters
    stages: Stages
    permits: Permits
    blocks: BlockStore
    links: Links
    started: float
    """Time of the start, by `time.monotonic()`."""
    executor_report: CachedReport = field(default_factory=CachedReport)
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def can_bill(self) -> bool:
        """False if usage could not be written for `max_unwritten_s`: requests are then refused, not served unbilled."""
        return self.usage.unwritten_s <= self.config.usage.max_unwritten_s
