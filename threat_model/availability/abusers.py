"""The abuses of a provider in `bench abuse`. An abuser is a process with a valid tenant certificate, and with the key
of a helper whose blocks the provider accepts."""

import contextlib
import functools
import hashlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.certificates.reading import Identity, Kind, fingerprint, sign
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire
from symbiosis_priv.network.block_statement import statement
from symbiosis_priv.network.dial import ClientConnection
from symbiosis_priv.network.tls import client_context
from tenant.bench.processes import lower_own_priority
from tenant.connections.channel import Channel, fresh_nonce
from tenant.core.masked import UNMASKED_BY_CHOICE, mask

DEADLINE_S = 60.0
_GROUP = 0  # the group of q, k and v
_ROWS = 256  # rows of an abuser's request
_CONNECTIONS = 4  # number of connections
_READERS = 16
_SILENT_A_SECOND, _SILENT_FROM, _SILENT = 400, 250, 2000
_NICE = 19


@dataclass(frozen=True)
class Client:
    """A tenant with a valid certificate, and the provider that it asks.

    Args:
        helper: a helper whose blocks the provider accepts, and which the tenant has permitted.
        inputs, outputs: columns of a request's rows and of its answer's rows.
        visits: number of connections of the abuser that connects and disconnects.
    """

    identity: Identity
    helper: Identity
    peer: Peer
    digest: str
    inputs: int
    outputs: int
    visits: int

    @functools.cached_property
    def _context(self) -> ssl.SSLContext:
        return client_context(certificate=self.identity.certificate, key=self.identity.key, pins=self.peer.pins)

    def channel(self) -> Channel:
        return Channel(self.peer, context=self._context, model_digest=self.digest, deadline_s=DEADLINE_S)

    def link(self) -> ClientConnection:
        """A new connection of the helper to the provider."""
        own, pins = self.helper, self.peer.pins
        context = client_context(certificate=own.certificate, key=own.key, pins=pins, kind=Kind.PROVIDER)
        link = ClientConnection("the executor", host=self.peer.host, port=self.peer.port, pins=pins, context=context)
        link.open(time.monotonic() + DEADLINE_S)
        return link

    def ask(self, channel: Channel) -> None:
        """Send one large request and read the answer."""
        request = request_of(_ROWS)
        rows = torch.ones(_ROWS, self.inputs, dtype=torch.int32, device="cpu")
        channel.request(request, mask(rows, UNMASKED_BY_CHOICE), outputs=self.outputs)

    @contextmanager
    def connected(self) -> Iterator[ssl.SSLSocket]:
        """A TLS connection that has sent its hello."""
        raw = socket.create_connection((self.peer.host, self.peer.port), timeout=DEADLINE_S)
        with raw, self._context.wrap_socket(raw, server_hostname=self.peer.host) as connection:
            hello = wire.Hello(version=wire.VERSION, role="executor", model_digest=self.digest)
            connection.sendall(wire.encode(hello))
            yield connection

    def request(self, connection: ssl.SSLSocket, *, sends_rows: bool) -> None:
        """Announce one large request. With `sends_rows`, send its rows too."""
        matrix = bytes(wire.RING32.size(_ROWS, self.inputs))
        connection.sendall(wire.encode(request_of(_ROWS), payload_bytes=len(matrix)))
        if sends_rows:
            connection.sendall(matrix)


def _compute(abuser: Client) -> None:
    """Compute, without any connection to the provider."""
    block = bytes(1 << 16)
    while True:
        hashlib.sha256(block)


def _flood(abuser: Client) -> None:
    """Send large requests, one after the other."""
    channel = abuser.channel()
    with contextlib.suppress(SymbiosisError):  # the provider may refuse the abuser
        while True:
            abuser.ask(channel)


def _flood_blocks(abuser: Client) -> None:
    """Send unused blocks, one after the other."""
    helper, executor = fingerprint(abuser.helper.certificate), fingerprint(abuser.peer.pins[0])
    key, payload = abuser.helper.private_key(), bytes(wire.RING32.size(_ROWS, abuser.outputs))
    with (
        contextlib.suppress(SymbiosisError),
        contextlib.closing(abuser.channel()) as channel,
        contextlib.closing(abuser.link()) as link,
    ):
        permit = channel.permit([helper], deadline=time.monotonic() + DEADLINE_S).token
        while True:
            block = wire.Binding(**request_of(_ROWS).binding())
            signature = sign(key, statement(block, permit=permit, executor=executor, payload=payload))
            deadline = time.monotonic() + DEADLINE_S
            deposit = wire.Deposit(**block.binding(), permit=permit, signature=signature)
            link.send(deposit, memoryview(payload), deadline=deadline)
            link.receive_header(max_payload=0, deadline=deadline)


