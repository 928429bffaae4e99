"""A provider under test, the requests it is sent, and what refutes a property."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import expand, mask_key
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.errors import ConnectionLostError, ProtocolError, TransportError, one_line
from symbiosis_priv.network import wire
from threat_model.conformance.oracle import CheckpointOracle, Difference, Oracle
from threat_model.conformance.probe import Dialler, Probe

_SHOWN = 8


@dataclass(frozen=True)
class Case:
    """One request.

    Args:
        rows: what is multiplied: the payload for an executor, what the seed expands to for a helper.
        seed: for a helper, 32 bytes.
        first_row: for a helper.
    """

    index: int
    direction: Direction
    arithmetic: wire.Arithmetic
    rows: Tensor
    seed: bytes = b""
    first_row: int = 0

    def header(self, role: wire.Role) -> wire.Execute | wire.Effect:
        """The request's header in a role, with a fresh nonce."""
        nonce, rows = secrets.token_bytes(wire.NONCE_BYTES), len(self.rows)
        if role == "executor":
            return wire.Execute(
                nonce=nonce, group=self.index, direction=self.direction, arithmetic=self.arithmetic, rows=rows
            )
        return wire.Effect(
            nonce=nonce,
            group=self.index,
            direction=self.direction,
            arithmetic="ring",
            rows=rows,
            seed=self.seed,
            first_row=self.first_row,
        )

    def payload(self, role: wire.Role) -> Tensor | None:
        """The request's matrix in a role."""
        return self.rows if role == "executor" else None


def effect_case(oracle: Oracle, index: int, direction: Direction, *, seed: bytes, first_row: int, rows: int) -> Case:
    """A helper's request, with the mask rows that it stands for."""
    key = mask_key(seed, group_name=oracle.entry(index).name, direction=direction)
    width, _ = oracle.widths(index, direction)
    mask = expand(key, first_row=first_row, rows=rows, width=width)
    return Case(index, direction, "ring", mask, seed=seed, first_row=first_row)


