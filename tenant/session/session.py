"""A masked, verified session with the providers of a federation, and the way of one product.

    Session     opens and closes, counts, notices forks
    multiply    one product, from top to bottom:
        encode              quantises all rows; inf and nan are refused      core.parts
        take pads           burnt before any row leaves                      supply, core.pads
    send_part   the rows of one request
        mask                the rows are `MaskedRows` from here on           core.masked
        choose              an executor that may see them                    failover, routing.routes
        ask                 one round trip, with a deadline, past `Gate`     connections.executor_client
        open and check      before any result is used                        core.parts, core.verifier

A large product goes out in parts (`part_queue`): each is a request with its own rows, pads, deadline and check. A few
rows take the same steps in a `lane`, with all that does not change prepared. Whatever is unusual is handed to the
request's `failover.Attempts`, which decide what is tried next, and the part is sent again. The result is the same bits
in every case.

Several threads may multiply at the same time, also by the same layer group. No thread holds a lock while it waits for
the network. The secret, the counters, the pools and the connections belong to one process (`runtime`): after a fork the
child starts with fresh ones (rules 2 and 12).
"""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.passes import vector
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.federation import Federation
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network.dial import Traffic
from tenant.connections.executor_client import ExecutorClient
from tenant.connections.helper_client import HelperClient
from tenant.core.masked import cut
from tenant.core.pads import Pad, call_in_child, generation
from tenant.core.parts import FloatRows, Part, Rows
from tenant.masking.backend import RingRows, multiply_again
from tenant.masking.registry import session_scheme
from tenant.options import SessionOptions
from tenant.preparation.prepared import Preparation
from tenant.routing.known_provider import KnownProvider
from tenant.routing.probing import check_expected
from tenant.routing.routes import Routes
from tenant.session.failover import Attempts
from tenant.session.lane import Attempt, Lane, Unfinished, may_repeat
from tenant.session.part_queue import multiply_parts, part_rows, run_beside
from tenant.session.refused import correct_or_blame
from tenant.session.runtime import Runtime, forget_all
from tenant.session.supply import most_rows
from tenant.session.tally import Ledger, Tally, before_mask, clock, record, sights


