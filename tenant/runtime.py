"""What belongs to one process of a session: the secret and its counters, pads, threads, connections (rules 2 and 12).

Nothing of it outlives a fork, and all of it ends when the session is closed, when nobody holds the session any longer,
or with the program. Threads are told to stop, connections are shut down, which wakes whoever reads from them, and the
threads are joined while the interpreter is still whole: see `tenant.worker`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import torch

from symbiosis_priv import wire
from symbiosis_priv.buffers import Buffers
from symbiosis_priv.errors import QuarantinedError
from symbiosis_priv.federation import Federation, Peer, check_parties
from symbiosis_priv.keystream import SessionSecret
from symbiosis_priv.ring import Direction
from symbiosis_priv.weights import WeightStore
from tenant.channel import Channel
from tenant.executor import Executor
from tenant.facts import GroupFacts, Preparation
from tenant.helper import Helper
from tenant.masking.scheme import Materials, SessionScheme
from tenant.noise import NoisePool, Pad, PoolMemory
from tenant.notices import Notices
from tenant.options import SessionOptions
from tenant.routes import Routes
from tenant.worker import Worker

log = logging.getLogger(__name__)

_UNUSED_BYTES = 128 << 20  # a few answers of the size that fills a request
_JOIN_S = 5.0  # for what a thread is in the middle of: a product, or a name that is being looked up


class Runtime:
    """See the module's text. Thread-safe.

    Attributes:
        gate: no request leaves while it is held: for as long as it takes to find out who lied.
        executors, helpers: those that are not quarantined yet.
        source: where pads come from; None without masking.
        buffers: memory for rows and answers.
    """

    def __init__(
        self,
        federation: Federation,
        preparation: Preparation,
        scheme: SessionScheme,
        options: SessionOptions,
        store: WeightStore | None,
        routes: Routes,
    ) -> None:
        check_parties(
            [*routes.executors, *routes.helpers], companies=federation.companies, pad_helpers=federation.pad_helpers
        )
        self.gate = threading.Lock()
        self.buffers = Buffers(limit=_UNUSED_BYTES)
        self._federation, self._options, self._routes = federation, options, routes
        self._facts = preparation.facts
        self._notices = Notices(option=options.deadline_option)
        self._memory = PoolMemory(options.pool_memory)
        self._pools: dict[tuple[int, Direction], NoisePool] = {}
        self._making_pools = threading.Lock()
        self._welcomes: list[wire.Welcome] = []
        self._refill = Worker("refill")
        secret = SessionSecret()
        self.executors = [
            Executor(peer, functools.partial(self._channel, peer))
            for peer in routes.executors
            if not routes.is_quarantined(peer)
        ]
        self.helpers = [Helper(self._channel(peer), self._channel(peer), secret) for peer in routes.helpers]
        self.source = scheme.effects(Materials(facts=self._facts, secret=secret, helpers=self.helpers, store=store))
        self.closed = False
        _open.add(self)

    @property
    def pools(self) -> tuple[NoisePool, ...]:
        """Those in use so far."""
        return tuple(self._pools.values())

    def take(self, index: int, direction: Direction, rows: int) -> list[Pad]:
        """Fresh pads for `rows` rows; none without masking."""
        if self.source is None:
            return []
        pool = self._pools.get((index, direction))
        if pool is None:
            facts = self._facts[index]
            limit = self.row_limit(facts)
            with self._making_pools:
                pool = self._pools.setdefault(
                    (index, direction),
                    NoisePool(
                        self.source,
                        index=index,
                        direction=direction,
                        refill=self._refill,
                        memory=self._memory,
                        row_bytes=wire.ITEM_BYTES * facts.outputs(direction) * max(1, len(self.helpers)),
                        max_rows=limit,
                    ),
                )
        return pool.take(rows)

    def in_lanes(self, parts: Sequence[Callable[[Executor], None]]) -> None:
        """Do the parts of a product, several at a time, each told whom to ask first.

        Raises what the first of them raises to fail; then no other one begins, and none is still at work.
        """
        first = self.executors[0]
        if len(parts) == 1:
            return parts[0](first)
        waiting = deque(parts)

        def work(executor: Executor) -> None:
            try:
                while waiting:
                    with contextlib.suppress(IndexError):  # another lane was faster
                        part = waiting.popleft()
                        part(executor)
            except BaseException:
                waiting.clear()
                raise

        inference = torch.is_inference_mode_enabled()  # belongs to a thread, and to the results that parts write

        def work_beside() -> None:
            with torch.inference_mode(inference):
                work(first)

        beside = [worker.submit(work_beside) for worker in first.workers[: len(parts) - 1]]
        try:
            work(first)
        except Exception:  # an interrupt need not wait
            wait(_begun(beside))  # bounded by the deadlines of their requests
            raise
        for other in _begun(beside):
            other.result()
        return None

    def row_limit(self, facts: GroupFacts) -> int:
        """Rows of one request: what the limits of an executor and of every helper allow, both ways."""
        if not self._welcomes:  # threads that come first may ask at once, and hear the same
            until = time.monotonic() + self._options.deadline_s
            with self.executors[0].lanes.take(until=until) as channel:
                self._welcomes = [channel.welcome(), *(helper.channels[0].welcome() for helper in self.helpers)]
        return row_limit(facts, self._welcomes)

    def close(self) -> None:
        """Stop threads and close connections, for good. Waits for the threads, up to `_JOIN_S` in all."""
        self.closed = True
        workers = self._workers()
        for worker in workers:
            worker.stop()
        for executor in self.executors:
            executor.lanes.close()
        for helper in self.helpers:
            helper.close()
        until = time.monotonic() + _JOIN_S
        if not all(worker.join(max(0.0, until - time.monotonic())) for worker in workers):
            log.warning("a session's thread is still busy %g s after it was told to stop", _JOIN_S)
        _open.discard(self)

    def close_in_background(self) -> None:
        """The same for a finaliser, which may run on a thread that closing would wait for."""
        if not self.closed:
            with contextlib.suppress(RuntimeError):  # no more threads: the program ends, and `_close_all` is next
                threading.Thread(target=self.close, name="close").start()

    def abandon(self) -> None:
        """Let go of connections that a forked child shares with its parent, without a word to the other side."""
        for executor in self.executors:
            executor.lanes.abandon()
        for helper in self.helpers:
            for channel in helper.channels:
                channel.abandon()

    def _channel(self, peer: Peer) -> Channel:
        return Channel(
            peer,
            certificate=self._federation.tenant_certificate,
            key=self._federation.tenant_key,
            model_digest=self._federation.model_digest,
            deadline_s=self._options.deadline_s,
            buffers=self.buffers,
            notices=self._notices,
            wiretap=self._options.wiretap,
            permit=self._permit,
        )

    def _permit(self, peer: Peer) -> None:
        """Every request passes here on its way out."""
        with self.gate:
            if self._routes.is_quarantined(peer):
                raise QuarantinedError(f"{peer.role} {peer.name!r} is quarantined; nothing more is sent")

    def _workers(self) -> list[Worker]:
        source = self.source.workers if self.source is not None else ()
        of_executors = (worker for executor in self.executors for worker in executor.workers)
        of_helpers = (channel.worker for helper in self.helpers for channel in helper.channels)
        return [self._refill, *source, *of_executors, *of_helpers]


def row_limit(facts: GroupFacts, welcomes: Sequence[wire.Welcome]) -> int:
    """Rows of one request that fit every one of these limits, both ways."""
    widest = wire.ITEM_BYTES * max(facts.entry.inputs, facts.entry.stacked_outputs)
    return max(1, min(min(w.max_rows, w.max_payload // widest) for w in welcomes))


def _begun(jobs: Sequence[Future[None]]) -> list[Future[None]]:
    """Those that have begun; the others never will."""
    return [job for job in jobs if not job.cancel()]


_open: set[Runtime] = set()


def forget_all() -> None:
    """In a forked child: what is open belongs to the parent."""
    _open.clear()


@atexit.register
def _close_all() -> None:
    """Whatever a script has left open; afterwards no thread of ours is in the way of the interpreter's end."""
    for runtime in tuple(_open):
        runtime.close()
