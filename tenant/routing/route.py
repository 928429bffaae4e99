"""A provider in one role, with the session's knowledge of it."""

from dataclasses import dataclass

from symbiosis_priv.federation import Peer
from symbiosis_priv.limits import GroupIndex, Role
from symbiosis_priv.network import wire
from tenant.routing.health import USUAL, ProviderHealth, State, Tolerance


@dataclass(frozen=True, kw_only=True)
class ProviderFigures:
    """Figures of one provider in a session, for progress displays.

    Args:
        state: the provider's state, in a word or two.
        latency_s: smoothed latency of a small request; None before the first answer.
        verified, rejected: number of its answers that passed the check, and that failed it.
        bytes_sent, bytes_received: bytes of frames to and from the provider.
    """

    name: str
    role: Role
    operator: str
    address: str
    state: str
    requests: int
    latency_s: float | None
    verified: int
    rejected: int
    bytes_sent: int = 0
    bytes_received: int = 0


class Route:
    """A provider in one role, with the session's knowledge of it. `routes.Routes` guards the fields that change.

    Attributes:
        peer: the provider as the tenant pinned it.
        health: circuit breaker and cost.
        welcome: the layers and limits that the provider last stated; None if it has not answered yet.
        in_flight: number of requests that wait for an answer.
        requests, verified, rejected: as in `ProviderFigures`.
    """

    def __init__(self, peer: Peer, tolerance: Tolerance = USUAL) -> None:
        self.peer = peer
        self.health = ProviderHealth(tolerance)
        self.welcome: wire.Welcome | None = None
        self.in_flight = 0
        self.requests = self.verified = self.rejected = 0

    @property
    def is_open(self) -> bool:
        return self.health.state is State.UP or (self.health.state is State.TRIAL and not self.in_flight)

    @property
    def is_up(self) -> bool:
        """Returns True if the provider has answered, and has not failed since."""
        return self.welcome is not None and self.health.state is State.UP

    def serves(self, index: GroupIndex) -> bool:
        """Returns True if the provider has announced this layer group."""
        welcome = self.welcome
        return welcome is not None and welcome.first_group <= index < welcome.end_group

    def cost(self, size: int) -> float:
        """Expected seconds of an exchange of `size` bytes after the requests in flight; 0 without a measurement."""
        return (self.health.seconds_for(size) or 0.0) * (1 + self.in_flight)

    def figures(self, *, quarantined: bool) -> ProviderFigures:
        state = "no answer yet" if self.welcome is None else str(self.health.state)
        return ProviderFigures(
            name=self.peer.name,
            role=self.peer.role,
            operator=self.peer.operator,
            address=f"{self.peer.host}:{self.peer.port}",
            state="quarantined" if quarantined else state,
            requests=self.requests,
            latency_s=self.health.latency_s,
            verified=self.verified,
            rejected=self.rejected,
        )

    def __str__(self) -> str:
        return f"{self.peer.role} {self.peer.name!r}"
