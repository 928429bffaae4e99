"""The client of one helper, which expands a seed to masks and computes their effects.

While there are spare helpers, a request is sent once with a short time limit, and a helper that has just failed gets no
request: the pad is drawn with other helpers. Without spares a request is repeated until its deadline.
"""

import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from torch import Tensor

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts, clip
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.errors import CertificateError, ConnectionLostError, ProviderError, TransportError
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.channel import Channel, fresh_nonce
from tenant.connections.executor_client import joined, row_limit
from tenant.core.pads import SessionSecret
from tenant.routing.known_provider import KnownProvider, State
from tenant.routing.routes import Routes
from tenant.worker import Promise

_CHANNELS: Final = 2
"""Number of connections for pads needed now, and again for pads drawn ahead: one for each thread that sends parts."""


class MaskRows(NamedTuple):
    """Rows of a helper's keystream for one layer group. `facts`: of the group, or of one expert's matrix if there are
    `counts`, the rows of every expert of a stack, which the helper sees."""

    group: GroupIndex
    direction: Direction
    facts: GroupFacts
    first_row: int
    rows: int
    counts: Counts | None


class HelperClient:
    """The client of one helper, with its seed, and connections for pads needed now and for pads drawn ahead."""

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

    def submit(self, wanted: MaskRows, *, ahead: bool) -> Promise[Tensor]:
        """Request the effect of mask rows. The result is unverified. `ahead`: True for a pad that is drawn ahead, False
        if a product waits for the pad."""
        with self._choosing:
            channel = min(self.channels[ahead * _CHANNELS :][:_CHANNELS], key=lambda channel: channel.worker.unfinished)
            return channel.worker.submit(self._effect, channel, wanted)

    def _effect(self, channel: Channel, wanted: MaskRows) -> Tensor:
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
            effects, step = [], row_limit(wanted.facts.widest, welcome)
            end = wanted.first_row + wanted.rows
            for first in range(wanted.first_row, end, step):
                rows = min(step, end - first)
                request = wire.Effect(
                    nonce=fresh_nonce(),
                    group=wanted.group,
                    direction=wanted.direction,
                    arithmetic="ring",
                    rows=rows,
                    counts=wanted.counts and clip(wanted.counts, first - wanted.first_row, rows),
                    ring_bits=self._ring_bits,
                    seed=self.seed,
                    first_row=first,
                )
                if retries:
                    effects.append(channel.request(request, None, outputs=outputs))
                else:
                    effects.append(channel.attempt(request, None, outputs=outputs, deadline=until))
        except (TransportError, ProviderError, CertificateError) as error:
            if not channel.closed.is_set():
                self._routes.failed(self.provider, error, waited_s=0.0 if retries else time.monotonic() - began)
            raise
        self._routes.answered(self.provider, seconds=time.monotonic() - started, size=size)
        return joined(effects)

    def close(self) -> None:
        """Close all connections, for good and without waiting."""
        for channel in self.channels:
            channel.close()