class Violation(Exception):
    """A request that refutes a property.

    Args:
        what: what the provider did, in one clause.
        case: the smallest request found.
        group: the layer group's name.
        difference: the first wrong entry of the answer.
        culprit: the provider at fault, if it is not the one that the property was run on.
    """

    def __init__(
        self,
        what: str,
        *,
        case: Case | None = None,
        group: str | None = None,
        difference: Difference | None = None,
        culprit: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what, self.case, self.group = what, case, group
        self.difference, self.culprit = difference, culprit

    def lines(self) -> list[str]:
        """The counterexample, for people."""
        out = [self.what]
        if self.case is not None:
            case = self.case
            out.append(
                f"request: {self.group or f'group {case.index}'}, {case.direction}, {case.arithmetic}, "
                f"{len(case.rows)} row{'s' * (len(case.rows) != 1)} of {case.rows.shape[1]}"
            )
            if case.seed:
                out.append(f"seed {case.seed.hex()}, first row {case.first_row}")
            row = self.difference.row if self.difference else 0
            if row < len(case.rows):
                out.append(f"row {row}: {_show_row(case.rows[row])}")
        if self.difference is not None:
            out.append(str(self.difference))
        return out


class NotTested(Exception):
    """The property says nothing about this provider; the message says why."""


class WrongRole(NotTested):
    """The provider refuses the role that it is tested in, so no property says anything about it."""


@dataclass
class Subject:
    """One provider in one role, under test.

    Args:
        dialler: how to reach it.
        oracle: what it should answer.
        executors: for a helper: executors to compare its effects with.
        require_floats: whether an executor has to serve floats; else one that says that it serves none is not asked.
    """

    dialler: Dialler
    oracle: Oracle
    executors: Sequence[Subject] = ()
    require_floats: bool = False
    _probe: Probe | None = None
    _welcome: wire.Welcome | None = None

    @property
    def name(self) -> str:
        """The provider's name in the federation file."""
        return self.dialler.peer.name

    @property
    def role(self) -> wire.Role:
        """The role it is tested in."""
        return self.dialler.peer.role

    @property
    def welcome(self) -> wire.Welcome:
        """What it allows; connects the first time."""
        if self._welcome is None:
            self._connected()
            assert self._welcome is not None
        return self._welcome

    @property
    def groups(self) -> range:
        """The layer groups of the checkpoint that it says it serves; connects the first time."""
        return range(self.welcome.first_group, min(self.welcome.end_group, len(self.oracle.manifest.groups)))

    @property
    def sampled(self) -> tuple[int, ...]:
        """Those of them that random examples are drawn from."""
        return tuple(index for index in self.oracle.sampled if index in self.groups) or (self.groups[0],)

    @functools.cached_property
    def floats(self) -> bool:
        """Whether float answers are asked for and judged; asks the provider the first time."""
        if self.role != "executor" or not self.oracle.floats:
            return False
        return self.require_floats or self._serves_floats()

    def _serves_floats(self) -> bool:
        """Only its own word that it does not counts; whatever else it answers, the properties shall find."""
        index = self.sampled[0]
        width, _ = self.oracle.widths(index, FORWARD)
        nothing = Case(index, FORWARD, "float", torch.empty((0, width), dtype=torch.float32))
        try:
            reply, _ = self.exchange(nothing, nothing.header(self.role))
        except (Violation, TransportError):
            return True
        return not (isinstance(reply, wire.Failure) and reply.code == wire.ErrorCode.NOT_SERVED)

    def row_limit(self, index: int) -> int:
        """How many rows of a group one request may have."""
        widest = wire.RING32.size(1, max(self.oracle.widths(index, FORWARD)))
        return max(1, min(self.welcome.max_rows, self.welcome.max_payload // widest))

    def answer(self, case: Case) -> Tensor:
        """The provider's answer to a valid request, `[rows, width]`; bound to it or not.

        Raises:
            Violation: it refused, answered with something else, or hung up twice.
            TransportError: it cannot be reached, or gives no answer in time.
        """
        reply, body = self.exchange(case, case.header(self.role))
        return self.matrix(reply, body, case)

    def exchange(self, case: Case, header: wire.Message) -> tuple[wire.Reply, bytearray]:
        """The reply to a case sent under a header, whatever it is. A lost connection is replaced once."""
        try:
            return self._exchange(case, header)
        except ConnectionLostError:  # once is the network's doing
            pass
        try:
            return self._exchange(case, header)
        except ConnectionLostError:
            self._connected()  # raises if it is gone altogether
            raise self.violation("hangs up instead of answering", case) from None

    def _exchange(self, case: Case, header: wire.Message) -> tuple[wire.Reply, bytearray]:
        try:
            probe = self._connected()
            return probe.ask(header, case.payload(self.role), max_payload=self.answer_bytes(case))
        except ProtocolError as error:
            self.close()
            raise self.violation(f"answers with a broken frame: {error}", case) from error
        except TransportError:
            self.close()
            raise

    def answer_bytes(self, case: Case) -> int:
        """Bytes of the right answer's matrix."""
        _, width = self.oracle.widths(case.index, case.direction)
        return wire.encoding_of(case.arithmetic).size(len(case.rows), width)

    def matrix(self, reply: wire.Reply, body: bytearray, case: Case) -> Tensor:
        """The matrix of a result; a Violation if the reply is none."""
        if isinstance(reply, wire.Failure):
            raise self.violation(f"refuses a valid request: {describe(reply)}", case)
        if not isinstance(reply, wire.Result):
            raise self.violation(f"answers with {describe(reply)} where a result belongs", case)
        if len(body) != self.answer_bytes(case):
            raise self.violation(f"answers with {len(body)} bytes where {self.answer_bytes(case)} belong", case)
        _, width = self.oracle.widths(case.index, case.direction)
        return wire.encoding_of(case.arithmetic).unpack(body, rows=len(case.rows)).view(len(case.rows), width)

    def judge(self, case: Case, answer: Tensor) -> Difference | None:
        """The first wrong entry of an answer."""
        if case.arithmetic == "ring":
            return self.oracle.judge_ring(case.index, case.direction, case.rows, answer)
        assert isinstance(self.oracle, CheckpointOracle)  # nothing else is asked for float answers
        return self.oracle.judge_float(case.index, case.direction, case.rows, answer, arithmetic=case.arithmetic)

    def violation(self, what: str, case: Case, *, difference: Difference | None = None) -> Violation:
        """A violation by this provider."""
        return Violation(what, case=case, group=self.oracle.entry(case.index).name, difference=difference)

    @contextmanager
    def connections(self, count: int) -> Iterator[list[Probe]]:
        """New connections, greeted; as many of `count` as the provider grants, at least one."""
        with ExitStack() as open_probes:
            probes: list[Probe] = []
            for _ in range(count):
                probe = open_probes.enter_context(self.dialler.connect())
                try:
                    self._greet(probe)
                except (TransportError, NotTested):
                    if not probes:
                        raise
                    break
                probes.append(probe)
            yield probes

    def close(self) -> None:
        """Hang up; the next request connects again."""
        if self._probe is not None:
            self._probe.close()
        self._probe = None

    def _connected(self) -> Probe:
        if self._probe is None:
            probe = self.dialler.connect()
            try:
                self._welcome = self._greet(probe)
            except BaseException:
                probe.close()
                raise
            self._probe = probe
        return self._probe

    def _greet(self, probe: Probe) -> wire.Welcome:
        reply = hello(probe, self.role, self.oracle.manifest.digest)
        if isinstance(reply, wire.Failure) and reply.code == wire.ErrorCode.WRONG_MODEL:
            # It says so itself, and `digest` reports it; the other properties show what differs.
            health, _ = probe.ask(wire.Health())
            if isinstance(health, wire.HealthReport):
                reply = hello(probe, self.role, health.model_digest)
        if isinstance(reply, wire.Failure) and reply.code == wire.ErrorCode.ROLE_REFUSED:
            raise self.wrong_role(reply)
        if not isinstance(reply, wire.Welcome):
            raise NotTested(f"it does not welcome this tenant: {describe(reply)}")
        if reply.first_group >= len(self.oracle.manifest.groups):
            raise NotTested(f"it serves layer groups from {reply.first_group} on, which the checkpoint has not")
        return reply

    def wrong_role(self, reply: wire.Failure) -> WrongRole:
        """What to say of a provider that refuses the role."""
        other = "helper" if self.role == "executor" else "executor"
        return WrongRole(
            f"it does not serve this tenant as {self.role} ({one_line(reply.detail)}): test it with --role {other}, or "
            f"correct its role in federation.toml"
        )


def hello(probe: Probe, role: wire.Role, digest: str) -> wire.Reply:
    """Greet; the provider's reply, whatever it is."""
    return probe.ask(wire.Hello(version=wire.VERSION, role=role, model_digest=digest))[0]


def describe(reply: wire.Reply) -> str:
    """A reply without its payload, in a few words."""
    if isinstance(reply, wire.Failure):
        return f"{reply.code}: {one_line(reply.detail)}"
    if isinstance(reply, wire.Welcome):
        return f"welcome to {reply.model_digest}"
    return type(reply).__name__


def _show_row(row: Tensor) -> str:
    columns = row.nonzero()[:, 0].tolist()
    if not columns:
        return "all zero"
    first = row[columns[0]].item()
    if len(columns) == len(row) and bool((row == first).all()):
        return f"every column = {first!r}"
    shown = ", ".join(f"column {c} = {row[c].item()!r}" for c in columns[:_SHOWN])
    more = len(columns) - _SHOWN
    return f"{shown}, and {more} more" if more > 0 else f"{shown}; all others 0"
