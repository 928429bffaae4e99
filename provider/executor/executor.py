"""The executor: takes requests from the gateway's threads, batches them per layer group, computes and answers.

Theory of operation. One thread owns the model and an `Inbox`. The thread passes arrived requests to a `Scheduler`,
which picks the rows of the next product. These rows are joined to one matrix without padding and multiplied once; the
answers are row slices of the product, without a copy. A request that is larger than a slice is multiplied piece by
piece into its own matrix, and other requests are multiplied between the pieces. A helper's effect is the product of
keystream rows, which another thread makes one slice ahead. Rows for one expert of a stack are sorted by expert first,
so several tenants' rows for an expert share its product. An idle executor loads layer groups in small steps.

A gateway thread in this process that sends a few rows to an idle executor computes the product itself, while it holds
the executor's lock (`_serve_inline`); for a request like an earlier one with one compiled call (`multiply_at_once`).
Whenever the executor is busy, or another tenant waits or is expected, the request is queued (docs/adr/9-lane.md).

The executor keeps nothing of an answered request. An answer that is a small part of a large product is copied, so that
a tenant that reads slowly keeps its own rows in memory only.
"""

import contextlib
import functools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from provider import logs
from provider.config.schema import ProviderConfig
from provider.executor.queues import (
    NOTHING,
    AddressedAnswer,
    Cancel,
    ExecutorAnswer,
    ExecutorReport,
    Inbox,
    InboxMessage,
    KeystreamMaker,
    ProductRequest,
    RepeatedProduct,
    ReportRequest,
    Stop,
    Wake,
    row_load,
)
from provider.products.model import Operands, ServedModel, open_store
from provider.scheduler.jobs import ARITHMETIC_ROWS, Job, Key, Piece
from provider.scheduler.scheduler import Scheduler
from symbiosis_priv.arithmetic.segments import Counts, clip, merge
from symbiosis_priv.errors import CheckpointError, DeviceLostError, RankLostError
from symbiosis_priv.kernels.kernel import PayloadProduct
from symbiosis_priv.network import wire

log = logs.EventLog(__name__)

_KEYSTREAM_SLICE = 7 << 20  # bytes: with what a cipher needs beside them, below a power of two
_SHARED_BYTES = 1 << 20  # answers are not copied from products of up to this size, which the last answer keeps alive
_SHARED_TIMES = 4  # and not from products of at most this many times the answer's size
_RECORDED_TOGETHER = 32  # products of repeated requests
_BRIEF_BYTES = 1 << 18  # copied while the GIL is held


@dataclass(kw_only=True, eq=False)
class _Job(Job):
    """One request in the executor, of a sender that gets the answer."""

    sender: Hashable
    request: wire.Execute | wire.Effect
    payload: memoryview | None  # the request's rows; empty for an effect, None after the answer
    made: memoryview = NOTHING  # keystream rows of an effect that are not multiplied yet: `ready - taken` rows
    ordered: int = 0  # number of keystream rows that were ordered from the `KeystreamMaker`
    result: memoryview | None = None  # all rows of the product, for a request that is multiplied piece by piece


