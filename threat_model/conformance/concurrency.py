"""Several connections at once: whatever a provider batches must not show."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from symbiosis_priv import wire
from symbiosis_priv.errors import ProtocolError
from symbiosis_priv.keystream import SEED_BYTES
from symbiosis_priv.ring import DIRECTIONS
from threat_model.conformance.oracle import first_difference
from threat_model.conformance.probe import Probe
from threat_model.conformance.strategies import batches
from threat_model.conformance.subject import Case, NotTested, Subject, effect_case
from threat_model.conformance.trials import Run

_CONNECTIONS = 4
_PLUG_WORK = 20_000_000  # multiplications that keep an executor busy while the other requests arrive
_PLUG_ROWS = 4096


def check_batching(subject: Subject, run: Run) -> None:
    """Requests for one layer group from several connections, queued up behind one that keeps the executor busy.

    A provider serves every connection on its own, so it is enough to send to all before reading from any: while the
    long request is computed the others queue up, and a provider that batches takes them together. Ring answers
    must have the same bits as alone; float sums may be taken in another order, but stay within their bound.
    """

    def check(cases: list[Case]) -> None:
        with subject.connections(1 + len(cases)) as (plugged, *others):
            if len(others) < 2:
                raise NotTested(f"it grants this tenant {1 + len(others)} connections; 3 are needed")
            cases = cases[: len(others)]
            alone = [subject.answer(case) for case in cases]
            together = _at_once(subject, [plugged, *others], [_plug(subject, cases[0]), *cases])[1:]
        for case, before, answer in zip(cases, alone, together, strict=True):
            ring = case.path == "ring"
            difference = first_difference(answer, before) if ring else subject.judge(case, answer)
            if difference is not None:
                counts = ", ".join(str(len(c.rows)) for c in cases)
                what = f"asked by {len(cases)} connections at once ({counts} rows), it answers otherwise than alone"
                raise subject.violation(what, case, difference=difference)

    run.for_all(batches(subject, size=_CONNECTIONS), check, examples=max(4, run.examples // 3))


def _plug(subject: Subject, case: Case) -> Case:
    """A long request for the same layer group in the other direction: in nobody's batch."""
    direction = next(d for d in DIRECTIONS if d != case.direction)
    width, other = subject.oracle.widths(case.index, direction)
    rows = max(1, min(_PLUG_WORK // (width * other), subject.row_limit(case.index), _PLUG_ROWS))
    if subject.role == "helper":
        return effect_case(subject.oracle, case.index, direction, seed=bytes(SEED_BYTES), first_row=0, rows=rows)
    return Case(case.index, direction, "ring", torch.ones((rows, width), dtype=torch.int32))


def _at_once(subject: Subject, probes: Sequence[Probe], cases: Sequence[Case]) -> list[Tensor]:
    """The answers to requests that are all under way together."""
    for probe, case in zip(probes, cases, strict=True):
        probe.send(case.header(subject.role), case.payload(subject.role))
    answers = []
    for probe, case in zip(probes, cases, strict=True):
        try:
            reply, body = probe.receive(max_payload=subject.answer_bytes(case))
        except ProtocolError as error:
            raise subject.violation(f"answers with a broken frame: {error}", case) from error
        if isinstance(reply, wire.Failure) and reply.code in wire.RETRYABLE:
            answers.append(subject.answer(case))  # too much at once for it, which it may say: nothing to learn
        else:
            answers.append(subject.matrix(reply, body, case))
    return answers
