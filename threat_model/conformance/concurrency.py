"""Concurrent requests on several connections: batching must not change an answer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES, Seed
from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.errors import ProtocolError
from symbiosis_priv.network import wire
from threat_model.conformance.oracle import Array, CheckpointOracle
from threat_model.conformance.raw_connection import RawConnection
from threat_model.conformance.request_strategies import batches
from threat_model.conformance.subject import Case, NotTested, Subject, effect_case
from threat_model.conformance.trials import Run, claim

_CONNECTIONS = 4
_BURSTS = 3  # repetitions of each example, because timing decides whether requests meet in the provider's queue
_LONG_WORK = 20_000_000  # multiplications that keep an executor busy while the other requests arrive
_LONG_ROWS = 4096


@claim("batching", "Requests of several connections at once get the same answers as alone.")
def check_batching(subject: Subject, run: Run) -> None:
    """Sends requests for one layer group on several connections while a long request keeps the executor busy.

    A provider serves each connection independently, so all requests are sent before any answer is read. While the long
    request is computed, the others wait in the queue, and a provider that batches computes them together. Ring answers
    must have the same bits as the answers to single requests. Float sums may be computed in another order, so two float
    answers differ by twice their error bound at most. Other properties check whether the answers are correct.
    """

    def check(cases: list[Case]) -> None:
        with subject.connections(1 + len(cases)) as (busy, *others):
            if len(others) < 2:
                raise NotTested(f"it grants this tenant {1 + len(others)} connections; 3 are needed")
            cases = cases[: len(others)]
            alone = [subject.answer(case) for case in cases]
            long = _long_request(subject, cases[0])
            bursts = [_at_once(subject, [busy, *others], [long, *cases])[1:] for _ in range(_BURSTS)]
        for case, before, *answers in zip(cases, alone, *bursts, strict=True):
            counts = ", ".join(str(len(c.rows)) for c in cases)
            what = f"asked by {len(cases)} connections at once ({counts} rows), it answers otherwise than alone"
            for answer in answers:
                subject.expect_equal(answer, before, what, case, bound=_reordering(subject, case))

    run.for_all(batches(subject, size=_CONNECTIONS), check, examples=max(4, run.examples // 3))


def _reordering(subject: Subject, case: Case) -> Array | None:
    """Largest difference between two float answers to one request; None for ring answers, which must be equal."""
    if case.arithmetic == "ring":
        return None
    assert isinstance(subject.oracle, CheckpointOracle)  # other properties check everything else about float answers
    _, bound = subject.oracle.float_product(case.index, case.direction, case.rows, arithmetic=case.arithmetic)
    return 2 * bound


def _long_request(subject: Subject, case: Case) -> Case:
    """A long request for the same layer group in the other direction, so that it joins no batch of `case`."""
    direction = next(d for d in DIRECTIONS if d != case.direction)
    width, other = subject.oracle.widths(case.index, direction)
    rows = max(1, min(_LONG_WORK // (width * other), subject.row_limit(case.index), _LONG_ROWS))
    if subject.role == "helper":
        return effect_case(subject.oracle, case.index, direction, seed=Seed(bytes(SEED_BYTES)), first_row=0, rows=rows)
    return Case(case.index, direction, "ring", torch.ones((rows, width), dtype=torch.int32))


def _at_once(subject: Subject, connections: Sequence[RawConnection], cases: Sequence[Case]) -> list[Tensor]:
    """The answers to requests that are sent before any answer is read."""
    for connection, case in zip(connections, cases, strict=True):
        connection.send(case.header(subject.role), case.payload(subject.role))
    answers = []
    for connection, case in zip(connections, cases, strict=True):
        try:
            reply, body = connection.receive(max_payload=subject.answer_bytes(case))
        except ProtocolError as error:
            raise subject.violation(f"answers with a broken frame: {error}", case) from error
        if isinstance(reply, wire.Failure) and reply.code in wire.RETRYABLE:
            answers.append(subject.answer(case))  # the provider was busy, which is allowed: repeat the request alone
        else:
            answers.append(subject.matrix(reply, body, case))
    return answers
