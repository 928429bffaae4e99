"""Who misuses a provider in `bench abuse`, and how: each has a good certificate, and a process of its own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

import torch

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.certificates import Identity
from symbiosis_priv.errors import DeadlineExceededError, SymbiosisError
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import client_context
from tenant.bench import processes
from tenant.connections.channel import Channel, fresh_nonce

DEADLINE_S = 60.0
_GROUP = 0  # q, k and v
_ROWS = 256  # of an abuser's request
_CONNECTIONS = 4  # of a flood
_READERS = 16
_SILENT_A_SECOND, _SILENT_FROM, _SILENT = 400, 250, 2000
_NICE = 19


@dataclass(frozen=True)
class Abuser:
    """Who it is, whom it asks, and for what.

    Args:
        inputs, outputs: columns of a request's rows and of its answer's.
        visits: connections, if it comes and goes.
    """

    identity: Identity
    peer: Peer
    digest: str
    inputs: int
    outputs: int
    visits: int

    @functools.cached_property
    def _context(self) -> ssl.SSLContext:
        return client_context(certificate=self.identity.certificate, key=self.identity.key, pins=self.peer.pins)

    def channel(self) -> Channel:
        """A tenant's connection."""
        return Channel(
            self.peer,
            certificate=self.identity.certificate,
            key=self.identity.key,
            model_digest=self.digest,
            deadline_s=DEADLINE_S,
        )

    def ask(self, channel: Channel) -> None:
        """One large request."""
        request = request_of(_ROWS)
        channel.request(request, torch.ones(_ROWS, self.inputs, dtype=torch.int32, device="cpu"), outputs=self.outputs)

    @contextmanager
    def connected(self) -> Iterator[ssl.SSLSocket]:
        """A connection that has said hello, or at least shaken hands."""
        raw = socket.create_connection((self.peer.host, self.peer.port), timeout=DEADLINE_S)
        with raw, self._context.wrap_socket(raw, server_hostname=self.peer.host) as connection:
            hello = wire.Hello(version=wire.VERSION, role="executor", model_digest=self.digest)
            connection.sendall(wire.encode(hello))
            yield connection


def _compute(abuser: Abuser) -> None:
    """Nothing to do with the provider."""
    block = bytes(1 << 16)
    while True:
        hashlib.sha256(block)


def _flood(abuser: Abuser) -> None:
    """Large requests, one after the other."""
    channel = abuser.channel()
    with contextlib.suppress(SymbiosisError):  # it may be turned away
        while True:
            abuser.ask(channel)


def _read_nothing(abuser: Abuser) -> None:
    """A large request whose answer is never read."""
    with contextlib.ExitStack() as connections:
        for _ in range(_READERS):
            connection = connections.enter_context(abuser.connected())
            matrix = bytes(wire.RING32.size(_ROWS, abuser.inputs))
            connection.sendall(wire.encode(request_of(_ROWS), payload_bytes=len(matrix)))
            connection.sendall(matrix)
        time.sleep(DEADLINE_S)


def _send_nothing(abuser: Abuser) -> None:
    """Large requests are announced, and their bytes never come."""
    with contextlib.ExitStack() as connections:
        for _ in range(_READERS):
            connection = connections.enter_context(abuser.connected())
            size = wire.RING32.size(_ROWS, abuser.inputs)
            connection.sendall(wire.encode(request_of(_ROWS), payload_bytes=size))
        time.sleep(DEADLINE_S)


def _leave(abuser: Abuser) -> None:
    """Large requests, whose tenant is gone before the answer."""
    matrix = bytes(wire.RING32.size(_ROWS, abuser.inputs))
    while True:
        with contextlib.suppress(OSError), abuser.connected() as connection:
            connection.sendall(wire.encode(request_of(_ROWS), payload_bytes=len(matrix)))
            connection.sendall(matrix)


def _come_and_go(abuser: Abuser) -> None:
    """One connection after the other."""
    for _ in range(abuser.visits):
        with contextlib.suppress(OSError), abuser.connected():
            pass


def _say_nothing(abuser: Abuser) -> None:
    """400 silent connections a second from 250 addresses."""
    with contextlib.ExitStack() as connections:
        begun = time.monotonic()
        for number in range(_SILENT):
            time.sleep(max(0.0, begun + number / _SILENT_A_SECOND - time.monotonic()))
            source = (f"127.1.0.{1 + number % _SILENT_FROM}", 0)
            address = abuser.peer.host, abuser.peer.port
            connections.enter_context(socket.create_connection(address, timeout=DEADLINE_S, source_address=source))
        time.sleep(DEADLINE_S)


def request_of(rows: int) -> wire.Execute:
    """Of the first layer group."""
    return wire.Execute(nonce=fresh_nonce(), group=_GROUP, direction=FORWARD, arithmetic="ring", rows=rows)


@dataclass(frozen=True)
class Abuse:
    """One kind of it.

    Args:
        attack: what an abuser does; it may return.
        threads: of one process, that do it at the same time.
        seen: what the provider has counted of it, at least, before anything is measured.
        ends: measured until it has ended, however long that takes.
        revoked: the abuser's certificate, while it is at it.
    """

    attack: Callable[[Abuser], None]
    threads: int = 1
    seen: Mapping[str, int] = field(default_factory=dict)
    ends: bool = False
    revoked: bool = False


def abuses(visits: int) -> dict[str, Abuse]:
    """Every kind of it, by what it is called in the report.

    Args:
        visits: connections of whoever comes and goes.
    """
    flooding = {"connections": _CONNECTIONS, "requests": _CONNECTIONS}
    return {
        "control: a process that only computes": Abuse(_compute),
        "a flood of large requests": Abuse(_flood, _CONNECTIONS, seen=flooding),
        "answers that nobody reads": Abuse(_read_nothing, seen={"requests": _READERS}),
        "payloads that never come": Abuse(_send_nothing, seen={"connections": _READERS}),
        "requests whose tenant leaves": Abuse(_leave, _CONNECTIONS, seen={"connections": _CONNECTIONS}),
        f"{visits:,} connections": Abuse(_come_and_go, seen={"connections": 1}, ends=True),
        f"{_SILENT_A_SECOND} silent connections a second": Abuse(_say_nothing, seen={"strangers": _SILENT_FROM}),
        "a tenant revoked in mid-request": Abuse(_flood, _CONNECTIONS, seen=flooding, revoked=True),
    }


def start(abuse: Abuse, abuser: Abuser) -> BaseProcess:
    """A process that is at it as soon as this returns, and gets only the time that nobody else wants.

    Raises:
        DeadlineExceededError: it has not begun in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    begun = context.Event()
    process = context.Process(target=_run, args=(abuse, abuser, begun), daemon=True)
    process.start()
    if not begun.wait(DEADLINE_S):
        process.kill()
        raise DeadlineExceededError(f"an abuser has not begun within {DEADLINE_S:g} s")
    return process


def _run(abuse: Abuse, abuser: Abuser, begun: Event) -> None:
    processes.give_way(_NICE)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)
    with ThreadPoolExecutor(abuse.threads) as pool:
        running = [pool.submit(abuse.attack, abuser) for _ in range(abuse.threads)]
        begun.set()
        for future in running:
            future.result()
