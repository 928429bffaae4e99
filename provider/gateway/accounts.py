"""One account over the gateways of all ranks (`gateways = "all"`): quotas, bills and roles are rank 0's.

The gateway of another rank checks frames, keeps its tenants' rows and sends their answers. Everything that is counted
for a tenant, it asks from rank 0: `RemoteQuotas`, `RemoteUsage` and `RemoteRegister` take the places of the classes
that count in this process. `Accounts` answers on rank 0, with what rank 0's own gateway uses. So a tenant that opens
connections at several ranks has one quota, one bill, one role and one share of the executor.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import cast

import msgspec
import torch.distributed as dist

from provider import logs
from provider.executor.client import ExecutorRequester
from provider.executor.queues import NOTHING, Cancel, InboxMessage, LocalInbox, ProductRequest, RemoteSender
from provider.executor.supervisor import ThreadExecutor
from provider.gateway.admission import Register
from provider.gateway.credentials import Party
from provider.gateway.frames import GatewayState
from provider.gateway.quota import QuotaGate
from provider.gateway.usage import BilledRole, UsageCounters, UsageCounts
from provider.refusal import Refusal
from provider.shards import line
from provider.shards.line import Line, Member, Reply
from symbiosis_priv.errors import RankLostError
from symbiosis_priv.limits import Role
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.network.wire import QuotaLimit

log = logs.EventLog(__name__)

_REPORT_S = 30.0


class RemoteQuotas(QuotaGate):
    """The quotas of rank 0, for the gateway of another rank."""

    def __init__(self, member: Member, gate: QuotaGate) -> None:
        super().__init__(gate.of)
        self._member = member

    def admitted(
        self, tenant: TenantIdentity, *, rows: int, work: int, blocks_of: Party | None = None
    ) -> AbstractContextManager[QuotaLimit | None]:
        return self._admitted(line.Admit(tenant, rows, work))

    @contextmanager
    def _admitted(self, ask: line.Admit) -> Iterator[QuotaLimit | None]:
        reply = self._member.ask(ask, late=lambda reply: self._member.tell(line.Release(reply.number)))
        try:
            yield reply.limit
        finally:
            self._member.tell(line.Release(reply.number))

    def debt(self, tenant: Party) -> float:
        assert isinstance(tenant, TenantIdentity)
        return self._member.ask(line.Pause(tenant, None)).seconds

    def pause(self, tenant: Party, *, size: int) -> float:
        assert isinstance(tenant, TenantIdentity)
        return self._member.ask(line.Pause(tenant, size)).seconds


class RemoteRegister(Register):
    """The roles of rank 0, for the gateway of another rank."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self._member = member

    def take_role(self, tenant: TenantIdentity, role: Role) -> None:
        self._member.ask(line.Bind(tenant, role, bound=True))

    def drop_role(self, tenant: TenantIdentity, role: Role) -> None:
        self._member.tell(line.Bind(tenant, role, bound=False))


class RemoteUsage(UsageCounters):
    """The bill of rank 0, for the gateway of another rank."""

    def __init__(self, member: Member) -> None:
        self._member, self._unwritten_s = member, 0.0

    def count(self, tenant: TenantIdentity, role: BilledRole, counts: UsageCounts) -> None:
        self._unwritten_s = self._member.ask(line.Bill(tenant, role, msgspec.structs.astuple(counts))).seconds

    @property
    def unwritten_s(self) -> float:
        return self._unwritten_s

    def totals(self) -> dict[tuple[TenantIdentity, BilledRole], UsageCounts]:
        return {}

    def close(self) -> None:
        """Does nothing: rank 0 has the file."""


