"""A provider under test, connections and requests to it, and the exceptions that refute a property."""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import Seed, expand, mask_key
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts, clip
from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.errors import ConnectionLostError, ProtocolError, TransportError, one_line
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire
from symbiosis_priv.network.dial import ClientConnection
from symbiosis_priv.network.tls import client_context
from threat_model.conformance.oracle import Array, Difference, Oracle, first_difference

_SHOWN = 8
_NO_SEED = Seed(b"")


class OutOfTime(Exception):
    """The tests of one provider have exceeded their time limit."""


@dataclass(frozen=True)
class Case:
    """One request. `rows` are those of the product: the payload for an executor; for a helper, the expansion of `seed`
    from `first_row` on. `counts` are the rows of every expert, if each row is for one expert of a stack."""

    index: int
    direction: Direction
    arithmetic: wire.Arithmetic
    rows: Tensor
    seed: Seed = _NO_SEED
    first_row: int = 0
    counts: Counts | None = None
    ring_bits: wire.RingBits = 32

    @property
    def encoding(self) -> wire.Encoding:
        return wire.encoding_of(self.arithmetic, self.ring_bits)

    def piece(self, start: int, rows: int) -> Self:
        counts = None if self.counts is None else clip(self.counts, start, rows)
        part = self.rows[start : start + rows]
        return replace(self, rows=part, first_row=self.first_row + start, counts=counts)

    def header(self, role: wire.Role) -> wire.Execute | wire.Effect:
        """The request's header in a role, with a fresh nonce."""
        binding = wire.Binding(
            nonce=secrets.token_bytes(wire.NONCE_BYTES),
            group=self.index,
            direction=self.direction,
            arithmetic=self.arithmetic,
            rows=len(self.rows),
            counts=self.counts,
            ring_bits=self.ring_bits,
        ).binding()
        if role == "executor":
            return wire.Execute(**binding)
        return wire.Effect(**binding | {"arithmetic": "ring", "seed": self.seed, "first_row": self.first_row})

    def payload(self, role: wire.Role) -> Tensor | None:
        return self.rows if role == "executor" else None


def effect_case(
    oracle: Oracle,
    index: int,
    direction: Direction,
    *,
    seed: Seed,
    first_row: int,
    rows: int,
    counts: Counts | None = None,
) -> Case:
    """A helper's request, with the mask rows that its seed expands to."""
    entry = oracle.manifest.entry(index, by_expert=counts is not None)
    key = mask_key(seed, group_name=entry.name, direction=direction)
    width, _ = entry.columns(direction)
    mask = expand(key, first_row=first_row, rows=rows, width=width)
    return Case(index, direction, "ring", mask, seed=seed, first_row=first_row, counts=counts)


class Violation(Exception):
    """A request that refutes a property. `what`: the provider's fault, in one clause."""

    def __init__(
        self, what: str, *, case: Case | None = None, group: str | None = None, difference: Difference | None = None
    ) -> None:
        super().__init__(what)
        self.what, self.case, self.group, self.difference = what, case, group, difference

    def lines(self) -> list[str]:
        out = [self.what]
        if (case := self.case) is not None:
            count, width = case.rows.shape
            out.append(
                f"request: {self.group or f'group {case.index}'}, {case.direction}, {case.arithmetic}, "
                f"{count} row{'s' * (count != 1)} of {width}"
            )
            if case.counts is not None:
                out.append(f"rows of every expert: {', '.join(map(str, case.counts))}")
            if case.seed:
                out.append(f"seed {case.seed.hex()}, first row {case.first_row}")
            place = self.difference.row if self.difference else 0
            if place < count:
                row = case.rows[place]
                columns = row.nonzero()[:, 0].tolist()
                shown = ", ".join(f"column {c} = {row[c].item()!r}" for c in columns[:_SHOWN])
                more = len(columns) - _SHOWN
                shown += f", and {more} more" if more > 0 else "; all others 0"
                if len(row.unique()) == 1:
                    shown = f"every column = {row[0].item()!r}" if columns else "all zero"
                out.append(f"row {place}: {shown}")
        if self.difference is not None:
            out.append(str(self.difference))
        return out


class NotTested(Exception):
    """The property does not apply to this provider; the message says why."""


class WrongRole(NotTested):
    """The provider refuses the role that it is tested in, so no property can be tested."""


