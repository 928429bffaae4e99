"""One tenant's connection: frames in, checks, one question to the executor, frames out.

Everything that a tenant's bytes can claim is checked here, in this order: prefix against the limits, header
against the schema, request against role, model, shapes and limits, and the announced payload against what the
header implies. Only then are bytes taken from the budget, and only then is memory.

A request that is refused leaves the connection usable: its payload is read past and a `Failure` is the reply. A
broken frame does not: nobody knows where the next one would begin.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from provider import logs
from provider.config.schema import MIB, ProviderConfig
from provider.executor.client import CachedReport, ExecutorClient
from provider.executor.envelope import ProductRequest, Stages, row_cost
from provider.gateway.admission import ByteBudget, Register
from provider.gateway.link import Link
from provider.gateway.quota import QuotaGate
from provider.gateway.slots import Slot, Slots
from provider.gateway.usage import Counts, Usage
from provider.refusal import Refusal
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.errors import ConnectionLostError, FrameTooLargeError, ProtocolError
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity

log = logs.EventLog(__name__)

_NOTHING = memoryview(b"")
_DETAIL = 200  # characters of a failure's detail
_PACED_BYTES = 1 << 20  # a large payload's rate is looked at so often
_FIRST_BYTES_S = 3.0  # before the minimum rate counts


@dataclass(frozen=True)
class Service:
    """What all connections share.

    Args:
        manifest: of the whole model.
        served: the layer groups of it that are served here.
    """

    config: ProviderConfig
    manifest: Manifest
    served: range
    digest: str
    budget: ByteBudget
    register: Register
    slots: Slots
    quotas: QuotaGate
    usage: Usage
    stages: Stages
    started: float
    """`time.monotonic()`"""
    executor_report: CachedReport = field(default_factory=CachedReport)
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def counts(self) -> bool:
        """Whether usage is written, or has not been for a while only: nobody is served for ever without a bill."""
        return self.usage.unwritten_s <= self.config.usage.max_unwritten_s


class Connection:
    """Serves one authenticated connection, in its own thread.

    Args:
        link: the connection.
        tenant: whose it is, from the certificate.
        service: what all connections share.
        executor: this thread's line to the executor.
        slot: the connection's; is told when the connection is idle.
        refusal: why the tenant's certificate is not accepted any more; None while it is. Asked at every request.
    """

    def __init__(
        self,
        link: Link,
        *,
        tenant: TenantIdentity,
        service: Service,
        executor: ExecutorClient,
        slot: Slot,
        refusal: Callable[[], Refusal | None],
    ) -> None:
        self._link = link
        self._tenant = tenant
        self._service = service
        self._limits = service.config.limits
        self._max_payload = self._limits.max_payload_mib * MIB
        self._small = self._limits.small_request
        self._executor = executor
        self._slot = slot
        self._refusal = refusal
        self._role: wire.Role | None = None
        self._prefix = memoryview(bytearray(wire.PREFIX.size))
        self._unread = 0  # payload bytes of the present frame that are still to come
        self._deadline = 0.0  # for the rest of the present frame

    def serve(self) -> None:
        """Answer frames until the tenant leaves, or the provider stops.

        Raises:
            ProtocolError: a frame was broken; the tenant has been told.
            OSError, TransportError: the peer is gone, or too slow.
        """
        try:
            while not self._service.stopping.is_set() and self._next_frame():
                self._slot.end_request()
        finally:
            if self._role is not None:
                self._service.register.drop_role(self._tenant, self._role)

    # Frames

    def _next_frame(self) -> bool:
        begun = self._link.begin(self._prefix, timeout=self._limits.idle_timeout_s)
        if not begun:
            return False
        self._slot.begin_request()
        self._deadline = time.monotonic() + self._limits.frame_timeout_s
        try:
            header = self._read_header(begun)
            request = wire.decode_request(memoryview(header))
        except ProtocolError as error:
            too_large = isinstance(error, FrameTooLargeError)
            code = wire.ErrorCode.TOO_LARGE if too_large else wire.ErrorCode.BAD_FRAME
            self._bill(Counts(refused=1))
            self._refuse(Refusal(code, str(error)))
            raise
        try:
            if refused := self._refusal():
                raise refused
            self._answer(request)
        except Refusal as refusal:
            self._bill(Counts(refused=1))
            self._link.discard(self._unread, deadline=self._deadline)
            self._refuse(refusal)
            self._pause(size=self._unread)
            return refusal.code != wire.ErrorCode.REVOKED
        return True

    def _pause(self, *, size: int) -> None:
        """After what is no product, and the bytes that came with it: who asks for little else is not listened to all
        the time.
        """
        if seconds := self._service.quotas.pause(self._tenant, size=size):
            log.often("paused", tenant=str(self._tenant))
            self._service.stopping.wait(seconds)

    def _read_header(self, begun: int) -> bytearray:
        self._link.receive(self._prefix[begun:], deadline=self._deadline)
        length, self._unread = wire.decode_prefix(self._prefix, max_payload=self._max_payload)
        header = bytearray(length)
        self._link.receive(memoryview(header), deadline=self._deadline)
        return header

    def _read_payload(self) -> memoryview:
        payload = np.empty(self._unread, dtype=np.uint8).data  # not cleared, as a bytearray would be
        if len(payload) <= self._small:
            self._link.receive(payload, deadline=time.monotonic() + self._limits.frame_timeout_s)
        else:
            for part, deadline in self._paced(payload):
                self._link.receive(part, deadline=deadline)
        self._unread = 0
        return payload

    def _send(self, head: bytes, payload: memoryview = _NOTHING) -> None:
        if len(payload) <= self._small:
            self._link.send(head, payload, deadline=time.monotonic() + self._limits.frame_timeout_s)
            return
        for part, deadline in self._paced(payload):
            self._link.send(head, part, deadline=deadline)
            head = b""

    def _paced(self, payload: memoryview) -> Iterator[tuple[memoryview, float]]:
        """Parts of a large payload, and when each must be over: what holds bytes that others could have comes and goes
        at a minimum rate. A small one has the frame's time for all of it.
        """
        begun = time.monotonic()
        last = begun + self._limits.frame_timeout_s
        rate = self._limits.min_transfer_mib_per_s * MIB
        for start in range(0, len(payload), _PACED_BYTES):
            stop = start + _PACED_BYTES
            yield payload[start:stop], min(last, begun + _FIRST_BYTES_S + stop / rate)

    def _refuse(self, refusal: Refusal) -> None:
        refuse(self._link, refusal, timeout=self._limits.frame_timeout_s)

    # Requests

    def _answer(self, request: wire.Request) -> None:
        match request:
            case wire.Execute() | wire.Effect():
                self._answer_product(request)
            case wire.Hello():
                self._expect_payload(0)
                self._answer_hello(request)
            case wire.Health():
                self._expect_payload(0)
                self._answer_health()
                self._pause(size=0)

    def _answer_product(self, request: wire.Execute | wire.Effect) -> None:
        begun = time.perf_counter()
        size = self._check(request)
        if not self._service.counts:
            raise Refusal(wire.ErrorCode.BUSY, "this provider cannot count what it serves; ask again later")
        if not request.rows:
            self._answer_empty_product(request)
            return
        work = row_cost(request, self._service.manifest.groups[request.group]) * request.rows
        with (
            self._service.quotas.admitted(self._tenant, rows=request.rows, work=work) as limit,
            self._service.budget.taken(self._tenant, size, timeout=self._limits.request_timeout_s),
        ):
            try:
                payload = self._read_payload()  # in time of its own: waiting for bytes was not the tenant's fault
                self._multiply(request, payload, cost=work, limit=limit)
            except TimeoutError:
                self._bill(Counts(slow=1))
                raise
            except (OSError, ConnectionLostError):
                if self._unread and not self._service.stopping.is_set():  # it left in the middle of its rows
                    self._bill(Counts(abandoned=1))
                raise
        seconds = time.perf_counter() - begun
        if log.detailed:
            log.debug(
                "request",
                tenant=str(self._tenant),
                group=request.group,
                direction=request.direction,
                rows=request.rows,
                ms=round(1000 * seconds, 3),
            )

    def _answer_empty_product(self, request: wire.Execute | wire.Effect) -> None:
        """Answer a request of zero rows here: it takes nothing of the executor, and the gateway limits its rate."""
        with self._service.quotas.admitted(self._tenant, rows=0, work=0) as limit:
            self._service.register.count_request(self._tenant)
            self._bill(Counts(requests=1))
            self._send(wire.encode(wire.Result.answering(request, limit=limit)))
        self._pause(size=0)

    def _multiply(
        self,
        request: wire.Execute | wire.Effect,
        payload: memoryview,
        *,
        cost: int,
        limit: wire.QuotaLimit | None,
    ) -> None:
        """Have a product of so many multiply-adds computed, and send it with the limit that the request has met."""
        work = self._work(request)
        if work.stage == "fine_tuning" and self._left():  # looked at where a product takes longer than the look
            self._bill(Counts(abandoned=1))
            raise ConnectionLostError("the tenant left before its product was begun")
        self._executor.send(work, payload)
        try:
            answer = self._executor.receive(deadline=work.deadline, gone=self._left)
        except Refusal as refusal:
            self._bill(Counts(failed=1))
            self._refuse(refusal)
            self._executor.settle()  # it may still hold the payload, and then so does the budget
            return
        if len(answer.payload) == self._answer_bytes(request):
            self._service.register.count_request(self._tenant)
            received, sent = len(payload), len(answer.payload)
            self._bill(Counts(requests=1, rows=request.rows, work=cost, bytes_received=received, bytes_sent=sent))
            if limit is not None:
                result = wire.Result.answering(request, limit=limit)
                answer = answer._replace(head=wire.encode(result, payload_bytes=sent))
        elif self._left():  # what was multiplied before anybody knew is on its bill
            self._bill(Counts(abandoned=1, rows=answer.rows, work=cost * answer.rows // request.rows))
        else:  # it is late, or broke
            self._bill(Counts(failed=1))
        self._send(answer.head, answer.payload)

    def _answer_bytes(self, request: wire.Execute | wire.Effect) -> int:
        _, outputs = self._service.manifest.groups[request.group].columns(request.direction)
        return request.encoding.size(request.rows, outputs)

    def _bill(self, counts: Counts) -> None:
        """Count durably: what the tenant hears of next is on its bill."""
        self._service.usage.count(self._tenant, self._role or "none", counts)
        self._service.usage.settle()

    def _work(self, request: wire.Execute | wire.Effect) -> ProductRequest:
        now = time.monotonic()
        return ProductRequest(
            tenant=self._tenant,
            stage=self._service.stages.of(self._tenant, request, now),
            weight=self._service.quotas.of(self._tenant).weight or 1.0,
            arrival=now,
            deadline=now + self._limits.request_timeout_s,
            request=request,
        )

    def _left(self) -> bool:
        """Whether the tenant has left; a stop shuts the socket too, but what is in flight is still answered."""
        return not self._service.stopping.is_set() and self._link.peer_left()

    def _check(self, request: wire.Execute | wire.Effect) -> int:
        """Refuse what this tenant may not ask; returns the bytes of the request's and the reply's matrix."""
        wanted = "executor" if isinstance(request, wire.Execute) else "helper"
        if self._role is None:
            _bad("say hello first")
        if self._role != wanted:
            raise Refusal(wire.ErrorCode.ROLE_REFUSED, f"this connection is served in the role {self._role!r}")
        if isinstance(request, wire.Effect) and request.arithmetic != "ring":
            _bad("effects exist in the ring only")
        if request.arithmetic != "ring" and not self._service.config.executor.float_path:
            raise Refusal(wire.ErrorCode.NOT_SERVED, "float products are off here ([executor] float = false)")
        groups = self._service.manifest.groups
        if request.group >= len(groups):
            _bad(f"group {request.group} is not one of {len(groups)}")
        if request.group not in self._service.served:
            layers = self._service.config.model.layers
            raise Refusal(wire.ErrorCode.NOT_SERVED, f"{groups[request.group].name} is not in layers {layers}")
        if request.rows > self._limits.max_rows:
            raise Refusal(wire.ErrorCode.TOO_LARGE, f"{request.rows} rows; at most {self._limits.max_rows}")
        columns = groups[request.group].columns(request.direction)
        inputs, outputs = (request.encoding.size(request.rows, width) for width in columns)
        if max(inputs, outputs) > self._max_payload:
            largest = max(inputs, outputs)
            raise Refusal(wire.ErrorCode.TOO_LARGE, f"a matrix of {largest} bytes; at most {self._max_payload}")
        self._expect_payload(0 if isinstance(request, wire.Effect) else inputs)
        self._executor.require_present()
        return inputs + outputs

    def _answer_hello(self, hello: wire.Hello) -> None:
        if self._role is not None:
            _bad("hello was said before")
        if hello.version != wire.VERSION:
            _bad(f"version {hello.version} is not spoken here, but {wire.VERSION}; upgrade the older side")
        if hello.role not in self._service.config.roles:
            raise Refusal(wire.ErrorCode.ROLE_REFUSED, f"this provider does not serve as {hello.role}")
        if hello.model_digest != self._service.digest:
            raise Refusal(wire.ErrorCode.WRONG_MODEL, f"this provider serves {self._service.digest}")
        self._executor.require_present()  # who is greeted counts on answers
        self._service.register.take_role(self._tenant, hello.role)
        self._role = hello.role
        welcome = wire.Welcome(
            version=wire.VERSION,
            model_digest=self._service.digest,
            first_group=self._service.served.start,
            end_group=self._service.served.stop,
            max_rows=self._limits.max_rows,
            max_payload=self._max_payload,
        )
        self._send(wire.encode(welcome))

    def _answer_health(self) -> None:
        executor = self._service.executor_report.report(self._executor, timeout=self._limits.request_timeout_s)
        report = wire.HealthReport(
            name=self._service.config.name,
            model_digest=self._service.digest,
            time=time.time(),
            uptime_s=time.monotonic() - self._service.started,
            groups=len(self._service.served),
            groups_loaded=executor.groups_loaded,
            requests=self._service.register.requests_of(self._tenant),
            connections=self._service.slots.count(self._tenant),
        )
        self._send(wire.encode(report))

    def _expect_payload(self, size: int) -> None:
        if self._unread != size:
            _bad(f"payload of {self._unread} bytes where {size} belong")


def refuse(link: Link, refusal: Refusal, *, timeout: float) -> None:
    """Tell the tenant why it is not served."""
    failure = wire.Failure(code=refusal.code, detail=refusal.detail[:_DETAIL], limit=refusal.limit)
    link.send(wire.encode(failure), _NOTHING, deadline=time.monotonic() + timeout)


def _bad(detail: str) -> NoReturn:
    raise Refusal(wire.ErrorCode.BAD_REQUEST, detail)
