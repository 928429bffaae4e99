"""One masked, verified product: the usual path, from top to bottom.

    quantise            inf and nan are refused                  core.rows
    take pads           burnt before any row leaves              supply, core.pads
    mask                the rows are `MaskedRows` from here on   core.masked
    send                one round trip, with a deadline          connections.executor_client, past core.gate
    open and check      before any result is used                core.parts, core.verifier

A large product goes out in parts (`part_queue`). Each part is a request with its own rows, pads, deadline and check,
and `send_part` is its way. As long as everything is usual, it is a straight line. After the first failure a
`failover.Recovery` knows what has failed and chooses what is tried next, and the part is sent again. The result is the
same bits in every case.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.limits import GroupIndex
from tenant.core.masked import cut
from tenant.core.pads import Pad, row_range
from tenant.core.parts import Part, Rows
from tenant.core.verifier import V
from tenant.masking.backend import multiply_again
from tenant.routing.known_provider import KnownProvider
from tenant.session.failover import Recovery
from tenant.session.part_queue import multiply_parts, part_rows
from tenant.session.refused import correct_or_blame
from tenant.session.runtime import Runtime
from tenant.session.supply import most_rows
from tenant.session.tally import clock, record


def multiply(runtime: Runtime, index: GroupIndex, direction: Direction, rows: Rows) -> None:
    """Compute one exact product; see `RingProduct.multiply` (`masking.backend`)."""
    routes, part_bytes = runtime.routes, runtime.options.part_bytes
    if not routes.all_up:
        routes.check(index)
    whole = _encode(runtime, index, direction, rows)
    runtime.prober.connect()
    runtime.refresh()
    limit = most_rows(routes, whole.widest)
    if whole.count <= limit and whole.size < 2 * part_bytes:
        whole.pads = _take(runtime, whole, 0, whole.count)
        send_part(runtime, whole, None)
    else:
        executors = [runtime.executor(provider) for provider in routes.open_for(index, whole.size)]
        most = part_rows(whole.count, whole.size, part_bytes=part_bytes, executors=len(executors))
        multiply_parts(_cut(runtime, whole, limit=limit, most=most), executors, partial(send_part, runtime))
    runtime.tally.add(products=1, rows=rows.count)


def send_part(runtime: Runtime, part: Part, preferred: KnownProvider | None) -> None:
    """Compute the product of one part: its request, and the only loop that sends it again.

    Args:
        preferred: the executor to ask first.
    """
    started = clock()
    part.mask()
    record("mask", since=started)
    routes, tally = runtime.routes, runtime.tally
    began = asked_at = time.monotonic()
    deadline = began + runtime.options.deadline_s
    recovery: Recovery | None = None

    def recovering() -> Recovery:
        return recovery or Recovery(runtime, part, preferred, began=began, deadline=deadline)

    while True:
        provider = runtime.choose(part, preferred) if recovery is None and routes.all_up else None
        if provider is None:  # something has failed, or is not known yet
            recovery = recovering()
            provider = recovery.choose()
            asked_at = time.monotonic()
        started = clock()
        patience_s = routes.patience_s(provider, part.index, part.size, left_s=deadline - asked_at)
        try:
            answer = runtime.executor(provider).ask(
                part,
                patience_s=patience_s,
                deadline=deadline,
                since=began,
                meanwhile=partial(_prepare_next, runtime, part),
            )
        except BaseException as error:
            recovery = recovering()
            # the rest of the time was spent waiting for a connection
            recovery.after(error, provider, waited_s=min(patience_s, time.monotonic() - asked_at))
            continue
        finally:
            record("network + product", since=started)
        routes.answered(provider, seconds=answer.seconds, size=part.size)
        if answer.missed and runtime.pads.relays is not None:
            runtime.pads.relays.pause(provider.peer)
        try:
            started = clock()
            if not answer.relayed and not _has_effects(part):
                recovery = recovering()
                complete = recovery.effects_are_there()
                record("wait for effects", since=started)
                if not complete:
                    continue
                started = clock()
            refused = part.open(answer.words, relayed=answer.relayed)
            left: Sequence[int] | None = refused
            if refused:
                recovery = recovering()
                left = correct_or_blame(
                    part, answer.words, refused, partial(recovery.product_refused, provider, answer)
                )
            record("unmask + verify + dequantise", since=started)
            if left is None:
                continue
            answer.confirm()
        finally:
            answer.close()
        tally.add(
            answers_verified=part.count,
            effects_verified=part.count if part.sent.holders else 0,
            rows_relayed=part.count if answer.relayed else 0,
        )
        routes.record_verified(provider, part.sent.holders)
        if recovery is not None:
            recovery.succeeded(provider)
        break
    if refused:
        tally.add(rows_corrected=len(refused) - len(left))
    if left:
        tally.add(rows_repeated=len(left))
        again = [part.start + row for row in left]
        multiply_again(part.rows, again, partial(multiply, runtime, part.index, part.direction))


def _encode(runtime: Runtime, index: GroupIndex, direction: Direction, rows: Rows) -> Part:
    """Encode all rows in the ring, with zero rows up to the bucket, as one part without pads. Also compute the
    expected check value of the product: R applied to the true product, computed with V."""
    preparation, counts = runtime.preparation, rows.counts
    facts = preparation.facts[index] if counts is None else preparation.facts[index].for_rows(counts)
    r, v = preparation.keys.for_rows(index, direction, counts)
    (inputs, outputs), count = facts.columns[direction], rows.count + -rows.count % runtime.options.row_bucket
    encoded = runtime.buffers.matrix(count, inputs)
    expected = torch.empty(count, dtype=torch.int64, device="cpu")
    real, its_value = encoded, expected
    if rows.count < count:
        real, its_value = encoded[: rows.count], expected[: rows.count]
        encoded[rows.count :] = 0
        expected[rows.count :] = 0
        if counts is not None:  # the bucket's zeros follow the last rows, so they belong to the last expert
            counts = (*counts[:-1], counts[-1] + count - rows.count)
    began = clock()
    rows.encode(real, v=v, expected=its_value)
    record("quantise", since=began)

    def second() -> tuple[Column, V]:
        return preparation.second().for_rows(index, direction, counts)

    return Part(index, direction, rows, 0, encoded, r, expected, second, (), outputs, counts)


def _take(runtime: Runtime, part: Part, first: int, rows: int) -> Sequence[Pad]:
    """Take pads for some rows of a part, and burn them."""
    began = clock()
    counts = None if part.counts is None else part.counts_of(first, rows)
    pads = runtime.pads.take(part.index, part.direction, rows, counts=counts)
    record("take pads", since=began)
    return pads


def _cut(runtime: Runtime, whole: Part, *, limit: int, most: int) -> list[Part]:
    """Cut a product into parts of at most `most` rows that every executor accepts as one request. Burns pads for the
    rows, of which one draw has at most `limit`."""
    parts = []
    for first in range(0, whole.count, limit):
        end = min(first + limit, whole.count)
        pads = _take(runtime, whole, first, end - first)
        for start in range(first, end, most):
            size = min(most, end - start)
            mine, pads = cut(pads, size)
            part = replace(
                whole,
                start=whole.start + start,
                encoded=row_range(whole.encoded, start, size),
                expected=row_range(whole.expected, start, size),
                pads=mine,
                counts=whole.counts_of(start, size),
            )
            parts.append(part)
    return parts


def _prepare_next(runtime: Runtime, part: Part) -> None:
    """Work while the answer is awaited: order as many pads as this product took, and expand their keystreams."""
    if part.counts is None:  # the effects of rows for experts depend on counts that are not known yet
        rows = part.rows.count
        runtime.pads.order(part.index, part.direction, rows + -rows % runtime.options.row_bucket)
    for pad in part.pads:
        for share in pad.shares:
            share.keystream.make_ahead(share.first_row + pad.rows, pad.rows)
            if share.block is not None:  # the rows of the second keystream open the answer
                share.block.second.make_ahead(share.first_row, pad.rows)


def _has_effects(part: Part) -> bool:
    """Returns True if every effect has arrived. Takes no lock, so it may return False just after the last arrival."""
    for pad in part.pads:
        for share in pad.shares:
            if share.effect.kept is None:
                return False
    return True