@dataclass
class Subject:
    """One provider in one role, under test by the tenant with a certificate. `deadline_s` are for one exchange, and for
    one connection attempt. From the moment `until` of `time.monotonic()` on, every exchange ends in OutOfTime."""

    peer: Peer
    own: Identity
    oracle: Oracle
    deadline_s: float
    until: float = math.inf
    _connection: ClientConnection | None = None
    _welcome: wire.Welcome | None = None

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def role(self) -> wire.Role:
        return self.peer.role

    def connect(self) -> ClientConnection:
        """An authenticated connection without a hello. It checks no answer. Raises `CertificateError`: the provider
        refuses the tenant's certificate, or shows one that is not pinned; `TransportError`: no provider answers at the
        address; `OutOfTime`: `until` has passed."""
        own, pins = self.own, self.peer.pins
        connection = self.peer.connection(client_context(certificate=own.certificate, key=own.key, pins=pins))
        try:
            connection.open(self.deadline())
        except TransportError as error:
            self.deadline()
            raise type(error)(f"{error}; is it running?") from error
        return connection

    def deadline(self) -> float:
        """The deadline of an exchange that starts now. Raises OutOfTime if `until` has passed."""
        now = time.monotonic()
        if now >= self.until:
            raise OutOfTime
        return min(now + self.deadline_s, self.until)

    @property
    def welcome(self) -> wire.Welcome:
        """The provider's welcome with its limits. The first use connects."""
        if self._welcome is None:
            self._connected()
            assert self._welcome is not None
        return self._welcome

    @property
    def groups(self) -> range:
        """The layer groups that the provider claims to serve. The first use connects."""
        return range(self.welcome.first_group, min(self.welcome.end_group, len(self.oracle.manifest.groups)))

    @property
    def sampled(self) -> tuple[int, ...]:
        """The layer groups among `groups` that random examples use."""
        return tuple(index for index in self.oracle.sampled if index in self.groups) or (self.groups[0],)

    @functools.cached_property
    def floats(self) -> bool:
        """True if the provider serves floats. The first use asks it."""
        if self.role != "executor":
            return False
        width, _ = self.oracle.widths(self.sampled[0], FORWARD)
        nothing = Case(self.sampled[0], FORWARD, "float", torch.empty((0, width), dtype=torch.float32))
        try:
            reply, _ = self.exchange(nothing, nothing.header(self.role))
        except (Violation, TransportError):
            return True
        # the properties check any other answer than "I serve no floats"
        return not (isinstance(reply, wire.Failure) and reply.code == wire.ErrorCode.NOT_SERVED)

    def row_limit(self, index: int) -> int:
        """Largest number of rows of one request for a group."""
        widest = wire.RING32.size(1, max(self.oracle.widths(index, FORWARD)))
        return max(1, min(self.welcome.max_rows, self.welcome.max_payload // widest))

    def answer(self, case: Case) -> Tensor:
        """The provider's answer to a valid request, `[rows, width]`. Does not check that the reply is bound to it.
        Raises `Violation`: the provider refused, sent another kind of reply, or closed the connection twice;
        `TransportError`: the provider cannot be reached, or does not answer in time."""
        reply, body = self.exchange(case, case.header(self.role))
        return self.matrix(reply, body, case)

    def exchange(self, case: Case, header: wire.Message) -> tuple[wire.Reply, bytearray]:
        """The reply to a case sent with a header, of any kind. After a lost connection, the case is sent once more."""
        for _ in range(2):  # one lost connection may be a network fault
            try:
                connection = self._connected()
                return self.ask(connection, header, case.payload(self.role), max_payload=self.answer_bytes(case))
            except (ProtocolError, TransportError) as error:
                self.close()
                if isinstance(error, ProtocolError):
                    raise self.violation(f"answers with a broken frame: {error}", case) from error
                if not isinstance(error, ConnectionLostError):
                    raise
        self._connected()  # raises if the provider is unreachable
        raise self.violation("closes the connection instead of answering", case)

    def ask(
        self,
        connection: ClientConnection,
        message: wire.Message,
        payload: Tensor | None = None,
        *,
        max_payload: int = 0,
    ) -> tuple[wire.Reply, bytearray]:
        """Send one frame and wait for the reply, of any kind; to a busy provider, send it again until the deadline."""
        deadline = self.deadline()
        return connection.ask(message, payload, max_payload=max_payload, deadline=deadline, patient=True)

    def hello(self, connection: ClientConnection, digest: str) -> wire.Reply:
        """Say hello, and agree with a helper on a key. Returns the provider's reply to the hello, of any kind."""
        version = wire.version_of(32, role=self.role)
        reply, _ = self.ask(connection, wire.Hello(version=version, role=self.role, model_digest=digest))
        if self.role == "helper" and isinstance(reply, wire.Welcome):
            connection.agree(deadline=self.deadline())
        return reply

    def answer_bytes(self, case: Case) -> int:
        """Number of bytes of the correct answer's matrix."""
        _, width = self.oracle.widths(case.index, case.direction, by_expert=case.counts is not None)
        return case.encoding.size(len(case.rows), width)

    def matrix(self, reply: wire.Reply, body: bytearray, case: Case) -> Tensor:
        """The matrix of a result. Raises `Violation` for another kind of reply."""
        if isinstance(reply, wire.Failure):
            raise self.violation(f"refuses a valid request: {describe(reply)}", case)
        if not isinstance(reply, wire.Result):
            raise self.violation(f"answers with {describe(reply)} where a result belongs", case)
        if len(body) != self.answer_bytes(case):
            raise self.violation(f"answers with {len(body)} bytes where {self.answer_bytes(case)} belong", case)
        _, width = self.oracle.widths(case.index, case.direction, by_expert=case.counts is not None)
        return case.encoding.unpack(body, rows=len(case.rows)).view(len(case.rows), width)

    def judge(self, case: Case, answer: Tensor) -> Difference | None:
        if case.arithmetic == "ring":
            return self.oracle.judge_ring(case.index, case.direction, case.rows, answer, case.counts)
        return self.oracle.judge_float(case.index, case.direction, case.rows, answer, arithmetic=case.arithmetic)

    def violation(self, what: str, case: Case, *, difference: Difference | None = None) -> Violation:
        return Violation(what, case=case, group=self.oracle.entry(case.index).name, difference=difference)

    def expect_equal(
        self, got: Tensor | Array, expected: Tensor | Array, what: str, case: Case, *, bound: Array | None = None
    ) -> None:
        """Raise a violation if `first_difference` finds a difference."""
        difference = first_difference(got, expected, bound=bound)
        if difference is not None:
            raise self.violation(what, case, difference=difference)

    @contextmanager
    def connections(self, count: int) -> Iterator[list[ClientConnection]]:
        """New connections after their hello: at most `count`, as the provider permits, and at least one."""
        with ExitStack() as opened:
            found: list[ClientConnection] = []
            for _ in range(count):
                connection = opened.enter_context(self.connect())
                try:
                    self._say_hello(connection)
                except (TransportError, NotTested):
                    if not found:
                        raise
                    break
                found.append(connection)
            yield found

    def close(self) -> None:
        """Close the connection. The next request connects again."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _connected(self) -> ClientConnection:
        if self._connection is None:
            with ExitStack() as undo:
                connection = undo.enter_context(self.connect())
                try:
                    self._welcome = self._say_hello(connection)
                except NotTested as refusal:
                    if self._welcome is None:
                        raise
                    # otherwise a provider could avoid the properties that it breaks
                    raise ConnectionLostError(f"it has welcomed this tenant before; now {refusal}") from None
                undo.pop_all()
            self._connection = connection
        return self._connection

    def _say_hello(self, connection: ClientConnection) -> wire.Welcome:
        reply = self.hello(connection, self.oracle.manifest.digest)
        if isinstance(reply, wire.Failure) and reply.code == wire.ErrorCode.WRONG_MODEL:
            # The provider names another digest. The property `digest` reports that; the others show what differs.
            health, _ = self.ask(connection, wire.FetchHealth())
            if isinstance(health, wire.HealthReport):
                reply = self.hello(connection, health.model_digest)
        if isinstance(reply, wire.Failure) and reply.code == wire.ErrorCode.ROLE_REFUSED:
            raise self.wrong_role(reply)
        if not isinstance(reply, wire.Welcome):
            raise NotTested(f"it does not welcome this tenant: {describe(reply)}")
        if reply.first_group >= len(self.oracle.manifest.groups):
            raise NotTested(f"it serves layer groups from {reply.first_group} on, which the checkpoint does not have")
        return reply

    def wrong_role(self, reply: wire.Failure) -> WrongRole:
        return WrongRole(
            f"it does not serve this tenant as {self.role} ({one_line(reply.detail)}): correct its role in "
            f"federation.toml"
        )


def describe(reply: wire.Reply) -> str:
    """A reply without its payload, in a few words."""
    if isinstance(reply, wire.Failure):
        return f"{reply.code}: {one_line(reply.detail)}"
    if isinstance(reply, wire.Welcome):
        return f"welcome to {reply.model_digest}"
    return type(reply).__name__
