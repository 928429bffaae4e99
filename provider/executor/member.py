"""The executor of a rank other than rank 0, whose gateway keeps its tenants' rows (`gateways = "all"`).

Rank 0 schedules the requests of all gateways (`shards.line`), and its plans name the pieces of each rank. This rank
adds the rows of its pieces to the product, and gets their products. A request is answered when rank 0 has said so and
all its rows are there, or when rank 0 has said that it failed.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from provider import logs
from provider.config.schema import ProviderConfig
from provider.executor import queues
from provider.executor.client import ExecutorHandle
from provider.products.model import open_store
from provider.scheduler.jobs import RankPiece
from provider.shards import line
from provider.shards.line import Member, Reply
from provider.shards.sharded import ShardedOperands
from symbiosis_priv.errors import CheckpointError, RankLostError
from symbiosis_priv.network import wire

log = logs.EventLog(__name__)


@dataclass(eq=False)
class _Held:
    """A request of this rank."""

    payload: memoryview
    rows: int
    sender: queues.Mailbox
    result: Tensor | None = None
    multiplied: int = 0
    reply: Reply | None = None


class MemberExecutor(ExecutorHandle):
    """Takes part in the products of the group, in a thread, and passes this gateway's requests to rank 0."""

    def __init__(self, config: ProviderConfig, *, model_digest: str, member: Member) -> None:
        super().__init__(config, model_digest=model_digest)
        self.member = member
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="executor", daemon=True)

    def start(self) -> None:
        store = open_store(self.config)
        if store.manifest().digest != self.model_digest:
            raise CheckpointError(f"{store.path} changed while it was in use; start the provider again")
        self._operands = ShardedOperands(store, sharding=self.config.executor.sharding)
        self._answered = self.generation
        self._thread.start()
        self._guard.start()

    def stop(self, timeout: float) -> None:
        self.stopping.set()
        if self._thread.ident is None:
            return
        self._thread.join(timeout)
        if not self.member.join(timeout):  # rank 0 serves on: it notices that this rank has gone
            log.warning("rank_lost", reason="this rank was stopped alone")
            os._exit(1)
        self._guard.join()

    def open_channel(self) -> queues.RequestChannel:
        return _MemberChannel(self)

    def _follow(self) -> None:
        try:
            with torch.no_grad():
                self._operands.follow(self)
        except RankLostError as error:
            log.warning("rank_lost", reason=str(error))
            os._exit(1)
        except Exception as error:
            log.failure("executor_failed", error)
            os._exit(1)
        self.generation += 1
        if not self.stopping.is_set():
            os.kill(os.getpid(), signal.SIGTERM)  # rank 0 has stopped

    # Requests of this rank's gateway, for `_MemberChannel`

    def post(self, work: queues.ProductRequest, payload: memoryview, sender: queues.Mailbox) -> int:
        assert isinstance(work.request, wire.Execute), "a rank's own gateway serves executors only"
        held = _Held(payload, work.request.rows, sender)
        ask = line.Work(work.tenant, work.deadline - time.monotonic(), work.request)
        number = self.member.number()
        self._held[number] = held  # before a plan can name it
        return self.member.post(ask, lambda reply: self._replied(number, held, reply), number=number)

    def _replied(self, number: int, held: _Held, reply: Reply) -> None:
        with self._lock:
            held.reply = reply
            self._deliver(number, held)

    def _deliver(self, number: int, held: _Held) -> None:
        reply = held.reply
        if reply is None:
            return
        failure = reply.failure
        if reply.code is not None:
            failure = wire.encode(wire.Failure(code=reply.code, detail=reply.detail))
        if not failure and held.multiplied < held.rows:
            return
        self._held.pop(number, None)
        product = queues.NOTHING if failure or held.result is None else wire.RING32.pack(held.result)
        held.payload = queues.NOTHING
        held.sender.put(queues.ExecutorAnswer(failure, product, reply.rows))

    # Rows and products of this rank's pieces, for `ShardedOperands.follow`

    def rows(self, pieces: Sequence[RankPiece]) -> Tensor:
        parts = []
        with self._lock:
            for number, start, stop in pieces:
                held = self._held[number]
                parts.append(wire.RING32.unpack(held.payload, rows=held.rows)[start:stop])
        return torch.cat(parts)

    def take(self, pieces: Sequence[RankPiece], product: Tensor) -> None:
        first = 0
        with self._lock:
            for number, start, stop in pieces:
                held, first = self._held.get(number), first + stop - start
                if held is None:  # it has failed meanwhile: the tenant has left, or another piece failed
                    continue
                if held.result is None:
                    held.result = torch.empty((held.rows, product.shape[1]), dtype=torch.int32, device="cpu")
                held.result[start:stop] = product[first - (stop - start) : first]
                held.multiplied += stop - start
                self._deliver(number, held)


class _MemberChannel(queues.Mailbox):
    def __init__(self, executor: MemberExecutor) -> None:
        super().__init__()
        self._executor = executor
        self._last: int | None = None

    def send(self, message: queues.Envelope, payload: memoryview = queues.NOTHING) -> None:
        match message:
            case queues.ProductRequest():
                self._last = self._executor.post(message, payload, self)
            case queues.Cancel() if self._last is not None:
                self._executor.member.tell(line.Withdraw(self._last))
            case queues.ReportRequest():
                self._executor.member.post(line.Report(), self._reported)

    def _reported(self, reply: Reply) -> None:
        if reply.code is None:
            self.put(queues.ExecutorAnswer(b"", memoryview(reply.report), 0))
