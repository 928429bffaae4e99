"""The frames of one connection, read and sent within limits and deadlines, and the state that all connections share."""

import threading
import time
from collections.abc import Callable, Iterator

from provider.config.schema import MIB, SLOWEST_BYTES_PER_S, Limits, ProviderConfig
from provider.executor.queues import NOTHING, Stages
from provider.gateway.admission import ByteBudget, Register, Slots
from provider.gateway.quota import QuotaGate
from provider.gateway.usage import UsageCounters
from provider.refusal import Refusal
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.network import wire
from symbiosis_priv.network.stream import FrameStream

_DETAIL = 200  # characters of a failure's detail
_PACED_BYTES = 1 << 20  # the rate of a large payload is checked after each part of this size
_FIRST_BYTES_S = 3.0  # the minimum rate applies after this time


class GatewayState:
    """The state that all connections share. The manifest is that of the whole model, of which the layer groups `served`
    are served here."""

    def __init__(self, config: ProviderConfig, manifest: Manifest, served: range, usage: UsageCounters) -> None:
        self.config, self.manifest, self.served, self.usage = config, manifest, served, usage
        self.digest = manifest.digest
        self.budget, self.slots = ByteBudget(config.limits), Slots(config.limits)
        self.register, self.quotas = Register(), QuotaGate(config.quota_of)
        self.stages = Stages()
        self.started = time.monotonic()
        self.stopping = threading.Event()


class Frames:
    """The frames of one connection, for one thread: `read_header`, then `read` or `discard` of the payload.
    Methods raise TimeoutError if the client is too slow, and ConnectionLostError or OSError if it has left."""

    def __init__(self, stream: FrameStream, limits: Limits) -> None:
        self._stream = stream
        self._limits = limits
        self._small = limits.small_request
        self._deadline = 0.0  # for the rest of the current frame
        self.max_payload = limits.max_payload_mib * MIB
        self.unread = 0  # payload bytes of the current frame; 0 once they were read
        self._head_end = 0

    @property
    def received(self) -> int:
        """Payload bytes of the current frame that have arrived."""
        return self._stream.consumed - self._head_end

    def read_header(self) -> memoryview:
        """Read the prefix and the header, which is valid until more is read. Raises `ProtocolError`: the prefix is not
        one of a frame, or exceeds the limits."""
        self._deadline = time.monotonic() + self._limits.frame_timeout_s
        header, self.unread = self._stream.receive_head(max_payload=self.max_payload, deadline=self._deadline)
        self._head_end = self._stream.consumed
        return header

    def read(self, payload: memoryview) -> None:
        """Fill memory with the whole payload."""
        if len(payload) <= self._small:
            self._stream.receive(payload, deadline=time.monotonic() + self._limits.frame_timeout_s)
        else:
            for part, deadline in self._paced(payload):
                self._stream.receive(part, deadline=deadline)
        self.unread = 0

    def discard(self, pay: Callable[[int], None]) -> None:
        """Read and drop the payload. `pay` is called with the bytes of each part before the part is read."""
        for start in range(0, self.unread, _PACED_BYTES):
            size = min(_PACED_BYTES, self.unread - start)
            pay(size)
            self._stream.discard(size, deadline=self._deadline)
        self.unread = 0

    def expect_payload(self, size: int) -> None:
        """Raises `Refusal` unless the payload has `size` bytes."""
        if self.unread != size:
            raise Refusal(wire.ErrorCode.BAD_REQUEST, f"payload of {self.unread} bytes where {size} belong")

    def send(self, head: bytes, payload: memoryview = NOTHING) -> None:
        if len(payload) <= self._small:
            self._stream.send_frame(head, payload, deadline=time.monotonic() + self._limits.frame_timeout_s)
            return
        for part, deadline in self._paced(payload):
            self._stream.send_frame(head, part, deadline=deadline)
            head = b""

    def refuse(self, refusal: Refusal) -> None:
        refuse(self._stream, refusal, timeout=self._limits.frame_timeout_s)

    def _paced(self, payload: memoryview) -> Iterator[tuple[memoryview, float]]:
        """Yield the parts of a large payload with their deadlines. A large payload holds bytes that other tenants wait
        for, so it has a minimum rate. A small payload has `frame_timeout_s` in total."""
        begun = time.monotonic()
        last = begun + self._limits.frame_timeout_s
        rate = SLOWEST_BYTES_PER_S
        for start in range(0, len(payload), _PACED_BYTES):
            stop = start + _PACED_BYTES
            yield payload[start:stop], min(last, begun + _FIRST_BYTES_S + stop / rate)


def refuse(stream: FrameStream, refusal: Refusal, *, timeout: float) -> None:
    """Send the reason of a refusal on a connection."""
    failure = wire.Failure(code=refusal.code, detail=refusal.detail[:_DETAIL], limit=refusal.limit)
    stream.send_frame(wire.encode(failure), NOTHING, deadline=time.monotonic() + timeout)
