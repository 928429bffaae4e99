"""Reads and answers the frames of one connection, until its client leaves or the provider stops.

A connection stays usable after a refused request: the payload is discarded, and a `Failure` answers the request. After
a broken frame the connection is closed, because the start of the next frame is unknown.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from provider import logs
from provider.gateway.credentials import Party
from provider.gateway.frames import Frames, refusal_of
from provider.gateway.slots import Slot
from provider.gateway.state import GatewayState
from provider.refusal import Refusal
from symbiosis_priv.errors import ProtocolError
from symbiosis_priv.network import wire
from symbiosis_priv.network.stream import FrameStream

log = logs.EventLog(__name__)

M = TypeVar("M")


class FrameLoop(ABC, Generic[M]):
    """Serves one authenticated connection, in its own thread.

    Args:
        decode: reads the message of a header; raises `ProtocolError`.
        party: the client of the connection's certificate.
        state: the state that all connections share.
        slot: the slot of the connection; records when the connection is idle.
        refusal: called for every frame; returns a refusal once the client's certificate is not accepted any more.
    """

    def __init__(
        self,
        stream: FrameStream,
        *,
        decode: Callable[[memoryview], M],
        party: Party,
        state: GatewayState,
        slot: Slot,
        refusal: Callable[[], Refusal | None],
    ) -> None:
        self._decode = decode
        self._party = party
        self._state = state
        self._limits = state.config.limits
        self._frames = Frames(stream, self._limits)
        self._slot = slot
        self._refusal = refusal

    @abstractmethod
    def _answer(self, message: M) -> None:
        """Answer a message. A raised `Refusal` is sent to the client."""

    @abstractmethod
    def _count_refusal(self, refusal: Refusal) -> None:
        """Bill or log a refused or broken frame, before the client is told."""

    def serve(self) -> None:
        """Answer frames until the client leaves or the provider stops.

        Raises:
            ProtocolError: a frame was broken; the client has received a `Failure`.
            OSError, TransportError: the connection was lost, or the client is too slow.
        """
        while not self._state.stopping.is_set() and self._next_frame():
            self._slot.end_request()

    def _next_frame(self) -> bool:
        if not self._frames.wait():
            return False
        self._slot.begin_request()
        try:
            message = self._decode(self._frames.read_header())
        except ProtocolError as error:
            self._count_refusal(refusal := refusal_of(error))
            self._frames.refuse(refusal)
            raise
        try:
            if refused := self._refusal():
                raise refused
            self._answer(message)
        except Refusal as refusal:
            self._count_refusal(refusal)
            self._frames.discard()
            self._frames.refuse(refusal)
            self._pause(size=self._frames.unread)
            return refusal.code != wire.ErrorCode.REVOKED
        return True

    def _pause(self, *, size: int) -> None:
        """Wait after an answer without a product if the client exceeds its rate of such requests, or of their bytes."""
        if seconds := self._state.quotas.pause(self._party, size=size):
            log.often("paused", tenant=str(self._party))
            self._state.stopping.wait(seconds)
