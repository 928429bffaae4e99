"""Serves one connection of a tenant: reads a frame, checks it, asks the executor, and sends the answer.

The gateway checks every claim in a frame, in this order: the prefix against the limits; the header against the schema;
the request against role, model, shapes and limits; the announced payload size against the header. Only then does the
request take bytes from the budget, and only then does the gateway allocate memory.

A request of few rows that is like an earlier one needs no parsing and no second check of its header (`repeated`): if
nothing is unusual and the executor is idle, the thread of the connection answers it at once.

The connection stays usable after a refused request: the gateway discards its payload and answers with a `Failure`. The
gateway closes the connection after a broken frame, because the start of the next frame is unknown.

What needs no product is paid for with a rate that every tenant has (`QuotaGate.pause`): refusals, the bytes of their
payloads while they are read, and TLS records that carry almost nothing. A new connection waits for the tenant's debt.
"""

import math
import time
from collections.abc import Callable

import numpy as np

from provider import logs
from provider.executor.client import ExecutorRequester
from provider.executor.queues import NOTHING, ProductRequest
from provider.gateway import admission
from provider.gateway.admission import Sizes, Slot, admitted, refuse_bad
from provider.gateway.frames import Frames, GatewayState
from provider.gateway.repeated import Repeated, parts_of
from provider.gateway.usage import UsageCounts
from provider.refusal import Refusal
from symbiosis_priv.errors import ConnectionLostError, FrameTooLargeError, ProtocolError
from symbiosis_priv.network import wire
from symbiosis_priv.network.hybrid import Sealing, answer_offer
from symbiosis_priv.network.stream import FrameStream
from symbiosis_priv.network.tls import TenantIdentity

log = logs.EventLog(__name__)

IDLE_TIMEOUT_S = 900.0
"""Time between two frames."""
REQUEST_TIMEOUT_S = 120.0
"""Time for the executor to answer, and to wait for a share of the bytes."""
_SCRAP_BYTES = 1 << 16  # a record with almost no bytes takes as much time as this many bytes
_FREE_SCRAPS = 8  # such records of one frame that cost nothing
_KINDS = 256  # kinds of repeated requests that a connection keeps
_MOST_SPACE = 1 << 17  # memory of a connection for answers of repeated requests