class Executor:
    """Serves products until stopped, and then closes the inbox. With `warm_up`, it loads every layer group while it is
    idle, and not on first use."""

    def __init__(self, model: ServedModel, *, inbox: Inbox, warm_up: bool = False) -> None:
        self._model = model
        self._inbox = inbox
        self._cold: Iterator[None] | None = model.operands.warm_up() if warm_up else None
        self._scheduler: Scheduler[_Job] = Scheduler()
        served = model.served
        self._report = ExecutorReport(first_group=served.start, groups=len(served), rows_by_group=[0] * len(served))
        self._jobs: dict[Hashable, _Job] = {}  # by sender: each sender has one request at a time
        self._stopped = False
        self._started = time.monotonic()
        self._turn = threading.Lock()  # guards the whole state of the executor
        self._resting_since: float | None = None  # set while the executor waits for messages
        self._resting_until = math.inf  # the next deadline of the scheduler
        self._broken: BaseException | None = None  # an exception in another thread
        # products: their pieces, number of rows and of matrices, begin and end by `time.monotonic`
        self._unrecorded: deque[tuple[list[Piece[_Job]], int, int, float, float]] = deque()
        self._repeated: list[tuple[_Job, float, float, float]] = []  # the same: their jobs, arrival, begin and end

        @functools.cache  # the gateway has checked the key: there are few
        def load_of(key: Key, request: type[wire.Binding]) -> tuple[int, int]:
            entry = model.manifest.entry(key.group, by_expert=key.by_expert)
            return row_load(request, entry.columns(key.direction))

        self._load_of = load_of
        inbox.set_inline_handler(self._serve_inline, self._repeat)

    def run(self) -> None:
        """Serve until `stop`. Every request that arrived before `stop` is answered."""
        with contextlib.closing(self._inbox), torch.no_grad():
            self._maker: KeystreamMaker[_Job] = KeystreamMaker(lambda: self._inbox.post(Wake()))
            try:
                while (pause := self._take_turn()) is not None:
                    if pause:
                        self._inbox.wait(pause if pause < math.inf else None)
                self._model.operands.close()
            finally:
                with self._turn:
                    self._resting_since = None  # senders have ways to multiply at once that outlive the executor
                self._maker.close()

    def stop(self) -> None:
        """Ask `run` to end. Can be called from any thread."""
        self._inbox.post(Stop())

    def _take_turn(self) -> float | None:
        """Take in all arrived messages and run one batch, in the executor's own thread. Returns the seconds to wait for
        messages, or None at the end."""
        with self._turn:
            if self._broken is not None:
                raise self._broken
            self._begin_turn()
            if self._stopped and not self._jobs:
                return None
            for sender, envelope, payload in self._inbox.arrived():
                match envelope:
                    case ProductRequest():
                        self._accept(self._job_of(sender, envelope, payload))
                    case Cancel():
                        if (job := self._jobs.get(sender)) is not None:  # otherwise it has been answered
                            self._report.cancelled += 1
                            self._fail(job, wire.ErrorCode.BUSY, "the tenant has left")
                    case ReportRequest():
                        report = self._report
                        report.groups_loaded = self._model.groups_loaded
                        report.waiting = self._scheduler.waiting()
                        with contextlib.suppress(OSError):  # 0 on systems without /proc
                            pages = int(Path("/proc/self/statm").read_text().split()[1])
                            report.resident = pages * os.sysconf("SC_PAGE_SIZE")
                        report.uptime = time.monotonic() - self._started
                        self._inbox.answer([(sender, ExecutorAnswer(b"", memoryview(msgspec.json.encode(report)), 0))])
                    case Wake():
                        self._take_keystream()
                    case Stop():
                        self._stopped = True
            now = time.monotonic()
            for job in self._scheduler.expire(now):
                self._report.late += 1
                self._fail(job, wire.ErrorCode.BUSY, "the executor is late; ask again later")
            if pieces := self._scheduler.take(now):
                self._run_batch(pieces)
                self._record_products()
                return 0.0
            if self._stopped and not self._jobs:
                return 0.0
            if self._cold and not self._stopped:
                self._warm_up(self._cold)
                return 0.0
            return self._rest(now)

    def _rest(self, now: float) -> float:
        """Begin to rest. Returns the seconds until the scheduler's next deadline."""
        until = self._scheduler.next_deadline(now)
        self._resting_until = math.inf if until is None else until
        self._resting_since = time.monotonic()
        return max(0.0, self._resting_until - self._resting_since)

    def _begin_turn(self) -> None:
        if self._resting_since is not None:
            self._report.idle += time.monotonic() - self._resting_since
            self._resting_since = None
        self._record_products()

    def _serve_inline(self, message: InboxMessage) -> bool:
        """Serve a request of few rows in the thread that sends it. Returns False if the request must be queued. Works
        only while the executor's own thread rests and every other request waits: no request is overtaken."""
        if self._resting_since is None or not self._model.operands.any_thread:
            return False
        work = message.envelope
        # the keystream of an effect is made by another thread
        if not isinstance(work, ProductRequest) or work.stage != "inference" or isinstance(work.request, wire.Effect):
            return False
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self._resting_since is None:
                return False
            self._begin_turn()
            job = self._job_of(message.sender, work, message.payload)
            if self._scheduler.is_alone(job):
                self._jobs[job.sender] = job
                self._run_batch(self._scheduler.take_alone(job))
                self._resting_since = time.monotonic()  # until the same deadline: nothing waits in the scheduler
            else:
                self._accept(job)
                if pieces := self._scheduler.take(time.monotonic()):
                    self._run_batch(pieces)
                    self._record_products()
                wakes = self._resting_until
                self._rest(time.monotonic())
                if self._resting_until < wakes:  # the executor's own thread would otherwise sleep past the new deadline
                    self._inbox.post(Wake())
        except BaseException as error:
            self._end_with(error)
        finally:
            self._turn.release()
        return True

    def _repeat(self, like: ProductRequest) -> RepeatedProduct | None:
        """See `queues.Repeat`: products of few rows, for inference, on weights that any thread may use."""
        request = like.request
        if isinstance(request, wire.Effect) or like.stage != "inference" or request.rows > ARITHMETIC_ROWS:
            return None
        product = self._model.few(request) if self._model.operands.any_thread else None
        if product is None:
            return None
        # one job serves all products of the sender: making one takes as long as a check
        job = self._job_of(None, like, NOTHING)
        return RepeatedProduct(functools.partial(self.multiply_at_once, job, product), self._record_repeated)

    def multiply_at_once(self, job: _Job, product: PayloadProduct, arrival: float, payload: int, answer: int) -> bool:
        """Compute a product in the thread of its sender: `_serve_inline` for a request that need not be queued, without
        a message. Returns False, and changes nothing, unless the executor rests and nobody waits or is expected. `job`
        is that of an earlier request of the sender, whose product was answered. The scheduler learns of the product
        later: it would choose nothing else meanwhile."""
        if self._resting_since is None or not self._inbox.is_empty or not self._turn.acquire(blocking=False):
            return False
        try:
            if (since := self._resting_since) is None or not self._scheduler.is_alone(job):
                return False
            if self._unrecorded:
                self._record_products()
            begun = time.monotonic()
            try:
                product(payload, answer)
            except Exception as error:  # for example lack of memory: the executor's own thread takes the request
                log.failure("product_at_once_failed", error, group=job.key.group)
                return False
            self._resting_since = ended = time.monotonic()  # until the same deadline: nothing waits in the scheduler
            self._report.idle += begun - since
            self._repeated.append((job, arrival, begun, ended))
            return True
        except BaseException as error:
            self._end_with(error)
            raise
        finally:
            self._turn.release()

    def _record_repeated(self) -> None:
        """Record products of repeated requests, many at a time: one takes much longer alone, when its code and data
        have left the caches."""
        if len(self._repeated) >= _RECORDED_TOGETHER:
            self.after_answer()

    def after_answer(self) -> None:
        """Record the product of a request that was served in its sender's thread, after the answer was sent. Does
        nothing if another thread has the turn: that thread records the product."""
        if (self._unrecorded or self._repeated) and self._turn.acquire(blocking=False):
            try:
                self._record_products()
            except BaseException as error:
                self._end_with(error)
            finally:
                self._turn.release()

    def _end_with(self, error: BaseException) -> None:
        """Let the executor's own thread raise an exception of another thread, and end."""
        self._broken = error
        self._inbox.post(Wake())

    # Messages

    def _job_of(self, sender: Hashable, work: ProductRequest, payload: memoryview) -> _Job:
        request = work.request
        key = Key(request.group, request.direction, request.arithmetic, request.counts is not None, work.narrow)
        row_work, row_cost = self._load_of(key, type(request))
        return _Job(
            tenant=work.tenant,
            stage=work.stage,
            key=key,
            rows=request.rows,
            row_work=row_work,
            row_cost=row_cost,
            arrival=work.arrival,
            deadline=work.deadline,
            matrices=_matrices(request.counts),
            weight=work.weight,
            ready=0 if isinstance(request, wire.Effect) else request.rows,
            sender=sender,
            request=request,
            payload=payload,
        )

    def _accept(self, job: _Job) -> None:
        self._jobs[job.sender] = job
        self._scheduler.put(job)
        self._order_keystream(job)

    # Keystream

    def _order_keystream(self, job: _Job) -> None:
        """Order the next keystream slice of an effect, which is made while the slice before is multiplied."""
        if not isinstance(job.request, wire.Effect) or job.left or job.ordered == job.rows:
            return
        by_expert = job.request.counts is not None
        inputs, _ = self._model.manifest.entry(job.request.group, by_expert=by_expert).columns(job.request.direction)
        rows = min(max(1, _KEYSTREAM_SLICE // (wire.RING32.size(1, inputs))), self._scheduler.room(job))
        if job.ordered - job.taken > rows:
            return
        left = job.rows - job.ordered
        rows = math.ceil(left / math.ceil(left / rows))  # slices of about equal size
        ordered = msgspec.structs.replace(job.request, first_row=job.request.first_row + job.ordered, rows=rows)
        job.ordered += rows
        self._maker.order(job, lambda: self._model.mask_rows(ordered))

    def _take_keystream(self) -> None:
        for job, rows in self._maker.made():
            if job.left:
                continue
            if isinstance(rows, Exception):
                self._fail_batch([job], rows)
                continue
            job.made = _joined([job.made, wire.RING32.pack(rows)])
            self._scheduler.make_ready(job, len(rows))
            self._order_keystream(job)

    # Products

    def _warm_up(self, cold: Iterator[None]) -> None:
        try:
            next(cold)
        except (DeviceLostError, RankLostError):
            raise
        except StopIteration:
            self._cold = None
            log.info("warmed_up", groups=self._model.groups_loaded)
        except Exception as error:  # groups are loaded on first use from now on, and errors reach the tenant
            self._cold = None
            log.failure("warm_up_failed", error)
            self._model.require_device()

    def _run_batch(self, pieces: list[Piece[_Job]]) -> None:
        try:
            key = pieces[0].job.key
            parts, each = [self._rows(piece) for piece in pieces], [piece.rows for piece in pieces]
            count = sum(each)
            encoding = wire.BYTES24 if key.narrow else wire.encoding_of(key.arithmetic)
            if key.by_expert or key.arithmetic != "ring" or not self._model.operands.joins:
                parts, each = [_joined(parts)], [count]
            rows, *more = [encoding.unpack(part, rows=rows) for part, rows in zip(parts, each, strict=True)]
            begun = time.monotonic()
            counts: Counts | None = None
            order: Tensor | None = None  # sorts the rows by expert; None if they are sorted already
            if key.by_expert:
                split = [clip(piece.job.request.counts or (), piece.start, piece.rows) for piece in pieces]
                counts, order = (split[0], None) if len(split) == 1 else merge(split)
            if order is not None:
                rows = rows[order]
            product = self._model.product(
                rows,
                index=key.group,
                direction=key.direction,
                arithmetic=key.arithmetic,
                counts=counts,
                ring_bits=max(piece.job.request.ring_bits for piece in pieces),
                more=more,
            )
            if order is not None:
                product = torch.empty_like(product).index_copy_(0, order, product)
        except RankLostError:  # the group of ranks has ended, and this process must end too
            raise
        except Exception as error:  # for example lack of memory: the next batch may succeed
            self._fail_batch([piece.job for piece in pieces], error)
            self._model.require_device()
            return
        del rows, more, parts  # the executor must not hold a request's memory when it answers
        self._unrecorded.append((pieces, count, _matrices(counts), begun, time.monotonic()))
        self._hand_out(pieces, product, encoding)

    def _hand_out(self, pieces: list[Piece[_Job]], product: Tensor, encoding: wire.Encoding) -> None:
        row_bytes = encoding.size(1, product.shape[1])
        body, start = encoding.pack(product), 0
        answers: list[AddressedAnswer] = []
        for piece in pieces:
            job, rows = piece.job, piece.rows
            own = body[start : start + rows * row_bytes]
            start += len(own)
            if rows == job.rows:
                shared = len(body) > max(_SHARED_BYTES, _SHARED_TIMES * len(own))
                if shared:
                    _fill(copied := _empty(len(own)), own)
                    own = copied
                answers.append(self._answer_of(job, own))
                continue
            if job.result is None:
                job.result = _empty(job.rows * row_bytes)
            _fill(job.result[piece.start * row_bytes : piece.stop * row_bytes], own)
            if piece.last:
                answers.append(self._answer_of(job, job.result))
            else:
                self._order_keystream(job)
        if answers:
            self._inbox.answer(answers)

    def _record_products(self) -> None:
        """Record finished products in the scheduler and the report. Their answers do not wait for it."""
        while self._unrecorded:
            self._record(*self._unrecorded.popleft())
        for job, arrival, begun, ended in self._repeated:
            job.arrival, job.taken, job.left = arrival, 0, False
            self._record(self._scheduler.take_alone(job), job.rows, 1, begun, ended)
        self._repeated.clear()

    def _record(self, pieces: list[Piece[_Job]], rows: int, matrices: int, begun: float, ended: float) -> None:
        report, seconds = self._report, ended - begun
        self._scheduler.done(pieces, now=ended, seconds=seconds, matrices=matrices)
        report.seconds += seconds
        report.rows_by_group[pieces[0].job.request.group - report.first_group] += rows
        report.batch_rows.observe(rows)
        report.batch_requests.observe(len(pieces))
        for job, start, _ in pieces:
            if not start:
                report.waits[job.stage].observe(begun - job.arrival)

    def _rows(self, piece: Piece[_Job]) -> memoryview:
        """The rows of a piece, without a copy."""
        job = piece.job
        if isinstance(job.request, wire.Execute):
            assert job.payload is not None  # None only after the answer
            row_bytes = len(job.payload) // job.rows
            return job.payload[piece.start * row_bytes : piece.stop * row_bytes]
        size = piece.rows * (len(job.made) // (job.ready - piece.start))
        rows, job.made = job.made[:size], job.made[size:]
        return rows

    def _fail_batch(self, jobs: list[_Job], error: Exception) -> None:
        """Answer jobs whose product failed. The log holds the reason; the tenants' answers do not."""
        log.failure("batch_failed", error, group=jobs[0].request.group, requests=len(jobs))
        self._report.failed += len(jobs)
        for job in jobs:
            self._fail(job, wire.ErrorCode.INTERNAL, "the executor failed; the operator's log has the reason")

    def _fail(self, job: _Job, code: wire.ErrorCode, detail: str) -> None:
        self._scheduler.drop(job)
        job.left = True
        self._inbox.answer([self._answer_of(job, failure=wire.encode(wire.Failure(code=code, detail=detail)))])

    def _answer_of(self, job: _Job, product: memoryview = NOTHING, *, failure: bytes = b"") -> AddressedAnswer:
        """The one answer of a job. The executor holds no memory of the job when it sends the answer."""
        del self._jobs[job.sender]
        job.payload = job.result = None
        job.made = NOTHING
        return job.sender, ExecutorAnswer(failure, product, job.taken, self.after_answer)


def _matrices(counts: Counts | None) -> int:
    """The number of matrices that a product reads: of the experts that get rows, or of the whole layer group."""
    return 1 if counts is None else sum(count > 0 for count in counts)


def _joined(buffers: Sequence[memoryview]) -> memoryview:
    """The concatenation of all buffers. Not a copy if only one buffer is not empty."""
    if len(buffers) > 1:
        buffers = [buffer for buffer in buffers if buffer]
    if len(buffers) == 1:
        return buffers[0]
    whole, start = _empty(sum(map(len, buffers))), 0
    for buffer in buffers:
        _fill(whole[start : start + len(buffer)], buffer)
        start += len(buffer)
    return whole


def _fill(target: memoryview, source: memoryview) -> None:
    if len(source) <= _BRIEF_BYTES:
        target[:] = source
    else:  # numpy releases the GIL during the copy
        np.frombuffer(target, dtype=np.uint8)[:] = np.frombuffer(source, dtype=np.uint8)


def _empty(size: int) -> memoryview:
    """Uninitialised bytes (a bytearray would be cleared)."""
    return np.empty(size, dtype=np.uint8).data


def build(config: ProviderConfig, *, model_digest: str, inbox: Inbox) -> Executor:
    """Make the executor for a configuration. Raises `ConfigError`: the device or the kernel cannot be used;
    `CheckpointError`: the checkpoint has changed since the gateway read its digest."""
    settings = config.executor
    store = open_store(config)
    if store.manifest().digest != model_digest:
        raise CheckpointError(f"{store.path} changed while it was in use; start the provider again")
    operands: Operands | None = None
    if dist.is_initialized():  # this is rank 0 of a group
        from provider.shards.sharded import ShardedOperands  # imports FSDP, which only sharded executors need

        operands = ShardedOperands(store)
    model = ServedModel(store, operands=operands, float_memory=settings.float_memory)
    return Executor(model, inbox=inbox, warm_up=True)
