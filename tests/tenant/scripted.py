"""Scripted providers that listen at a socket, the products that providers are asked for, and their behaviours.

`tests.simulator` has the providers themselves, and reaches them without sockets. A `ListeningProvider` is for tests of
TLS, of connections and of forks.
"""

import contextlib
import functools
import socket
import ssl
import threading
from dataclasses import replace

import torch
from torch import Tensor

from provider.products.model import ServedModel
from symbiosis_priv.arithmetic.ring import FORWARD, Direction, quantise_rows
from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import server_context
from tenant.preparation.prepared import Preparation
from tenant.session.session import Session
from tests.simulator import (
    SILENCE as SILENCE,
    TIMEOUT_S as TIMEOUT_S,
    Behaviour as Behaviour,
    Heard as Heard,
    ScriptedProvider as ScriptedProvider,
    Sealed,
    Silence as Silence,
    frame as frame,
    honest as honest,
)


class ListeningProvider(ScriptedProvider):
    """A scripted provider behind a socket and TLS."""

    def _begin(self) -> int:
        self._lock = threading.Lock()
        self._serving: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()
        port: int = self._listener.getsockname()[1]
        return port

    def show(self, identity: Identity) -> None:
        super().show(identity)
        self._context = _context(identity, self._network.authority)

    def say(self, data: bytes) -> None:
        self.lines[-1].sendall(data)

    def hang_up(self) -> None:
        with self._lock:
            lines, self.lines = self.lines, []
        for line in lines:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(line, socket.SHUT_RDWR)

    def finish(self) -> None:
        """Wait until all bytes of closed connections are in `heard`."""
        with self._lock:
            serving, self._serving = self._serving, []
        for thread in serving:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a tenant has left a connection open"

    def close(self) -> None:
        self.closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in (self._accepting, *self._serving):
            thread.join(TIMEOUT_S)

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse_connections:
                raw.close()
                continue
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._serve, args=(raw,), daemon=True)
            with self._lock:  # so `finish` waits for this thread, and only for threads that have started
                thread.start()
                self._serving.append(thread)

    def _serve(self, raw: socket.socket) -> None:
        with contextlib.suppress(OSError, ConnectionError), raw:
            raw.settimeout(TIMEOUT_S)
            with self._context.wrap_socket(raw, server_side=True) as connection:
                connection.settimeout(None)
                with self._lock:
                    self.lines.append(connection)
                end, received = Sealed(connection), connection.makefile("rb")
                while not self.closing.is_set() and len(prefix := received.read(wire.PREFIX.size)) == wire.PREFIX.size:
                    rest = sum(wire.decode_prefix(prefix, max_payload=self._max_payload))
                    if len(data := received.read(rest)) < rest:
                        return
                    reply = self.hear(prefix + data, end)()
                    if reply is None:
                        return
                    if isinstance(reply, Silence):
                        self.closing.wait()
                    else:
                        connection.sendall(reply)


@functools.lru_cache(maxsize=8)
def served_model(store: WeightStore) -> ServedModel:
    """The model that providers share, because loading it takes longer than the products of most tests."""
    return ServedModel(store, float_memory=1 << 30)


@functools.lru_cache(maxsize=64)
def _context(identity: Identity, authority: Identity) -> ssl.SSLContext:
    return server_context(certificate=identity.certificate, key=identity.key, tenant_authority=authority.certificate)


# Products


def ring_rows(preparation: Preparation, index: int, direction: Direction, count: int, *, seed: int = 0) -> Tensor:
    """Quantised rows, as a backend passes them on."""
    facts = preparation.facts[index]
    rows = torch.randn(count, facts.inputs(direction), generator=torch.Generator().manual_seed(seed))
    return quantise_rows(rows, facts.bounds[direction])[0]


def product_of(store: WeightStore, index: int, direction: Direction, rows: Tensor) -> Tensor:
    """The product modulo 2^32. Sums are exact in double precision: they have fewer than 53 bits."""
    return (rows.double() @ _factor(store, index, direction)).to(torch.int64).to(torch.int32)


@functools.lru_cache(maxsize=64)
def _factor(store: WeightStore, index: int, direction: Direction) -> Tensor:
    weight = store.group(index).weight.double()
    return weight.t() if direction == FORWARD else weight


def crowded(facts: GroupFacts, *, spread: float) -> GroupFacts:
    """Facts for a ring that holds so few standard deviations that products wrap all the time."""
    bounds = {direction: replace(bound.narrowed(24), spread=spread) for direction, bound in facts.bounds.items()}
    by_expert = None if facts.by_expert is None else crowded(facts.by_expert, spread=spread)
    return replace(facts, bounds=bounds, by_expert=by_expert)


def store_of(session: Session) -> WeightStore:
    """The checkpoint that a session of `new_session` was given."""
    assert session._store is not None
    return session._store


def is_right(session: Session, index: GroupIndex, direction: Direction, count: int, seed: int = 0) -> bool:
    """Returns True if a session's product has the right bits."""
    rows = ring_rows(session.preparation, index, direction, count, seed=seed)
    return torch.equal(session.product(index, direction, rows), product_of(store_of(session), index, direction, rows))


# Behaviours


def spoil(heard: Heard, reply: wire.Result, answer: Tensor) -> tuple[wire.Result, Tensor]:
    """A wrong answer."""
    answer[0, 0] += 1
    return reply, answer


def silent(asked: threading.Event | None = None) -> Behaviour:
    """No answer; `asked` is set when a request has come."""

    def say_nothing(heard: Heard, reply: wire.Result, answer: Tensor) -> Silence:
        if asked is not None:
            asked.set()
        return SILENCE

    return say_nothing


def together(count: int) -> Behaviour:
    """Answers no request before `count` requests have arrived, at all providers with this behaviour."""
    all_here = threading.Barrier(count)

    def behave(heard: Heard, reply: wire.Result, answer: Tensor) -> tuple[wire.Result, Tensor]:
        all_here.wait(TIMEOUT_S)
        return reply, answer

    return behave
