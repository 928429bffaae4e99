"""An executor as a process sees it: connections for masked rows, and threads to use several of them for one product."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from symbiosis_priv.errors import ConnectionLostError
from symbiosis_priv.network import wire
from tenant.connections.channel import Channel, fresh_nonce
from tenant.connections.lanes import Lanes
from tenant.core.facts import GroupFacts
from tenant.core.parts import Part
from tenant.routing.health import State
from tenant.routing.route import Route
from tenant.worker import Worker

LANES: Final = 2
"""Connections for one product: on one something travels while the other's rows are multiplied."""
MOST_LANES: Final = 8
"""For products of several threads; a provider allows one tenant 64 by default."""
_REMEMBERED: Final = 1024  # widths times providers


class ExecutorClient:
    """One executor.

    Args:
        route: what the session knows about it.
        new_channel: makes a connection to it.
    """

    def __init__(self, route: Route, new_channel: Callable[[], Channel]) -> None:
        self.route = route
        self.lanes = Lanes(new_channel, most=MOST_LANES)
        self.workers = [Worker(f"lane-{route.peer.name}") for _ in range(LANES)]

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Its connections so far."""
        return self.lanes.channels

    def close(self) -> None:
        """Close its connections and stop its threads, for good and without waiting."""
        for worker in self.workers:
            worker.stop()
        self.lanes.close()

    def welcome(self, *, until: float, wanted: Callable[[], bool], refused_s: float) -> wire.Welcome:
        """What it serves, and its limits; connects if need be, and persists until its channel's deadline, or for as
        long as it is wanted; for `refused_s` seconds if the connection is refused."""
        with self.lanes.take(until=until) as channel:
            return channel.welcome(wanted=wanted, refused_s=refused_s)

    def ask(
        self,
        part: Part,
        facts: GroupFacts,
        *,
        patience_s: float,
        deadline: float,
        since: float,
        meanwhile: Callable[[], None],
    ) -> tuple[Tensor, float]:
        """Send masked rows once, in as many requests as its limits make of them.

        Args:
            part: the rows; they do not change meanwhile.
            facts: of their layer group.
            patience_s: how long it may take, once there is a connection that nobody else here uses.
            deadline: of all, and since: when it was first asked, by `time.monotonic`.
            meanwhile: called while an answer is under way.

        Returns:
            The answer, unverified; how many seconds it took once there was a connection.

        Raises:
            LanesInUseError: there was no such connection until the deadline; it has been asked for nothing.
            TransportError: it is away, busy, too slow, or serves the group no more.
            ProviderError: it has refused.
            ProtocolError: it breaks the protocol.
        """
        answers, before = [], self.route.health.state
        channel = self.lanes.acquire(until=deadline)
        try:
            if self.route.health.state is State.DOWN and before is not State.DOWN:
                raise ConnectionLostError(f"{self.route} was lost while its connections were in use")
            until = min(deadline, time.monotonic() + patience_s)
            welcome = self.route.welcome = channel.probe() or channel.connect(deadline=until, since=since)
            if not self.route.serves(part.index):
                raise ConnectionLostError(f"{self.route} does not serve {facts.entry.name} any more")
            started = time.monotonic()
            limit = row_limit(facts.widest, welcome)
            pieces = part.sent.split(limit) if part.count > limit else [part.sent]
            for request, rows in zip(self._requests(part, limit), pieces, strict=True):
                answers.append(
                    channel.attempt(
                        request, rows, outputs=part.outputs, deadline=until, since=since, meanwhile=meanwhile
                    )
                )
            return joined(answers), time.monotonic() - started
        finally:
            self.lanes.release(channel)

    def _requests(self, part: Part, limit: int) -> list[wire.Execute]:
        requests = part.requests.get((self, limit))
        if requests is None:
            requests = part.requests[self, limit] = [
                wire.Execute(
                    nonce=fresh_nonce(),
                    group=part.index,
                    direction=part.direction,
                    arithmetic="ring",
                    rows=min(limit, part.count - first),
                )
                for first in range(0, part.count, limit)
            ]
        return requests


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of several matrices as one; no copy if there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@functools.lru_cache(_REMEMBERED)  # every product asks it of everybody
def row_limit(widest: int, welcome: wire.Welcome) -> int:
    """Rows of one request that fit a provider's limits, both ways; of so many columns."""
    return max(1, min(welcome.max_rows, welcome.max_payload // wire.RING32.size(1, widest)))