class Accounts:
    """Rank 0's answers to the gateways of the other ranks. `gateways` has the last status of each other gateway, by
    rank."""

    def __init__(self, state: GatewayState, executor: ThreadExecutor, lines: dist.ProcessGroup, ranks: int) -> None:
        self.gateways: dict[int, line.GatewayStatus] = {}
        self._state, self._executor = state, executor
        self._inbox: LocalInbox = executor.inbox
        self._lines = {rank: Line(lines, rank) for rank in range(1, ranks)}
        self._admitted: dict[tuple[int, int], AbstractContextManager[QuotaLimit | None]] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"line-{rank}", daemon=True) for rank in self._lines
        ]
        for thread in self._threads:
            thread.start()

    def close(self, timeout: float) -> bool:
        """End the lines. Returns True if every other rank has agreed within `timeout`."""
        until = time.monotonic() + timeout
        for each in self._lines.values():
            with suppress(RankLostError):
                each.send(Reply(number=line.LAST))
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, rank: int) -> None:
        decode, own = msgspec.msgpack.Decoder(line.Asked).decode, self._lines[rank]
        while True:
            try:
                asked = decode(own.receive())
            except RankLostError:  # its heartbeat's end ends this process
                return
            match asked.ask:
                case line.End():
                    return
                case line.Admit() | line.Report():  # these wait
                    threading.Thread(target=self._answer, args=(rank, asked), daemon=True).start()
                case _:
                    self._answer(rank, asked)

    def _answer(self, rank: int, asked: line.Asked) -> None:
        try:
            reply = self._reply(rank, asked.number, asked.ask)
        except Refusal as refusal:
            reply = Reply(number=asked.number, code=refusal.code, detail=refusal.detail, limit=refusal.limit)
        except Exception as error:  # the other rank's request times out
            log.failure("rank_not_answered", error)
            return
        if reply is not None:
            with suppress(RankLostError):
                self._lines[rank].send(reply)

    def _reply(self, rank: int, number: int, ask: line.Ask) -> Reply | None:
        state = self._state
        match ask:
            case line.Admit():
                admitted = state.quotas.admitted(ask.tenant, rows=ask.rows, work=ask.work)
                limit = admitted.__enter__()
                self._admitted[rank, number] = admitted
                return Reply(number=number, limit=limit)
            case line.Release():
                if (ended := self._admitted.pop((rank, ask.admitted), None)) is not None:  # None: it was refused late
                    ended.__exit__(None, None, None)
            case line.Pause():
                quotas = state.quotas
                seconds = quotas.debt(ask.tenant) if ask.size is None else quotas.pause(ask.tenant, size=ask.size)
                return Reply(number=number, seconds=seconds)
            case line.Bind() if ask.bound:
                state.register.take_role(ask.tenant, ask.role)
                return Reply(number=number)
            case line.Bind():
                state.register.drop_role(ask.tenant, ask.role)
            case line.Bill():
                counts = UsageCounts(*ask.counts)
                for _ in range(counts.requests):
                    state.register.count_request(ask.tenant, rows=None)
                state.usage.count(ask.tenant, cast("BilledRole", ask.role), counts)
                return Reply(number=number, seconds=state.usage.unwritten_s)
            case line.Work():
                now = time.monotonic()
                work = ProductRequest(
                    tenant=ask.tenant,
                    stage=state.stages.of(ask.tenant, ask.request, now),
                    weight=state.quotas.of(ask.tenant).weight or 1.0,
                    arrival=now,
                    deadline=now + ask.seconds,
                    request=ask.request,
                )
                self._inbox.deliver(InboxMessage(RemoteSender(rank, number, self._lines[rank]), work, NOTHING))
            case line.Withdraw():
                sender = RemoteSender(rank, ask.work, self._lines[rank])
                self._inbox.deliver(InboxMessage(sender, Cancel(), NOTHING))
            case line.Report():
                with ExecutorRequester(self._executor) as executor:
                    report = executor.report(deadline=time.monotonic() + _REPORT_S)
                return Reply(number=number, report=msgspec.json.encode(report))
            case line.GatewayStatus():
                self.gateways[rank] = ask
        return None