class Connection:
    """Serves one tenant's connection, in its own thread. `slot` records when the connection is idle. `refusal` is
    called for every frame, and returns a refusal once the tenant's certificate is not accepted any more."""

    def __init__(
        self,
        stream: FrameStream,
        *,
        tenant: TenantIdentity,
        state: GatewayState,
        executor: ExecutorRequester,
        slot: Slot,
        refusal: Callable[[], Refusal | None],
    ) -> None:
        self._tenant, self._state, self._limits, self._executor = tenant, state, state.config.limits, executor
        self._stream, self._frames = stream, Frames(stream, self._limits)
        # a record that carries almost nothing takes the time of many bytes
        stream.on_scraps = lambda count: self._pause(count * _SCRAP_BYTES)
        self._slot, self._refusal = slot, refusal
        self._role: wire.Role | None = None
        self._sealing: Sealing | None = None  # of a helper's connection
        self._repeated: dict[bytes, Repeated] = {}  # of answered requests, by their headers
        self._quotas = state.quotas.of  # in force when these were learned
        self._space = NOTHING  # memory for the answers of repeated requests
        self._space_begin = 0  # its address

    def serve(self) -> None:
        """Answer frames until the tenant leaves or the provider stops. Raises `ProtocolError`: a frame was broken; the
        tenant has received a `Failure`; `OSError`, `TransportError`: the connection was lost, or the tenant is too
        slow."""
        try:
            self._state.stopping.wait(self._state.quotas.debt(self._tenant))
            while not self._state.stopping.is_set() and self._next_frame():
                self._slot.idle_since = time.monotonic()
        finally:
            if self._role is not None:
                self._state.register.drop_role(self._tenant, self._role)

    def _next_frame(self) -> bool:
        self._stream.free_scraps = _FREE_SCRAPS
        if not self._stream.begin(deadline=time.monotonic() + IDLE_TIMEOUT_S):
            return False
        self._slot.idle_since = math.inf
        if self._answer_at_once():
            self._stream.few_rows = True
            return True
        try:
            request = wire.decode_request(self._frames.read_header())
        except ProtocolError as error:
            too_large = isinstance(error, FrameTooLargeError)
            refusal = Refusal(wire.ErrorCode.TOO_LARGE if too_large else wire.ErrorCode.BAD_FRAME, str(error))
            self._bill_refusal()
            self._frames.refuse(refusal)
            raise
        try:
            if refused := self._refusal():
                raise refused
            self._answer(request)
        except Refusal as refusal:
            kept = self._frames.received  # bytes that were read before the refusal
            try:
                self._frames.discard(self._pause)
            finally:
                self._bill_refusal()
            self._frames.refuse(refusal)
            self._pause(kept)
            return refusal.code != wire.ErrorCode.REVOKED
        return True

    def _pause(self, size: int) -> None:
        """Charge an answer without a product, or bytes that are dropped. Waits if the tenant exceeds its rate."""
        if seconds := self._state.quotas.pause(self._tenant, size=size):
            log.often("paused", tenant=str(self._tenant))
            self._state.stopping.wait(seconds)

    def _bill_refusal(self) -> None:
        """Bill a refused or broken frame, and the bytes that have arrived, before the tenant is told."""
        self._bill(UsageCounts(refused=1, bytes_received=self._frames.received))

    def _read_payload(self, encoding: wire.Encoding) -> memoryview:
        """Read the rows of a request, in 32 bits or as they are on the wire."""
        unread = self._frames.unread
        if unread and encoding is wire.RING24:
            rows = np.empty(unread // 3, dtype=np.int32)
            self._frames.read(wire.RING24.payload_space(rows))
            wire.RING24.unpack_in_place(rows)
            return wire.RING32.pack(rows)
        payload = np.empty(unread, dtype=np.uint8).data  # not cleared, as a bytearray would be
        self._frames.read(payload)
        return payload

    # Requests

    def _answer_at_once(self) -> bool:
        """Answer a repeated request of few rows, if the executor is idle, the tenant does not train, and nothing limits
        or refuses the request."""
        stream, state = self._stream, self._state
        if state.quotas.of is not self._quotas:  # the scheduler's weight for the tenant may have changed
            self._quotas = state.quotas.of
            self._repeated.clear()
        if (parts := parts_of(stream.arrived)) is None or (repeated := self._repeated.get(parts[0])) is None:
            return False
        if len(stream.arrived) < repeated.size and not self._gather(repeated):
            return False
        arrival = time.monotonic()
        if (
            self._refusal()
            or not self._executor.handle.present
            or not state.usage.can_bill
            or not state.quotas.limits_nothing(self._tenant)
            or state.stages.of(self._tenant, repeated.like, arrival) != "inference"
        ):
            return False
        payload = stream.arrived_end - len(stream.arrived) + repeated.head
        if not repeated.product.multiply(arrival, payload, self._space_begin):
            return False
        stream.arrived = stream.arrived[repeated.size :]
        counts = repeated.counts
        self._bill(counts)
        head, answer = repeated.before + parts[1] + repeated.after, self._space[: counts.bytes_sent]
        try:
            stream.send_frame(head, answer, deadline=arrival + self._limits.frame_timeout_s)
        except TimeoutError:
            self._bill(UsageCounts(slow=1))
            raise
        repeated.product.after()
        return True

    def _gather(self, repeated: Repeated) -> bool:
        """Wait for the rest of the rows. Returns False if they are many bytes, or if the connection is lost: the usual
        way then notices it too, and counts it."""
        try:
            return self._stream.gather(repeated.size, deadline=time.monotonic() + self._limits.frame_timeout_s)
        except TimeoutError:
            self._bill(UsageCounts(slow=1, bytes_received=len(self._stream.arrived) - repeated.head))
            raise
        except (OSError, ConnectionLostError):
            return False

    def _answer(self, request: wire.Request) -> None:
        if isinstance(request, wire.Execute | wire.Effect):
            sizes = self._check(request)
            if isinstance(request, wire.Effect):
                request = self._opened(request)
            self._answer_product(request, sizes)
            return
        self._frames.expect_payload(0)
        match request:
            case wire.Hello():
                self._answer_hello(request)
            case wire.KeyShare():
                self._answer_key_share(request)
            case wire.FetchHealth():
                self._answer_health()

    def _answer_product(self, request: wire.Execute | wire.Effect, sizes: Sizes) -> None:
        begun = time.perf_counter()
        if not self._state.usage.can_bill:
            raise Refusal(wire.ErrorCode.BUSY, "this provider cannot write its usage database; ask again later")
        if not request.rows:  # needs no executor, and has a limited rate
            limit = self._state.quotas.admit(self._tenant, rows=0, work=0)
            self._bill(UsageCounts(requests=1))
            self._frames.send(wire.encode(wire.Result.answering(request, limit=limit)))
            self._pause(0)
            return
        limit = self._state.quotas.admit(self._tenant, rows=request.rows, work=sizes.cost)
        with self._state.budget.taken(self._tenant, sizes.memory, timeout=REQUEST_TIMEOUT_S):
            try:
                # a GPU unpacks and packs three bytes itself
                narrow = sizes.encoding is wire.RING24 and sizes.received > 0 and self._executor.handle.narrow
                encoding = wire.BYTES24 if narrow else sizes.encoding
                # the deadlines start now: the tenant did not cause the wait for bytes; no name here keeps the rows
                work = self._multiply(request, self._read_payload(encoding), sizes, limit=limit, narrow=narrow)
                if work is not None:
                    self._learn(work, sizes)
            except TimeoutError:
                # rows that have arrived as a whole are in the bill already: the tenant does not read the answer
                received = self._frames.received if self._frames.unread else 0
                self._bill(UsageCounts(slow=1, bytes_received=received))
                raise
            except (OSError, ConnectionLostError):
                if self._frames.unread and not self._state.stopping.is_set():  # the tenant left while it sent its rows
                    self._bill(UsageCounts(abandoned=1, bytes_received=self._frames.received))
                raise
        if log.detailed:
            asked = {"group": request.group, "direction": request.direction, "rows": request.rows}
            log.debug("request", tenant=str(self._tenant), ms=round(1000 * (time.perf_counter() - begun), 3), **asked)

    def _learn(self, work: ProductRequest, sizes: Sizes) -> None:
        """Keep what an answered request has shown, if requests with an equal header may follow, need no memory beyond
        that of the connection, and have no line each in the log."""
        request = work.request
        if log.detailed or not isinstance(request, wire.Execute) or request.counts is not None:
            return
        if sizes.memory > self._limits.small_request or sizes.sent > _MOST_SPACE:
            return
        if (product := self._executor.repeat(work)) is None:
            return
        counts = UsageCounts(1, request.rows, sizes.cost, sizes.received, sizes.sent)
        if (learned := Repeated.of(request, counts, product)) is None:
            return
        if len(self._repeated) == _KINDS:
            self._repeated.clear()
        self._repeated.update([learned])
        if sizes.sent > len(self._space):
            space = np.empty(sizes.sent, dtype=np.uint8)
            self._space, self._space_begin = space.data, space.ctypes.data

    def _multiply(
        self,
        request: wire.Execute | wire.Effect,
        payload: memoryview,
        sizes: Sizes,
        *,
        limit: wire.QuotaLimit | None,
        narrow: bool,
    ) -> ProductRequest | None:
        """Let the executor compute a product, and send it. Returns the request to the executor if it was answered. The
        answer names the quota `limit` that the request had to wait for."""
        now = time.monotonic()
        work = ProductRequest(
            tenant=self._tenant,
            stage=self._state.stages.of(self._tenant, request, now),
            weight=self._state.quotas.of(self._tenant).weight or 1.0,
            arrival=now,
            deadline=now + REQUEST_TIMEOUT_S,
            request=request,
            narrow=narrow,
        )
        if work.stage == "fine_tuning" and self._left():  # a small product takes no longer than this check
            self._bill(UsageCounts(abandoned=1, bytes_received=sizes.received))
            raise ConnectionLostError("the tenant left before the product was started")
        self._executor.send(work, payload)
        del payload  # so that its memory is free when the answer is made
        try:
            answer = self._executor.receive(deadline=work.deadline, tenant_left=self._left)
        except Refusal as refusal:
            self._bill(UsageCounts(failed=1, bytes_received=sizes.received))
            self._frames.refuse(refusal)
            rows = self._executor.settle()  # the executor may still hold the payload: keep its bytes
            self._bill(UsageCounts(rows=rows, work=sizes.cost * rows // request.rows))
            return None
        if not answer.failure:
            product, after = answer.payload, answer.after
            del answer  # what is sent may be a copy
            if request.ring_bits == wire.RING24.item_bits and not narrow:
                product = wire.RING24.pack(np.frombuffer(product, dtype="<i4"))
            if self._sealing is not None:
                product = self._sealing.cover(request.nonce, product)
            self._bill(UsageCounts(1, request.rows, sizes.cost, sizes.received, len(product)))
            result = wire.Result.answering(request, limit=limit)
            self._frames.send(wire.encode(result, payload_bytes=len(product)), product)
            after()
            return work
        # rows that were multiplied before the request was late, failed or cancelled are billed
        cost, left = sizes.cost * answer.rows // request.rows, self._left()
        self._bill(UsageCounts(0, answer.rows, cost, sizes.received, abandoned=int(left), failed=int(not left)))
        self._frames.send(answer.failure)
        return None

    def _bill(self, counts: UsageCounts) -> None:
        self._state.usage.count(self._tenant, self._role or "none", counts)

    def _left(self) -> bool:
        """True if the tenant has left. False during a stop, which shuts the socket but answers requests in flight."""
        return not self._state.stopping.is_set() and self._stream.peer_left()

    def _check(self, request: wire.Execute | wire.Effect) -> Sizes:
        wanted = "executor" if isinstance(request, wire.Execute) else "helper"
        if self._role is None:
            refuse_bad("say hello first")
        if self._role != wanted:
            raise Refusal(wire.ErrorCode.ROLE_REFUSED, f"this connection is served in the role {self._role!r}")
        sizes = admitted(request, self._state.config, self._state.manifest, self._state.served)
        self._frames.expect_payload(sizes.received)
        self._executor.require_present()
        return sizes

    def _answer_hello(self, hello: wire.Hello) -> None:
        if self._role is not None:
            refuse_bad("this connection has already sent its hello")
        if hello.role == "helper" and hello.version < wire.HYBRID_VERSION:
            refuse_bad(
                f"helpers take seeds under X25519 and ML-KEM-768 only, which is version {wire.HYBRID_VERSION}, not "
                f"{hello.version}; upgrade the tenant"
            )
        if hello.version not in wire.VERSIONS:
            spoken = " and ".join(map(str, wire.VERSIONS))
            refuse_bad(f"this provider speaks versions {spoken}, not {hello.version}; upgrade the older side")
        if hello.role not in self._state.config.roles:
            raise Refusal(wire.ErrorCode.ROLE_REFUSED, f"this provider does not serve as {hello.role}")
        if hello.model_digest != self._state.digest:
            raise Refusal(wire.ErrorCode.WRONG_MODEL, f"this provider serves {self._state.digest}")
        self._executor.require_present()  # a tenant that is welcomed expects answers
        self._state.register.take_role(self._tenant, hello.role)
        self._role = hello.role
        welcome = wire.Welcome(
            version=hello.version,
            model_digest=self._state.digest,
            first_group=self._state.served.start,
            end_group=self._state.served.stop,
            max_rows=admission.MAX_REQUEST_ROWS,
            max_payload=self._frames.max_payload,
        )
        self._frames.send(wire.encode(welcome))

    def _answer_key_share(self, share: wire.KeyShare) -> None:
        if self._role != "helper" or self._sealing is not None:
            refuse_bad("keys are agreed on once, after the hello to a helper")
        try:
            answer, self._sealing = answer_offer(share, self._stream.tls)
        except ProtocolError as error:
            refuse_bad(str(error))
        self._frames.send(wire.encode(answer))

    def _opened(self, request: wire.Effect) -> wire.Effect:
        if self._sealing is None:
            refuse_bad("send the keys for seeds first")
        try:
            return self._sealing.opened(request)
        except ProtocolError as error:
            refuse_bad(str(error))

    def _answer_health(self) -> None:
        self._executor.require_present()
        executor = self._executor.handle.recent_report()
        report = wire.HealthReport(
            name=self._state.config.name,
            model_digest=self._state.digest,
            time=time.time(),
            uptime_s=time.monotonic() - self._state.started,
            groups=len(self._state.served),
            groups_loaded=executor.groups_loaded,
            requests=self._state.usage.requests(self._tenant),
            connections=self._state.slots.count(self._tenant),
        )
        self._frames.send(wire.encode(report))
        self._pause(0)