class Session:
    """A masked, verified session with the providers of a federation. Thread-safe. `store`: the tenant's own copy of the
    weights, for schemes that need it. Raises `RoleConflictError`, `ConfigError`: the scheme cannot be used with these
    providers (`Scheme.check`); `UncoveredError`: no provider in the federation file serves some layers of the model."""

    def __init__(
        self,
        federation: Federation,
        preparation: Preparation,
        *,
        options: SessionOptions,
        store: WeightStore | None = None,
    ) -> None:
        self._scheme = session_scheme(options.masking)
        self._scheme.check(federation, ring_bits=options.ring_bits)
        check_expected(federation, preparation.manifest)
        self.preparation = preparation
        self.routes = Routes(federation, with_helpers="helper" in self._scheme.roles, tolerance=options.tolerance)
        self._federation, self._options, self._store = federation, options, store
        self._tally = Tally()
        self._lock = threading.RLock()  # held while the session opens or closes
        self._closed = False
        self._runtime: Runtime | None = None
        self._finalizer: weakref.finalize[..., Session] | None = None
        _sessions.add(self)

    def multiply(self, index: GroupIndex, direction: Direction, rows: Rows) -> None:
        """Compute one exact product, masked and verified."""
        multiply(self._open(), index, direction, rows)

    def forward_few(self, index: GroupIndex, facts: GroupFacts, x: Tensor, dtype: torch.dtype) -> list[Tensor] | None:
        """See `Backend.forward_few`. `facts`: of the group, narrowed for the scheme."""
        generation()
        runtime, width = self._runtime or self._open(), x.shape[-1]
        lane = runtime.lanes.get((index, FORWARD, x.numel() // width))
        if lane is None or lane.few.bound is not facts.bounds[FORWARD]:
            return None
        if (made := lane.outputs(x, facts.entry.outputs, dtype)) is None:
            return None
        outputs, places = made
        if (unfinished := lane.multiply(places)) is None:
            return outputs
        rows = FloatRows(facts, FORWARD, [x.view(-1, width)], [out.view(-1, out.shape[-1]) for out in outputs])
        return outputs if _finish(runtime, lane, unfinished, rows) else None

    def multiply_all(self, products: Sequence[tuple[GroupIndex, Direction, Rows]]) -> None:
        """Compute several products at the same time, each as `multiply` does."""
        runtime, inference = self._open(), torch.is_inference_mode_enabled()

        def work(product: tuple[GroupIndex, Direction, Rows]) -> None:
            with torch.inference_mode(inference), torch.no_grad():  # threads inherit no modes
                multiply(runtime, *product)

        first, *others = products
        jobs = [min(runtime.flights, key=lambda worker: worker.unfinished).submit(work, product) for product in others]
        run_beside(jobs, partial(multiply, runtime, *first))

    def product(self, index: GroupIndex, direction: Direction, rows: Tensor, *, counts: Counts | None = None) -> Tensor:
        """Multiply integer rows, int32 `[r, d]`, whose true product fits int32. Returns int32 `[r, o]`. `counts`: rows
        of every expert of a stack, by which they are sorted; None to multiply by the whole matrix."""
        outputs = self.preparation.facts[index].for_rows(counts).outputs(direction)
        ring_rows = RingRows(rows, outputs=outputs, counts=counts, ring_bits=self._options.ring_bits)
        self.multiply(index, direction, ring_rows)
        return ring_rows.product

    @property
    def runtime(self) -> Runtime:
        """The secret, pads, threads and connections of this process. They are made at the first access."""
        return self._open()

    def ledger(self) -> Ledger:
        """Return the counters of the session so far."""
        with self._tally.lock:
            ledger = replace(self._tally.counts)
        routes, runtime = self.routes, self._runtime
        executors = () if runtime is None else tuple(runtime.executors.values())
        helpers = () if runtime is None else runtime.helpers
        clients: tuple[ExecutorClient | HelperClient, ...] = (*executors, *helpers)
        traffic = {one.provider: sum((c.traffic for c in one.channels), Traffic()) for one in clients}
        up, seeds = (
            sum((traffic[one.provider] for one in of), Traffic()) for of in (clients[: len(executors)], helpers)
        )
        ledger.executor_round_trips, ledger.bytes_to_executors, ledger.bytes_from_executors = astuple(up)
        ledger.helper_round_trips, ledger.bytes_to_helpers, ledger.bytes_from_helpers = astuple(seeds)
        ledger.providers = tuple(
            provider.figures(
                quarantined=provider.peer in routes.quarantined,
                wait=None if runtime is None else runtime.notices.wait_for(provider.peer.label),
                traffic=traffic.get(provider, Traffic()),
            )
            for provider in (*routes.executors, *routes.helpers)
        )
        pools = () if runtime is None else runtime.pads.pools
        ledger.pads_taken += sum(p.taken for p in pools)
        ledger.pads_ready = sum(p.ready() for p in pools)
        return ledger

    def close(self) -> None:
        """Close connections and delete the secret. A product that another thread waits for fails."""
        generation()  # in a forked child, drops what the parent has opened
        with self._lock:
            self._closed = True
            runtime, self._runtime = self._runtime, None
            if self._finalizer is not None:
                self._finalizer.detach()
                self._finalizer = None
        if runtime is not None:
            runtime.close()

    def _open(self) -> Runtime:
        generation()  # in a forked child, this drops the parent's pads and connections
        if (runtime := self._runtime) is not None:  # the common case, without a lock
            return runtime
        with self._lock:
            if self._closed:
                raise SymbiosisError("this session is closed; load the model again")
            if self._runtime is None:
                parts = self._federation, self.preparation, self._scheme, self._options, self._store
                self._runtime = Runtime(*parts, self.routes, self._tally)
                # closes the connections if the caller does not call `backend_of(model).close()`
                self._finalizer = weakref.finalize(self, self._runtime.close_in_background)
                self._finalizer.atexit = False  # `runtime` then closes the connections, and waits
            return self._runtime

    def _reset_after_fork(self) -> None:
        """In a forked child, drop all state of the parent, and replace locks that its threads may have held."""
        self._lock = threading.RLock()
        self._tally.lock = threading.Lock()  # a thread of the parent may have held it
        self.routes.reset_after_fork()
        if self._runtime is not None:
            self._runtime.abandon()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._runtime = self._finalizer = None


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _reset_all_after_fork() -> None:
    forget_all()
    for session in _sessions:
        session._reset_after_fork()


call_in_child(_reset_all_after_fork)


def multiply(runtime: Runtime, index: GroupIndex, direction: Direction, rows: Rows) -> None:
    """Compute one exact product; see `RingProduct.multiply` (`masking.backend`)."""
    if (lane := runtime.lanes.get((index, direction, rows.count))) is not None and type(rows) is FloatRows:
        places = lane.places(rows)
        unfinished = Unfinished() if places is None else lane.multiply(places)
        if unfinished is None or _finish(runtime, lane, unfinished, rows):
            return
    routes, part_bytes = runtime.routes, runtime.options.part_bytes
    if not routes.all_up:
        routes.check(index)
    whole = _encode(runtime, index, direction, rows)
    if not routes.all_up:
        runtime.prober.connect()
    if runtime.version != routes.version:
        runtime.refresh()
    limit = most_rows(routes, whole.widest)
    if whole.count <= limit and whole.size < 2 * part_bytes:
        whole.pads = _take(runtime, whole, 0, whole.count)
        send_part(runtime, whole)
    else:
        executors = [runtime.executors[provider] for provider in routes.open_for(index, whole.size)]
        most = part_rows(whole.count, whole.size, part_bytes=part_bytes, executors=len(executors))
        multiply_parts(_cut(runtime, whole, limit=limit, most=most), executors, partial(send_part, runtime))
    _count(runtime, rows)


def _finish(runtime: Runtime, lane: Lane, unfinished: Unfinished, rows: FloatRows) -> bool:
    """Finish a product that a lane has masked. Returns False if it must be computed from the start."""
    if unfinished.masked is None:
        if lane.ended:
            runtime.lanes.pop((*lane.place, rows.count), None)  # another thread may have ended it
        return False
    send_part(runtime, lane.part(rows, unfinished), attempt=unfinished.attempt)
    _count(runtime, rows)
    return True


def _count(runtime: Runtime, rows: Rows) -> None:
    with runtime.tally.lock:
        runtime.tally.counts.products += 1
        runtime.tally.counts.rows += rows.count


def send_part(
    runtime: Runtime, part: Part, preferred: KnownProvider | None = None, *, attempt: Attempt | None = None
) -> None:
    """Compute the product of one part: the only loop that sends a request again. `attempt`: the first, if a lane has
    made it."""
    if not part.is_masked:
        started = clock()
        if sights:
            before_mask(part.encoded)
        part.mask()
        record("mask", since=started)
    attempts = Attempts(runtime, part, preferred, attempt)
    while True:
        provider = attempts.choose()
        started = clock()
        try:
            answer = attempts.ask(provider, meanwhile=partial(_prepare_next, runtime, part))
        except BaseException as error:
            attempts.failed(provider, error)
            continue
        finally:
            record("network + product", since=started)
        if not attempts.effects_are_there():
            continue
        started = clock()
        refused = part.open(answer.words)
        left: Sequence[int] | None = refused
        if refused:
            left = correct_or_blame(part, answer.words, refused, partial(attempts.refused, provider, answer.words))
        record("unmask + verify + dequantise", since=started)
        if left is not None:
            break
    usual = attempts.succeeded(provider, corrected=len(refused) - len(left), repeated=len(left))
    if usual and may_repeat(part, runtime.routes, runtime.pads):
        runtime.add_lane(part, provider)
    if left:
        again = [part.start + row for row in left]
        multiply_again(part.rows, again, partial(multiply, runtime, part.index, part.direction))


def _encode(runtime: Runtime, index: GroupIndex, direction: Direction, rows: Rows) -> Part:
    """Encode all rows, with zero rows up to the bucket, as one part without pads, and what its check expects."""
    counts = rows.counts
    plan = runtime.plan(index, direction, by_expert=counts is not None)
    # rows for single experts come in multiples of the bucket
    count = rows.count + (-rows.count % runtime.options.row_bucket if counts is None else 0)
    encoded, expected = runtime.buffers.matrix(count, plan.inputs), vector(count, np.int64)
    began = clock()
    if rows.count == count:
        rows.encode(encoded, v=plan.v, expected=expected)
    else:
        rows.encode(encoded[: rows.count], v=plan.v, expected=expected[: rows.count])
        encoded[rows.count :] = 0
        expected[rows.count :] = 0
    record("quantise", since=began)
    return Part(plan, rows, 0, encoded, expected, (), counts)


def _take(runtime: Runtime, part: Part, first: int, rows: int) -> Sequence[Pad]:
    began = clock()
    pads = runtime.pads.take(part.index, part.direction, rows, counts=part.counts_of(first, rows))
    record("take pads", since=began)
    return pads


def _cut(runtime: Runtime, whole: Part, *, limit: int, most: int) -> list[Part]:
    """Cut a product into parts of at most `most` rows. Burns their pads, of which one draw has at most `limit`."""
    parts = []
    for first in range(0, whole.count, limit):
        end = min(first + limit, whole.count)
        pads = _take(runtime, whole, first, end - first)
        for start in range(first, end, most):
            size = min(most, end - start)
            mine, pads = cut(pads, size)
            parts.append(whole.rows_from(start, size, mine))
    return parts


def _prepare_next(runtime: Runtime, part: Part) -> None:
    """Work while the answer is awaited: order as many pads as this product took, and expand their keystreams."""
    if part.counts is None:  # the effects of rows for experts depend on counts that are not known yet
        rows = part.rows.count
        runtime.pads.order(part.index, part.direction, rows + -rows % runtime.options.row_bucket)
    for pad in part.pads:
        for share in pad.shares:
            share.keystream.make_ahead(share.first_row + pad.rows, pad.rows)
