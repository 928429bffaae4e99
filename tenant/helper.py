"""A helper as a session sees it: it holds a seed, and is asked for the effects of what the seed expands to."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from torch import Tensor

from symbiosis_priv import wire
from symbiosis_priv.keystream import SessionSecret
from tenant.channel import Channel
from tenant.worker import Worker


class Helper:
    """One helper: a seed of its own, and a connection each for waiting requests and for those made ahead.

    Args:
        gate: no request leaves while it is held.
    """

    def __init__(self, online: Channel, ahead: Channel, secret: SessionSecret, *, gate: threading.Lock) -> None:
        self.peer = online.peer
        self.seed = secret.seed_for(self.peer.name, self.peer.key_fingerprint)
        self.channels = (online, ahead)
        self._gate = gate
        self.workers = [Worker(f"effects-{self.peer.name}") for _ in self.channels]

    def submit(self, request: wire.Effect, *, outputs: int, ahead: bool) -> Future[Tensor]:
        """Ask for an effect; unverified."""
        return self.workers[ahead].submit(self._ask, self.channels[ahead], request, outputs)

    def _ask(self, channel: Channel, request: wire.Effect, outputs: int) -> Tensor:
        with self._gate:  # held for as long as it takes to find out who lied
            pass
        return channel.request(request, None, outputs=outputs)

    def drop_orders(self) -> None:
        """Send nothing more of what was ordered ahead."""
        self.channels[True].close()
