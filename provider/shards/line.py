"""Messages between the gateways of other ranks and rank 0, which schedules and accounts for all of them.

Messages pass through a gloo group of their own, over the private network of `shards`: no further port is opened, and
nothing is unpickled. They carry tenants, shapes, counts and answers to them; never rows. Each other rank asks rank 0
(`Member`), and rank 0 answers in any order (`Accounts` in `provider.gateway`).
"""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from provider.refusal import Refusal
from symbiosis_priv.errors import RankLostError
from symbiosis_priv.limits import Role
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity

_IDLE = timedelta(days=365)  # between two messages: heartbeats notice a lost rank
_LEAD = 0
_MOST_BYTES = 16 << 20
_ASK_S = 30.0  # rank 0 answers at once, except for an admission


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Admit a request by its tenant's quota, until `Release`."""

    tenant: TenantIdentity
    rows: int
    work: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """A request that was admitted by a call with this number has been answered."""

    admitted: int


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Charge an answer without a product, or, without a size, ask for the tenant's debt."""

    tenant: TenantIdentity
    size: int | None


class Bind(msgspec.Struct, frozen=True, tag=True):
    """Bind a connection of a tenant to a role, or release it."""

    tenant: TenantIdentity
    role: Role
    bound: bool


class Bill(msgspec.Struct, frozen=True, tag=True):
    """Add to a tenant's bill: `UsageCounts` as a tuple."""

    tenant: TenantIdentity
    role: str
    counts: tuple[int, ...]


class Work(msgspec.Struct, frozen=True, tag=True):
    """Schedule a request whose rows the sender keeps. `seconds`: the time that is left for it."""

    tenant: TenantIdentity
    seconds: float
    request: wire.Execute


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """The tenant of the `Work` with this number has left."""

    work: int


class Report(msgspec.Struct, frozen=True, tag=True):
    """Ask for the executor's report."""


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The gateway of a rank; ranks other than rank 0 state theirs once a second. `requests` and `rows`: what it has
    itself read from its tenants and answered."""

    rank: int
    address: str
    connections: int
    requests: int
    rows: int


class End(msgspec.Struct, frozen=True, tag=True):
    """The last message in a direction."""


Ask = Admit | Release | Pause | Bind | Bill | Work | Withdraw | Report | GatewayStatus | End


class Asked(msgspec.Struct, frozen=True):
    """A call of another rank. Numbers are not reused."""

    number: int
    ask: Ask


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's answer to the call with this number; number -1 ends the line."""

    number: int
    code: wire.ErrorCode | None = None
    detail: str = ""
    limit: wire.QuotaLimit | None = None
    seconds: float = 0.0
    failure: bytes = b""
    report: bytes = b""
    rows: int = 0


LAST = -1
encode = msgspec.msgpack.Encoder().encode


def open_lines() -> dist.ProcessGroup:
    """Make the group of all lines. Every rank calls this."""
    group = dist.new_group(backend="gloo", timeout=_IDLE)
    assert isinstance(group, dist.ProcessGroup)
    return group


class Line:
    """Messages to and from one other rank, in order. Any thread sends; one thread receives."""

    def __init__(self, group: dist.ProcessGroup, other: int) -> None:
        self._group, self._other, self._lock = group, other, threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises `RankLostError`: the other rank has gone."""
        body = torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8)
        size = torch.tensor([len(body)], dtype=torch.int64, device="cpu")
        try:
            with self._lock:
                dist.send(size, self._other, group=self._group)
                dist.send(body, self._other, group=self._group)
        except RuntimeError as error:
            raise RankLostError(f"rank {self._other} cannot be reached: {error}") from error

    def receive(self) -> bytes:
        """Wait for the next message. Raises `RankLostError`: the other rank has gone, or sent too much."""
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        try:
            dist.recv(size, self._other, group=self._group)
            if not 0 < int(size) <= _MOST_BYTES:
                raise RankLostError(f"rank {self._other} sent a message of {int(size)} bytes")
            body = torch.empty(int(size), dtype=torch.uint8, device="cpu")
            dist.recv(body, self._other, group=self._group)
        except RuntimeError as error:
            raise RankLostError(f"rank {self._other} cannot be reached: {error}") from error
        return body.numpy().tobytes()


class Member:
    """The calls of a rank other than rank 0. Thread-safe."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank()
        self.ended = threading.Event()
        self._line = Line(group, _LEAD)
        self._numbers = itertools.count()
        self._waiting: dict[int, Callable[[Reply], None]] = {}
        self._thread = threading.Thread(target=self._receive, name="line", daemon=True)
        self._thread.start()

    def ask(self, ask: Ask, *, late: Callable[[Reply], None] = lambda _: None) -> Reply:
        """Wait for rank 0's answer. Raises `Refusal` if it refuses, is late or has ended; `late` then gets the answer
        that comes after all."""
        answers: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        number = self.post(ask, answers.put)
        try:
            reply = answers.get(timeout=_ASK_S)
        except queue.Empty:
            if self._waiting.pop(number, None) is not None:
                self._waiting[number] = late
                raise Refusal(wire.ErrorCode.BUSY, "rank 0 is late; ask again later") from None
            reply = answers.get(timeout=_ASK_S)  # it has just come
        if reply.code is not None:
            raise Refusal(reply.code, reply.detail, limit=reply.limit)
        return reply

    def number(self) -> int:
        """Return a number for `post`."""
        return next(self._numbers)

    def post(self, ask: Ask, answered: Callable[[Reply], None], *, number: int | None = None) -> int:
        """Send a call; `answered` gets the answer, in the line's thread. Returns the call's number."""
        number = self.number() if number is None else number
        self._waiting[number] = answered
        self._send(number, ask)
        return number

    def tell(self, ask: Ask) -> None:
        """Send a call that has no answer. Does nothing if rank 0 has ended."""
        with contextlib.suppress(Refusal):
            self._send(self.number(), ask)

    def _send(self, number: int, ask: Ask) -> None:
        if self.ended.is_set():
            raise Refusal(wire.ErrorCode.STOPPING, "the executor has stopped")
        try:
            self._line.send(Asked(number, ask))
        except RankLostError as error:  # this process ends soon, too
            raise Refusal(wire.ErrorCode.BUSY, "the executor was lost; ask again") from error

    def join(self, timeout: float) -> bool:
        """Returns True if rank 0 has ended the line within `timeout`."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _receive(self) -> None:
        decode = msgspec.msgpack.Decoder(Reply).decode
        while True:
            try:
                reply = decode(self._line.receive())
            except RankLostError:  # its heartbeat's end ends this process
                break
            if reply.number == LAST:
                self.tell(End())
                break
            if (answered := self._waiting.pop(reply.number, None)) is not None:
                answered(reply)
        self.ended.set()
        for answered in list(self._waiting.values()):
            answered(Reply(number=LAST, code=wire.ErrorCode.BUSY, detail="the executor was lost; ask again"))
