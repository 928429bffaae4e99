"""One masked, verified product: the normal path, from top to bottom.

    quantise            inf and nan are refused                  core.rows
    take pads           burnt before any row leaves              pools, core.pads
    mask                the rows are `MaskedRows` from here on   core.masked
    send                one round trip, with a deadline          connections.executor_client, past core.gate
    open and check      before any result is used                core.parts, core.verifier

`failover` handles executors and effects that are lost, late or refused, and `faults` handles wrong results. The part is
then sent again. The result is the same bits in every case.

A large product goes out in parts (`part_queue`). Each part is a request with its own rows, pads, deadline and check.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.limits import GroupIndex
from tenant.connections.executor_client import Answer
from tenant.core.masked import cut
from tenant.core.pads import Pad, row_range
from tenant.core.parts import Part
from tenant.core.rows import Rows
from tenant.core.verifier import V
from tenant.masking.backend import multiply_again
from tenant.preparation.prepared import Preparation
from tenant.routing.route import Route
from tenant.routing.routes import Routes
from tenant.session import corrections
from tenant.session.failover import Failover
from tenant.session.options import SessionOptions
from tenant.session.part_queue import multiply_parts, part_rows
from tenant.session.retry import RetryState
from tenant.session.runtime import Runtime
from tenant.session.spans import clock, record
from tenant.session.tally import Tally

_FEW_ROWS = 8  # more rows than this do not leave a ring by chance at two entries


@dataclass(frozen=True)
class Products:
    """Makes products with the connections and pads of one process.

    Args:
        preparation: facts and verification keys of the pinned model.
        options: deadline, row bucket, size of parts.
        routes: the providers that may be asked.
    """

    preparation: Preparation
    options: SessionOptions
    routes: Routes
    runtime: Runtime
    tally: Tally
    failover: Failover

    def multiply(self, index: GroupIndex, direction: Direction, rows: Rows) -> None:
        """Compute one exact product; see `RingProduct.multiply` (`masking.backend`)."""
        if not self.routes.all_up:
            self.routes.check(index)
        whole = self._encode(index, direction, rows)
        self.runtime.prober.connect()
        self.runtime.refresh()
        limit = self.runtime.row_limit(whole.widest)
        if whole.count <= limit and whole.size < 2 * self.options.part_bytes:
            whole.pads = self._take(whole, 0, whole.count)
            self._multiply(whole, None)
        else:
            executors = [self.runtime.executor(route) for route in self.routes.open_for(index, whole.size)]
            multiply_parts(self._cut(whole, limit=limit, executors=len(executors)), executors, self._multiply)
        self.tally.add(products=1, rows=rows.count)

    def _multiply(self, part: Part, preferred: Route | None) -> None:
        """Compute the product of one part. `preferred` is the executor to ask first."""
        began = clock()
        part.mask()
        record("mask", since=began)
        retry = RetryState(self.options, self.runtime)
        while True:
            route = self.failover.choose(part, preferred, retry)
            began = clock()
            try:
                answer = self._send(route, part, retry)
            except BaseException as error:
                self.failover.after(error, route, part, retry)
                continue
            finally:
                record("network + product", since=began)
            try:
                began = clock()
                complete = answer.relayed or self.failover.effects_are_there(part, retry)
                record("wait for effects", since=began)
                if not complete:
                    continue
                began = clock()
                refused = part.open(answer.words, relayed=answer.relayed)
                left = self._corrected(route, part, answer, refused, retry) if refused else []
                record("unmask + verify + dequantise", since=began)
                if left is None:
                    continue
                answer.confirm()
            finally:
                answer.close()
            self.tally.add(
                answers_verified=part.count,
                effects_verified=part.count if part.sent.holders else 0,
                rows_relayed=part.count if answer.relayed else 0,
            )
            self.routes.record_verified(route, part.sent.holders)
            retry.succeeded(route, self.tally)
            break
        if left:
            self.tally.add(rows_repeated=len(left))
            again = [part.start + row for row in left]
            multiply_again(part.rows, again, partial(self.multiply, part.index, part.direction))

    def _corrected(
        self, route: Route, part: Part, answer: Answer, refused: Sequence[int], retry: RetryState
    ) -> Sequence[int] | None:
        """Handle rows that failed the check. Returns the rows that left a narrow ring too often to be corrected, or
        None if a provider was at fault and the part has to be sent again."""
        may_wrap = corrections.may_wrap(part, refused)
        is_fault = partial(self.failover.faults.product_refused, route, part, answer, retry, may_wrap=may_wrap)
        # an outlier channel may wrap in all rows, but few rows wrap at two entries, and to look for them takes long
        left = corrections.correct(part, refused, answer.words, entries=1) if may_wrap else refused
        suspicious = not may_wrap or len(left) > _FEW_ROWS
        if suspicious and is_fault():
            return None
        left = corrections.correct(part, left, answer.words)
        if left and not suspicious and is_fault():
            return None
        self.tally.add(rows_corrected=len(refused) - len(left))
        return left

    def _encode(self, index: GroupIndex, direction: Direction, rows: Rows) -> Part:
        """Encode all rows in the ring, with zero rows up to the bucket, as one part without pads. Also compute the
        expected check value of the product: R applied to the true product, computed with V."""
        facts = self.preparation.facts[index].for_rows(rows.counts)
        r, v = self.preparation.keys.for_rows(index, direction, rows.counts)
        (inputs, outputs), count, counts = facts.columns[direction], self._bucketed(rows), rows.counts
        encoded = self.runtime.buffers.matrix(count, inputs)
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
        second = partial(self._second, index, direction, counts)
        return Part(index, direction, rows, 0, encoded, r, expected, second, (), outputs, counts)

    def _bucketed(self, rows: Rows) -> int:
        """Return the number of rows that are sent: that of `rows`, rounded up to a multiple of `row_bucket`."""
        return rows.count + -rows.count % self.options.row_bucket

    def _take(self, part: Part, first: int, rows: int) -> Sequence[Pad]:
        """Take pads for some rows of a part, and burn them."""
        began = clock()
        pads = self.runtime.take(part.index, part.direction, rows, counts=part.counts_of(first, rows))
        record("take pads", since=began)
        return pads

    def _cut(self, whole: Part, *, limit: int, executors: int) -> list[Part]:
        """Cut a product into parts that every executor accepts as one request. Burns pads for the rows."""
        most = part_rows(whole.count, whole.size, part_bytes=self.options.part_bytes, executors=executors)
        parts = []
        for first in range(0, whole.count, limit):
            end = min(first + limit, whole.count)
            pads = self._take(whole, first, end - first)
            for start in range(first, end, most):
                size = min(most, end - start)
                mine, pads = cut(pads, size)
                parts.append(_rows_of(whole, start, size, mine))
        return parts

    def _second(self, index: GroupIndex, direction: Direction, counts: Counts | None) -> tuple[Column, V]:
        return self.preparation.second().for_rows(index, direction, counts)

    def _send(self, route: Route, part: Part, retry: RetryState) -> Answer:
        """Return an executor's answer, unverified. Raises what `ExecutorClient.ask` raises."""
        retry.patience_s = self.routes.patience_s(route, part.index, part.size, left_s=retry.deadline - retry.asked_at)
        answer = self.runtime.executor(route).ask(
            part,
            patience_s=retry.patience_s,
            deadline=retry.deadline,
            since=retry.began,
            meanwhile=partial(self._prepare_next, part),
        )
        self.routes.answered(route, seconds=answer.seconds, size=part.size)
        if answer.missed and self.runtime.relays is not None:
            self.runtime.relays.pause(route.peer)
        return answer

    def _prepare_next(self, part: Part) -> None:
        """Work while the answer is awaited: order as many pads as this product took, and expand their keystreams."""
        if part.counts is None:  # the effects of rows for experts depend on counts that are not known yet
            self.runtime.order(part.index, part.direction, self._bucketed(part.rows))
        for pad in part.pads:
            for share in pad.shares:
                share.keystream.make_ahead(share.first_row + pad.rows, pad.rows)
                if share.block is not None:  # the rows of the second keystream open the answer
                    share.block.second.make_ahead(share.first_row, pad.rows)


def _rows_of(part: Part, first: int, rows: int, pads: Sequence[Pad]) -> Part:
    """Return a part with some rows of a part that is not masked yet."""
    return replace(
        part,
        start=part.start + first,
        encoded=row_range(part.encoded, first, rows),
        expected=row_range(part.expected, first, rows),
        pads=pads,
        counts=part.counts_of(first, rows),
    )
