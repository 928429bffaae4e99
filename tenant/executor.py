"""An executor as a session sees it: connections for masked rows, and threads to use several of them for one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from symbiosis_priv.federation import Peer
from tenant.channel import Channel
from tenant.lanes import Lanes
from tenant.worker import Worker

LANES: Final = 2
"""Connections for one product: on one something travels while the other's rows are multiplied."""
_MOST_LANES = 8  # for products of several threads; a provider allows one tenant 64 by default


class Executor:
    """One executor.

    Args:
        peer: as the tenant pinned it.
        new_channel: makes a connection to it.
    """

    def __init__(self, peer: Peer, new_channel: Callable[[], Channel]) -> None:
        self.peer = peer
        self.lanes = Lanes(new_channel, most=_MOST_LANES)
        self.workers = [Worker(f"lane-{peer.name}") for _ in range(LANES - 1)]

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Its connections so far."""
        return self.lanes.channels
