"""A helper's connections to the executors under `[relay] to`; a tenant chooses by its executor's certificate.

Theory of operation. The gateway's thread that has made a block sends it itself, on an idle connection or a new one, and
waits for the executor's receipt. The number of connections to one executor is limited, and no tenant uses more
connections than stay free. Every wait has a deadline, after which the tenant gets the effect directly. After a
connection has failed, effects go directly to the tenants until a thread in the background has made a connection.

A block is sent before the executor accepts it, so a tenant without a permit or without memory at the executor could
use the whole bandwidth for blocks that are dropped. After a refused block, the effects of that tenant go directly for a
while, and it has one block on its way at a time.
"""

import threading
import time
from collections import Counter

import msgspec
import numpy as np

from provider import logs
from provider.config.schema import SLOWEST_BYTES_PER_S, ProviderConfig, RelayTarget
from symbiosis_priv.arithmetic.keystream import expand, relay_key
from symbiosis_priv.certificates.reading import Identity, Kind, fingerprint, sign
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.errors import ConnectionLostError, ProtocolError, SymbiosisError, one_line
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.block_statement import block_id, statement
from symbiosis_priv.network.dial import ClientConnection
from symbiosis_priv.network.tls import TenantIdentity, client_context
from symbiosis_priv.system.fair_share import FairShare
from symbiosis_priv.system.pacing import Backoff

log = logs.EventLog(__name__)

_CONNECTIONS = 16  # to one executor
_CONNECT_S = 5.0
_DEPOSIT_S = 5.0  # for a block without its bytes
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0
_REFUSED_S = 1.0


class LinkCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the link to one executor."""

    address: str
    up: bool  # False while connections fail
    deposits: int = 0  # blocks that the executor has accepted
    refused: int = 0  # blocks that it has refused, or on which it has hung up
    failed: int = 0  # blocks that were not sent: the link was down, or a block of the tenant had just been refused


class Links:
    """The links of one helper to the executors in its configuration. Thread-safe. Raises `CertificateError`: a
    certificate or the key cannot be used."""

    def __init__(self, config: ProviderConfig) -> None:
        self._links: dict[str, _Link] = {}
        self.renew(config)

    def renew(self, config: ProviderConfig) -> None:
        """Use other destinations and another certificate. Blocks that are being sent are finished."""
        links = {}
        for target in config.relay.to:
            link = _Link(target, config)
            links[link.executor] = link
            if (before := self._links.get(link.executor)) is not None:
                link.tally = before.tally
        self.close()
        self._links = links

    def allows(self, executor: str) -> bool:
        """True if the operator allows blocks for the executor with this certificate's `fingerprint`."""
        return executor in self._links

    def deposit(
        self, tenant: TenantIdentity, request: wire.Effect, order: wire.RelayOrder, payload: memoryview
    ) -> bool:
        """Sign a block, whose payload is e + m in the encoding of the request, and send it. Returns True if the
        executor keeps it, False if the tenant needs the effect itself."""
        link = self._links.get(order.executor)
        return link is not None and link.deposit(tenant, _block_of(request), payload, permit=order.permit)

    def counts(self) -> list[LinkCounts]:
        return [link.counts() for link in self._links.values()]

    def close(self) -> None:
        """Close all connections. A connection in use is closed after its block."""
        for link in self._links.values():
            link.close()


