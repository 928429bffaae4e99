"""A helper as a session sees it: it holds a seed, and is asked for the effects of what the seed expands to."""

from __future__ import annotations

from concurrent.futures import Future

from torch import Tensor

from symbiosis_priv import wire
from symbiosis_priv.keystream import SessionSecret
from tenant.channel import Channel


class Helper:
    """One helper: a seed of its own, and a connection each for waiting requests and for those made ahead."""

    def __init__(self, online: Channel, ahead: Channel, secret: SessionSecret) -> None:
        self.peer = online.peer
        self.seed = secret.seed_for(self.peer.name, self.peer.key_fingerprint)
        self.channels = (online, ahead)

    def submit(self, request: wire.Effect, *, outputs: int, ahead: bool) -> Future[Tensor]:
        """Ask for an effect; unverified."""
        return self.channels[ahead].submit(request, None, outputs=outputs)

    def close(self) -> None:
        """Close its connections, for good and without waiting."""
        for channel in self.channels:
            channel.close()
