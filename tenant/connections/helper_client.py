"""The client of one helper, which expands a seed to masks and computes the effects of the masks.

While there are spare helpers, a request is sent once with a short time limit, and a helper that has just failed gets no
request: the pad is drawn with other helpers. Without spares a request is repeated until its deadline.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from torch import Tensor

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts, clip
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.errors import CertificateError, ConnectionLostError, ProviderError, TransportError
from symbiosis_priv.federation import Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.channel import Channel, Reply, fresh_nonce
from tenant.connections.executor_client import joined, row_limit
from tenant.core.pads import SessionSecret
from tenant.routing.known_provider import KnownProvider, State
from tenant.routing.routes import Routes
from tenant.worker import Promise

_CHANNELS: Final = 2
"""Number of connections for pads needed now, and again for pads drawn ahead: one for each thread that sends parts."""
_RELAY_S: Final = 30.0  # time limit of an order; the link between providers has a shorter one


@dataclass(frozen=True, kw_only=True)
class RelayInstruction:
    """The executor to which the helpers of a pad send their effects.

    Args:
        order: the order that each helper receives.
        max_bytes: bytes of blocks that the executor keeps for the tenant.
        until: the blocks are not used after this time, by `time.monotonic`.
        failed: called if a helper does not relay.
    """

    executor: Peer
    welcome: wire.Welcome
    order: wire.RelayOrder
    max_bytes: int
    until: float
    failed: Callable[[], None]


class MaskRows(NamedTuple):
    """Rows of a helper's keystream for one layer group. `facts`: facts of the layer group, or of one expert's matrix if
    there are counts. `counts`: rows of every expert of a stack. The helper sees them."""

    group: GroupIndex
    direction: Direction
    facts: GroupFacts
    first_row: int
    rows: int
    counts: Counts | None

    def part(self, first_row: int, rows: int) -> Self:
        """Return some of these rows."""
        counts = None if self.counts is None else clip(self.counts, first_row - self.first_row, rows)
        return self._replace(first_row=first_row, rows=rows, counts=counts)


class HelperClient:
    """The client of one helper, with the seed of that helper, and connections for pads needed now and for pads drawn
    ahead."""

    def __init__(
        self,
        provider: KnownProvider,
        routes: Routes,
        new_channel: Callable[[], Channel],
        secret: SessionSecret,
        *,
        ring_bits: wire.RingBits = 32,
    ) -> None:
        self._ring_bits = ring_bits
        self.provider = provider
        self.peer = provider.peer
        self.seed = secret.seed_for(self.peer.name, self.peer.key_fingerprint)
        self.channels = tuple(new_channel() for _ in range(2 * _CHANNELS))
        self._routes = routes
        self._choosing = threading.Lock()

    def relay(self, target: RelayInstruction, wanted: MaskRows) -> wire.Effect | None:
        """Return the request to relay effects, for `submit`. None if the helper does not relay, the effect needs more
        than one block, or the executor would refuse the block."""
        welcome = self.provider.welcome
        if welcome is None:
            return None
        if wanted.rows > min(row_limit(wanted.facts.widest, limits) for limits in (welcome, target.welcome)):
            return None
        size = wire.encoding_of("ring", self._ring_bits).size(wanted.rows, wanted.facts.outputs(wanted.direction))
        if size > target.max_bytes:
            return None
        return self._request(wanted, relay=target.order)

    def submit(
        self,
        wanted: MaskRows,
        *,
        ahead: bool,
        relay: wire.Effect | None = None,
        target: RelayInstruction | None = None,
    ) -> Promise[Tensor | None]:
        """Request the effect of mask rows. The result is unverified; None if it was relayed.

        Args:
            ahead: True for a pad that is drawn ahead, False if a product waits for the pad.
            relay: the request to send first, for the same rows. If it fails, the target is told, and the
                effect is requested without relay.
            target: the executor that receives the block.
        """
        with self._choosing:
            channel = min(self.channels[ahead * _CHANNELS :][:_CHANNELS], key=lambda channel: channel.worker.unfinished)
            return channel.worker.submit(self._effect, channel, wanted, relay, target)

    def fetch(self, wanted: MaskRows, first_row: int, rows: int) -> Promise[Tensor | None]:
        """Request the effect of some of the rows now, without relay."""
        return self.submit(wanted.part(first_row, rows), ahead=False)

    def _effect(
        self, channel: Channel, wanted: MaskRows, relay: wire.Effect | None, target: RelayInstruction | None
    ) -> Tensor | None:
        retries = not self._routes.can_replace(wanted.group, [self.peer])
        outputs = wanted.facts.outputs(wanted.direction)
        size = wire.RING32.size(wanted.rows, outputs)
        if not retries and self.provider.health.state is State.DOWN:
            raise ConnectionLostError(f"{self.provider} is away; other helpers make the pads")
        began = time.monotonic()
        until = began + self._routes.patience_with_helpers_s(wanted.group, [self.peer], size)
        try:
            welcome = channel.welcome() if retries else channel.connect(deadline=until)
            self._routes.connected(self.provider, welcome)
            started = time.monotonic()
            reply: Reply | None = None
            if relay is not None:
                with suppress(TransportError, ProviderError):
                    deadline = min(until, started + _RELAY_S)
                    reply = channel.attempt(relay, None, outputs=outputs, deadline=deadline)
                if target and (reply is None or not reply.relayed):
                    target.failed()
            effect: Tensor | None
            if reply is None:
                effects, step = [], row_limit(wanted.facts.widest, welcome)
                end = wanted.first_row + wanted.rows
                for first in range(wanted.first_row, end, step):
                    request = self._request(wanted.part(first, min(step, end - first)))
                    if retries:
                        effects.append(channel.request(request, None, outputs=outputs))
                    else:
                        effects.append(channel.attempt(request, None, outputs=outputs, deadline=until).words)
                effect = joined(effects)
            else:
                effect = None if reply.relayed else reply.words
        except (TransportError, ProviderError, CertificateError) as error:
            if not channel.closed.is_set():
                self._routes.failed(self.provider, error, waited_s=0.0 if retries else time.monotonic() - began)
            raise
        self._routes.answered(self.provider, seconds=time.monotonic() - started, size=size)
        return effect

    def _request(self, wanted: MaskRows, *, relay: wire.RelayOrder | None = None) -> wire.Effect:
        return wire.Effect(
            nonce=fresh_nonce(),
            group=wanted.group,
            direction=wanted.direction,
            arithmetic="ring",
            rows=wanted.rows,
            counts=wanted.counts,
            ring_bits=self._ring_bits,
            seed=self.seed,
            first_row=wanted.first_row,
            relay=relay,
        )

    def close(self) -> None:
        """Close all connections, for good and without waiting."""
        for channel in self.channels:
            channel.close()