class _Link:
    """The connections to one executor."""

    def __init__(self, target: RelayTarget, config: ProviderConfig) -> None:
        identity = Identity(config.tls.certificate, config.tls.key)
        self._key = identity.private_key()
        sign(self._key, b"")  # a key of another kind is an error now, and not in a request
        self._target, self._rate = target, SLOWEST_BYTES_PER_S  # slowest rate of a block
        self._context = client_context(
            certificate=identity.certificate, key=identity.key, pins=[target.certificate], kind=Kind.PROVIDER
        )
        self.executor = fingerprint(target.certificate)
        self.tally = Counter[str]()
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._in_use = FairShare[TenantIdentity](_CONNECTIONS)
        self._idle: list[ClientConnection] = []
        self._accepted: set[TenantIdentity] = set()  # the tenants whose last block was accepted
        self._refused: dict[TenantIdentity, Backoff] = {}  # by tenant whose last block was refused
        self._down = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)  # attempts to connect
        self._reviving = self._closed = False

    def deposit(self, tenant: TenantIdentity, block: wire.Binding, payload: memoryview, *, permit: bytes) -> bool:
        outcome = "failed"
        if self._down.failures:
            self._revive()
        elif not self._is_paused(tenant):
            outcome = self._send_in_turn(tenant, block, payload, permit)
        with self._lock:
            self.tally[outcome] += 1
        return outcome == "deposits"

    def counts(self) -> LinkCounts:
        with self._lock:
            return LinkCounts(address=self._target.address, up=not self._down.failures, **self.tally)

    def close(self) -> None:
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for connection in idle:
            connection.close()

    def _send_in_turn(self, tenant: TenantIdentity, block: wire.Binding, payload: memoryview, permit: bytes) -> str:
        signature = sign(self._key, statement(block, permit=permit, executor=self.executor, payload=payload))
        deposit = wire.Deposit(**block.binding(), permit=permit, signature=signature)
        deadline = time.monotonic() + _DEPOSIT_S + len(payload) / self._rate
        with self._freed:
            has_place = self._freed.wait_for(
                lambda: self._in_use.may_take(tenant) and (tenant in self._accepted or not self._in_use.held(tenant)),
                _DEPOSIT_S,
            )
            if not has_place or self._is_paused(tenant):
                return "failed"
            self._in_use.take(tenant)
        outcome = "failed"
        try:
            outcome = self._send(deposit, payload, deadline)
        except SymbiosisError as error:
            self._mark_down(error)
        finally:
            with self._freed:
                self._in_use.give_back(tenant)
                if outcome == "deposits":
                    self._accepted.add(tenant)
                    self._refused.pop(tenant, None)
                elif outcome == "refused":
                    self._accepted.discard(tenant)
                    self._refused.setdefault(tenant, Backoff(_REFUSED_S, _LAST_PAUSE_S)).failed()
                self._freed.notify_all()
        return outcome

    def _is_paused(self, tenant: TenantIdentity) -> bool:
        refused = self._refused.get(tenant)
        return refused is not None and not refused.is_over

    def _send(self, deposit: wire.Deposit, payload: memoryview, deadline: float) -> str:
        with self._lock:
            while (connection := self._idle.pop() if self._idle else None) is not None and connection.peer_left():
                connection.close()
        connection = connection or self._connect(min(deadline, time.monotonic() + _CONNECT_S))
        try:
            reply, _ = connection.ask(deposit, payload, deadline=deadline, decode=wire.decode_link_reply)
            if isinstance(reply, wire.Deposited) and reply.block != deposit.nonce:
                raise ProtocolError("the executor has confirmed another block")
        except ConnectionLostError as error:  # for example, the block is larger than the executor accepts
            connection.close()
            log.often("block_refused", address=self._target.address, code="lost", detail=one_line(str(error)))
            return "refused"
        except BaseException:
            connection.close()
            raise
        self._put_idle(connection)
        if isinstance(reply, wire.Failure):
            log.often("block_refused", address=self._target.address, code=reply.code, detail=one_line(reply.detail))
            return "refused"
        return "deposits"

    def _connect(self, deadline: float) -> ClientConnection:
        host, port = parse_address(self._target.address)
        pins = [self._target.certificate]
        connection = ClientConnection("the executor", host=host, port=port, pins=pins, context=self._context)
        connection.open(deadline)
        return connection

    def _put_idle(self, connection: ClientConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _mark_down(self, error: SymbiosisError) -> None:
        with self._lock:
            self._down.failed()
        log.often("relay_failed", address=self._target.address, error=type(error).__name__, reason=one_line(str(error)))

    def _revive(self) -> None:
        """Try to connect in the background, unless another thread does, or it is too early."""
        with self._lock:
            if self._reviving or self._closed or not self._down.is_over:
                return
            self._reviving = True

        def connect() -> None:
            try:
                self._put_idle(self._connect(time.monotonic() + _CONNECT_S))
                self._down.succeeded()
                log.often("relay_restored", address=self._target.address)
            except SymbiosisError as error:
                self._mark_down(error)
            finally:
                self._reviving = False

        try:
            threading.Thread(target=connect, name="relay", daemon=True).start()
        except RuntimeError:  # no thread can be started now
            self._reviving = False


def _block_of(request: wire.Effect) -> wire.Binding:
    return wire.Binding(**request.binding() | {"nonce": block_id(request)})


def make_block(effect: memoryview, request: wire.Effect, entry: GroupEntry) -> memoryview:
    """Make the payload of the block e + m, in the encoding of the request. The payload `effect` of e, in 32 bits, is
    not changed. `entry` is that of the layer group, or of one expert's matrix if the request has counts."""
    _, outputs = entry.columns(request.direction)
    key = relay_key(request.seed, group_name=entry.name, direction=request.direction)
    block = expand(key, first_row=request.first_row, rows=request.rows, width=outputs).numpy()
    block += np.frombuffer(effect, dtype="<i4").reshape(block.shape)
    return request.encoding.pack(block)
