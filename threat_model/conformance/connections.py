"""Checks that use connections of their own: concurrent requests, whose answers batching must not change; bad requests,
which the provider must refuse with a reason, and the connection must stay usable; and malformed frames.
"""

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES, Seed
from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.errors import ConnectionLostError, ProtocolError
from symbiosis_priv.network import wire
from symbiosis_priv.network.dial import ClientConnection
from threat_model.conformance.frames import malformed_frames
from threat_model.conformance.subject import Case, NotTested, Subject, Violation, describe, effect_case
from threat_model.conformance.trials import Run, batches, claim, requests

_CONNECTIONS = 4
_BURSTS = 3  # repetitions of each example, because timing decides whether requests meet in the provider's queue
_LONG_WORK = 20_000_000  # multiplications that keep an executor busy while the other requests arrive
_LONG_ROWS = 4096
_ZEROS = Seed(bytes(SEED_BYTES))
_SEALED = Seed(bytes(SEED_BYTES + wire.TAG_BYTES))  # in form only: an executor has no key for it


@claim("batching", "Requests of several connections at once get the same answers as alone.")
def check_batching(subject: Subject, run: Run) -> None:
    """Sends requests for one layer group on several connections while a long request keeps the executor busy. A
    provider serves each connection independently, so all requests are sent before any answer is read. While the long
    request is computed, the others wait in the queue, and a provider that batches computes them together. Ring answers
    must have the same bits as the answers to single requests. Float sums may be computed in another order, so two float
    answers differ by twice their error bound at most. Other properties check whether the answers are correct."""

    def check(cases: list[Case]) -> None:
        with subject.connections(1 + len(cases)) as (busy, *others):
            if len(others) < 2:
                raise NotTested(f"it grants this tenant {1 + len(others)} connections; 3 are needed")
            cases = cases[: len(others)]
            alone = [subject.answer(case) for case in cases]
            # a long request in the other direction, which joins no batch of the others
            index, direction = cases[0].index, next(d for d in DIRECTIONS if d != cases[0].direction)
            width, other = subject.oracle.widths(index, direction)
            rows = max(1, min(_LONG_WORK // (width * other), subject.row_limit(index), _LONG_ROWS))
            long = Case(index, direction, "ring", torch.ones((rows, width), dtype=torch.int32))
            if subject.role == "helper":
                long = effect_case(subject.oracle, index, direction, seed=_ZEROS, first_row=0, rows=rows)
            bursts = [_at_once(subject, [busy, *others], [long, *cases])[1:] for _ in range(_BURSTS)]
        for case, before, *answers in zip(cases, alone, *bursts, strict=True):
            counts = ", ".join(str(len(c.rows)) for c in cases)
            what = f"asked by {len(cases)} connections at once ({counts} rows), it answers otherwise than alone"
            bound = None  # ring answers must be equal
            if case.arithmetic != "ring":
                # other properties check the rest of float answers
                which = case.index, case.direction, case.rows
                bound = 2 * subject.oracle.float_product(*which, arithmetic=case.arithmetic)[1]
            for answer in answers:
                subject.expect_equal(answer, before, what, case, bound=bound)

    run.for_all(batches(subject, size=_CONNECTIONS), check, examples=max(4, run.examples // 3))


def _at_once(subject: Subject, connections: Sequence[ClientConnection], cases: Sequence[Case]) -> list[Tensor]:
    """The answers to requests that are sent before any answer is read."""
    for connection, case in zip(connections, cases, strict=True):
        connection.send(case.header(subject.role), case.payload(subject.role), deadline=subject.deadline())
    answers = []
    for connection, case in zip(connections, cases, strict=True):
        deadline = subject.deadline()
        try:
            reply, body = connection.read(max_payload=subject.answer_bytes(case), deadline=deadline)
        except ProtocolError as error:
            raise subject.violation(f"answers with a broken frame: {error}", case) from error
        if isinstance(reply, wire.Failure) and reply.code in wire.RETRYABLE:
            answers.append(subject.answer(case))  # the provider was busy, which is allowed: repeat the request alone
        else:
            answers.append(subject.matrix(reply, body, case))
    return answers


def bad_requests(subject: Subject, case: Case) -> list[tuple[str, wire.Message, Tensor | None]]:
    """Seven bad requests for a role, each a good one with one thing wrong: name, header and payload."""
    role, good, rows = subject.role, case.header(subject.role), case.rows
    other: wire.Role = "executor" if role == "helper" else "helper"
    asked = dataclasses.replace(case, seed=_SEALED)
    # counts of more rows for a stack, and any counts for linears
    counts = (len(rows) + 1, *[0] * (subject.oracle.entry(case.index).experts - 1))
    version = wire.version_of(32, role=role)
    hello = wire.Hello(version=version, role=role, model_digest=subject.welcome.model_digest)
    most = min(wire.MAX_ROWS, subject.welcome.max_rows + 1)
    groups = len(subject.oracle.manifest.groups)
    both: list[tuple[str, wire.Message, Tensor | None]] = [
        ("a group that does not exist", replace(good, group=groups), case.payload(role)),
        ("more rows than it allows", replace(good, rows=most), None),
        ("counts that are not those of its rows", replace(good, counts=counts), case.payload(role)),
        ("a request of the other role", asked.header(other), asked.payload(other)),
        ("a second hello", hello, None),
    ]
    if role == "helper":
        return [
            *both,
            ("an effect on the float path", replace(good, arithmetic="float"), None),
            ("an effect with rows", good, rows),
        ]
    wide = torch.zeros((len(rows), rows.shape[1] + 1), dtype=torch.int32)
    return [
        *both,
        ("a row less than announced", replace(good, rows=len(rows) + 1), rows),
        ("rows of the wrong width", good, wide),
    ]


@claim("refusals", "A bad request is refused, and the connection stays usable; a malformed frame is not answered.")
def check_refusals(subject: Subject, run: Run) -> None:
    """Sends bad requests in random order, then a good request on the same connection; and every malformed frame, after
    which the provider may close the connection."""
    kinds = st.lists(st.integers(0, 6), min_size=1, max_size=4)

    def check(drawn: tuple[list[int], Case]) -> None:
        numbers, case = drawn
        bad = bad_requests(subject, case)
        chosen = [bad[number] for number in numbers]
        try:
            _refuses(subject, chosen, case)
        except ConnectionLostError:
            try:
                _refuses(subject, chosen, case)  # one lost connection may be a network fault
            except ConnectionLostError:
                subject.close()
                subject.answer(case)  # raises if the provider is unreachable
                names = " or ".join(name for name, _, _ in chosen)
                raise subject.violation(f"closes the connection after {names}", case) from None

    run.for_all(st.tuples(kinds, requests(subject).filter(lambda case: len(case.rows) > 0)), check)
    for frame in malformed_frames():
        run.one()
        with subject.connections(1) as (connection,), contextlib.suppress(ConnectionLostError):
            connection.send_bytes(frame.data, deadline=subject.deadline())
            try:
                reply, _ = connection.read(max_payload=0, deadline=subject.deadline())
            except ProtocolError as error:
                raise Violation(f"answers a malformed frame ({frame.name}) with a broken frame: {error}") from error
            if not isinstance(reply, wire.Failure):
                raise Violation(f"answers a malformed frame ({frame.name}) with {describe(reply)}")


def _refuses(subject: Subject, bad: Sequence[tuple[str, wire.Message, Tensor | None]], case: Case) -> None:
    names = [name for name, _, _ in bad]
    with subject.connections(1) as (connection,):
        try:
            for name, header, payload in bad:
                reply, _ = subject.ask(connection, header, payload, max_payload=subject.answer_bytes(case))
                if not isinstance(reply, wire.Failure):
                    raise subject.violation(f"answers {name} with {describe(reply)}", case)
            good = case.header(subject.role)
            size = subject.answer_bytes(case)
            reply, body = subject.ask(connection, good, case.payload(subject.role), max_payload=size)
        except ProtocolError as error:
            raise subject.violation(f"answers {' or '.join(names)} with a broken frame: {error}", case) from error
    what = f"after {' and '.join(names)}, it answers a good request otherwise"
    subject.expect_equal(subject.matrix(reply, body, case), subject.answer(case), what, case)