def _read_nothing(abuser: Client, *, sends_rows: bool = True) -> None:
    """Announce large requests, and read no answer. Without `sends_rows`, the rows never come."""
    with contextlib.ExitStack() as connections:
        for _ in range(_READERS):
            abuser.request(connections.enter_context(abuser.connected()), sends_rows=sends_rows)
        time.sleep(DEADLINE_S)


def _leave(abuser: Client) -> None:
    """Send large requests and leave before the answer."""
    while True:
        with contextlib.suppress(OSError), abuser.connected() as connection:
            abuser.request(connection, sends_rows=True)


def _come_and_go(abuser: Client) -> None:
    """Open and close one connection after the other."""
    for _ in range(abuser.visits):
        with contextlib.suppress(OSError), abuser.connected():
            pass


def _say_nothing(abuser: Client) -> None:
    """Open 400 connections a second from 250 addresses and send nothing."""
    with contextlib.ExitStack() as connections:
        begun = time.monotonic()
        for number in range(_SILENT):
            time.sleep(max(0.0, begun + number / _SILENT_A_SECOND - time.monotonic()))
            source = (f"127.1.0.{1 + number % _SILENT_FROM}", 0)
            address = abuser.peer.host, abuser.peer.port
            connections.enter_context(socket.create_connection(address, timeout=DEADLINE_S, source_address=source))
        time.sleep(DEADLINE_S)


def request_of(rows: int) -> wire.Execute:
    """A request to the first layer group."""
    return wire.Execute(nonce=fresh_nonce(), group=_GROUP, direction=FORWARD, arithmetic="ring", rows=rows)


@dataclass(frozen=True)
class Abuse:
    """One kind of abuse.

    Args:
        attack: function of the abuser; it may return.
        threads: number of threads that run `attack` at the same time.
        seen: counters that the provider must have reached before the measurement starts.
        ends: measure until the abuse has ended.
        revoked: revoke the abuser's certificate during the abuse.
    """

    attack: Callable[[Client], None]
    threads: int = 1
    seen: Mapping[str, int] = field(default_factory=dict)
    ends: bool = False
    revoked: bool = False


def abuses(visits: int) -> dict[str, Abuse]:
    """Every kind of abuse, by its name in the report.

    Args:
        visits: number of connections of the abuser that connects and disconnects.
    """
    flooding = {"connections": _CONNECTIONS, "requests": _CONNECTIONS}
    return {
        "control: a process that only computes": Abuse(_compute),
        "a flood of large requests": Abuse(_flood, _CONNECTIONS, seen=flooding),
        "a flood of blocks": Abuse(_flood_blocks, _CONNECTIONS, seen={"connections": 1, "blocks": _CONNECTIONS}),
        "answers that nobody reads": Abuse(_read_nothing, seen={"requests": _READERS}),
        "payloads that never come": Abuse(
            functools.partial(_read_nothing, sends_rows=False), seen={"connections": _READERS}
        ),
        "requests whose tenant leaves": Abuse(_leave, _CONNECTIONS, seen={"connections": _CONNECTIONS}),
        f"{visits:,} connections": Abuse(_come_and_go, seen={"connections": 1}, ends=True),
        f"{_SILENT_A_SECOND} silent connections a second": Abuse(
            _say_nothing, seen={"pending handshakes": _SILENT_FROM}
        ),
        "a tenant revoked in mid-request": Abuse(_flood, _CONNECTIONS, seen=flooding, revoked=True),
    }


@contextmanager
def serve_abuse(abuse: Abuse, abuser: Client) -> Iterator[Callable[[None], bool]]:
    """The work of a `Child`: an abuse, with the lowest priority. The answer is True while the abuse runs."""
    lower_own_priority(_NICE)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)
    threads = [threading.Thread(target=abuse.attack, args=(abuser,), daemon=True) for _ in range(abuse.threads)]
    for thread in threads:
        thread.start()
    yield lambda _: any(thread.is_alive() for thread in threads)
