"""A masked, verified session with the providers of a federation: `RingProduct` over the wire.

The hot path, top to bottom, for one layer group:

    quantise                   inf or nan ends it here             rows.Rows
    take a pad (n, e)          burnt before anything leaves        noise.NoisePool
    send xq + n                one round trip, deadline            channel.Channel
    subtract e, check          before anything is used             verifier.VerificationKeys

If the check fails, an answer or an effect is wrong. Nobody is asked for anything until it is settled which
(`verifier.BlameKeys`). Who lied is quarantined: nothing is sent to it again, and the cached keys are dropped. If that
is the executor alone, the same masked rows go to the next one of the federation, if there is one.

The secret, the counters, the pools and the connections belong to one process: after a fork the child starts with fresh
ones (rules 2 and 12).

A large product goes out in pieces over two connections, so that masking, sending, multiplying, receiving and checking
overlap. Each piece is a request with rows, pads, a deadline and a check of its own.

A session ends when it is closed, when nobody holds it any longer, or with the program. Its threads are told to stop,
its connections are shut down, which wakes whoever reads from them, and the threads are joined while the interpreter is
still whole: see `tenant.worker`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import Tensor

from symbiosis_priv import wire
from symbiosis_priv.buffers import Buffers
from symbiosis_priv.certificates import key_fingerprint, load_pin
from symbiosis_priv.errors import (
    DeadlineExceededError,
    ProtocolError,
    QuarantinedError,
    RoleConflictError,
    SymbiosisError,
    VerificationError,
)
from symbiosis_priv.federation import Federation, Peer, check_parties
from symbiosis_priv.keystream import SessionSecret, expand
from symbiosis_priv.modular import Column
from symbiosis_priv.passes import unmask
from symbiosis_priv.ring import Direction
from symbiosis_priv.weights import WeightStore
from tenant.channel import DEADLINE_OPTION, Channel, Wiretap, fresh_nonce
from tenant.facts import GroupFacts, Preparation
from tenant.helper import Helper
from tenant.masking.registry import session_scheme
from tenant.masking.scheme import Materials, SessionScheme
from tenant.noise import NoisePool, Pad, PoolMemory, cut, joined
from tenant.notices import Notices
from tenant.rows import RingRows, Rows
from tenant.spans import span
from tenant.worker import Worker

log = logging.getLogger(__name__)

_UNUSED_BYTES = 128 << 20  # a few answers of the size that fills a request
_LANES = 2  # connections to an executor: on one something travels while the other's rows are multiplied
_MOST_PIECES = 4  # of a product: many small ones cost more than they hide
_JOIN_S = 5.0  # for what a thread is in the middle of: a product, or a name that is being looked up


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """How a session behaves.

    Args:
        masking: the name of a `SessionScheme`.
        deadline_s: how long one request may take, reconnecting included.
        deadline_option: what the user calls that, for messages.
        pool_memory: bytes that pads drawn ahead may take.
        row_bucket: row counts are rounded up to a multiple of this before anything is sent.
        piece_bytes: products of more than twice this, rows and answers together, go out in pieces of about so many
            bytes, over two connections.
        wiretap: an observer of every frame (tests, reviewers), or None.
    """

    masking: str = "pad"
    deadline_s: float = 120.0
    deadline_option: str = DEADLINE_OPTION
    pool_memory: int = 256 << 20
    row_bucket: int = 1
    piece_bytes: int = 4 << 20
    wiretap: Wiretap | None = None


@dataclass
class Ledger:
    """What a session has done so far; nothing in it is secret."""

    rows: int = 0
    products: int = 0
    answers_verified: int = 0
    answers_rejected: int = 0
    effects_verified: int = 0
    pads_taken: int = 0
    pads_dry: int = 0
    pads_ready: int = 0
    executor_round_trips: int = 0
    helper_round_trips: int = 0
    bytes_to_executors: int = 0
    bytes_from_executors: int = 0
    bytes_to_helpers: int = 0
    bytes_from_helpers: int = 0


class Session:
    """See the module's text.

    Args:
        federation: whom to talk to.
        preparation: facts and verification keys of the pinned model; an attribute of the same name.
        options: masking, deadline, memory.
        store: the tenant's own copy of the weights, for schemes that need it.
    """

    def __init__(
        self,
        federation: Federation,
        preparation: Preparation,
        *,
        options: SessionOptions,
        store: WeightStore | None = None,
    ) -> None:
        self._scheme = session_scheme(options.masking)
        if "helper" in self._scheme.roles and not federation.helpers:
            raise RoleConflictError(
                f"masking = {options.masking!r} needs a [[provider]] with role = 'helper', run by another operator "
                f"than the executor; masking = 'local' needs none"
            )
        self._federation = federation
        self.preparation = preparation
        self._options = options
        self._store = store
        self._rejected = self._verified = self._effects_verified = self._products = self._rows = 0
        self._keys_of = functools.cache(keys_of)  # as they are now, whatever becomes of the pinned files
        self._quarantined: set[str] = set()  # public keys: a liar by another name is the same liar
        self._lock = threading.RLock()
        self._counting = threading.Lock()  # two lanes do
        self._closed = False
        self._runtime: _Runtime | None = None
        self._finalizer: weakref.finalize[..., Session] | None = None
        _sessions.add(self)

    def multiply(self, index: int, direction: Direction, rows: Rows) -> None:
        """One exact product, masked and verified."""
        with self._lock:
            runtime = self._live()
            if helper := next((h for h in runtime.helpers if self._is_quarantined(h.peer)), None):
                raise QuarantinedError(f"helper {helper.peer.name!r} is quarantined; nothing more is sent")
            if all(self._is_quarantined(executor.peer) for executor in runtime.executors):
                raise QuarantinedError(
                    "every executor of the federation is quarantined for this session; nothing more is sent"
                )
            parts = self._parts(runtime, index, direction, rows)
            runtime.in_lanes([functools.partial(self._masked, runtime, part) for part in parts])
            self._products += 1
            self._rows += rows.count

    def product(self, index: int, direction: Direction, rows: Tensor) -> Tensor:
        """The same for integers whose true product is in the range: int32 `[r, d]` in, int32 `[r, o]` out."""
        ring_rows = RingRows(rows, outputs=self.preparation.facts[index].outputs(direction))
        self.multiply(index, direction, ring_rows)
        return ring_rows.product

    def _parts(self, runtime: _Runtime, index: int, direction: Direction, rows: Rows) -> list[_Part]:
        """All rows, encoded and filled up with zeros to the bucket, under pads that were burnt for them, in requests of
        a size that everybody takes."""
        facts = self.preparation.facts[index]
        column, products = self.preparation.keys.columns(index, direction)
        count = rows.count + -rows.count % self._options.row_bucket
        xq = runtime.buffers.matrix(count, facts.inputs(direction))
        expected = torch.zeros(count, dtype=torch.int64, device="cpu")
        with span("quantise"):
            rows.encode(xq[: rows.count], column=products, expected=expected[: rows.count])
        xq[rows.count :] = 0
        limit, piece = runtime.row_limit(facts), self._piece(count, facts)
        parts = []
        for first in range(0, count, limit):
            end = min(first + limit, count)
            with span("take pads"):
                pads = runtime.take(index, direction, end - first)
            for start in range(first, end, piece):
                some = slice(start, min(start + piece, end))
                mine, pads = cut(pads, some.stop - some.start)
                parts.append(_Part(index, direction, rows, start, xq[some], column, expected[some], mine))
        return parts

    def _piece(self, count: int, facts: GroupFacts) -> int:
        """Rows of a piece, by the product's size alone (rule 5)."""
        size = wire.ITEM_BYTES * count * (facts.entry.inputs + facts.entry.stacked_outputs)
        return -(-count // max(1, min(_MOST_PIECES, size // self._options.piece_bytes)))

    def _masked(self, runtime: _Runtime, part: _Part, lane: int) -> None:
        """The product by the first executor whose answer passes. All of them are sent identical rows."""
        with span("mask"):
            part.put_on_pads()
        lie: SymbiosisError | None = None
        for executor in runtime.executors:
            with runtime.gate:  # held for as long as it takes to find out who lied
                if self._is_quarantined(executor.peer):
                    continue
            try:
                with span("network + product"):
                    answer = self._ask(executor.lanes[lane], part)
            except ProtocolError as error:
                self._reject(executor.peer)
                lie = error
                continue
            with span("wait for effects"):
                self._wait_for_effects(part)
            with span("unmask + verify + dequantise"):
                passed = part.decode(answer)
            if passed:
                with self._counting:
                    self._verified += len(part.sent)
                    self._effects_verified += sum(pad.rows for pad in part.pads if pad.holders())
                return
            lie = self._accuse(runtime, executor.peer, part, answer)
        # nobody was asked if, while this part waited, another one has found the last of them lying
        raise lie or QuarantinedError("every executor of the federation is quarantined; nothing more is sent")

    def _ask(self, channel: Channel, part: _Part) -> Tensor:
        """An executor's answer, unverified."""
        facts = self.preparation.facts[part.index]
        answers = []
        for rows in part.sent.split(row_limit(facts, [channel.welcome()])):
            request = wire.Execute(
                nonce=fresh_nonce(), group=part.index, direction=part.direction, arithmetic="ring", rows=len(rows)
            )
            answers.append(channel.request(request, rows, outputs=facts.outputs(part.direction)))
        return joined(answers)

    def _wait_for_effects(self, part: _Part) -> None:
        waited = self._options.deadline_s
        shares = [share for pad in part.pads for share in pad.shares]
        wait([share.effect for share in shares], waited)  # ordered ahead: behind many that an absent helper owes
        if not all(share.effect.done() for share in shares):
            raise DeadlineExceededError(
                f"no effects from the helpers within {waited:g} s. Are they running? "
                f"{self._options.deadline_option} waits longer."
            )
        for share in shares:
            try:
                share.effect.result()
            except ProtocolError as error:
                assert share.holder is not None  # the tenant breaks no protocol with itself
                self._reject(share.holder)
                raise self._lie([share.holder], part, what="an effect") from error

    def _accuse(self, runtime: _Runtime, executor: Peer, part: _Part, answer: Tensor) -> VerificationError:
        """Quarantine who lied, before anybody is asked for anything else.

        Returns:
            What to raise if there is no other executor: this one alone has lied.

        Raises:
            VerificationError: an effect is wrong, or nobody can tell what is.
        """
        with runtime.gate:
            involved = [executor, *(holder for pad in part.pads for holder in pad.holders())]
            # another part may have found somebody out just now, and the keys that tell are gone by now
            liars = [peer for peer in involved if self._is_quarantined(peer)] or self._liars(executor, part, answer)
            suspects = list(dict.fromkeys(liars or involved))
            with self._counting:
                self._rejected += len(suspects) if liars else 1
            self._quarantine(*suspects)
        what = "an answer" if executor in suspects else "an effect"
        lie = self._lie(suspects, part, what=what, certain=bool(liars))
        if suspects != [executor]:
            raise lie
        return lie

    def _liars(self, executor: Peer, part: _Part, answer: Tensor) -> list[Peer]:
        """Those whose answer or effect is not the product modulo 2^32; nobody if that cannot be told."""
        others = [(pad, share) for pad in part.pads for share in pad.shares if share.holder is not None]
        if not others:
            return [executor]
        accepts = functools.partial(self.preparation.blame.accepts, part.index, part.direction)
        width = part.sent.shape[1]
        liars: list[Peer] = []
        try:
            if not accepts(rows=part.sent, answer=answer):
                liars.append(executor)
            for pad, share in others:
                assert share.holder is not None
                mask = expand(share.key, first_row=share.first_row, rows=pad.rows, width=width)
                if not accepts(rows=mask, answer=share.rows_of_effect(pad.rows)):
                    liars.append(share.holder)
        except (OSError, SafetensorError) as error:
            log.error("cannot read the keys that say who lied: %s", error)
        return liars

    def _reject(self, peer: Peer) -> None:
        with self._counting:
            self._rejected += 1
        self._quarantine(peer)

    def _is_quarantined(self, peer: Peer) -> bool:
        return not self._quarantined.isdisjoint(self._keys_of(peer))

    def _quarantine(self, *suspects: Peer) -> None:
        peers = [peer for peer in suspects if not self._is_quarantined(peer)]
        self._quarantined.update(*map(self._keys_of, peers))
        self.preparation.forget_keys()
        for helper in self._runtime.helpers if self._runtime else ():
            if helper.peer in peers:
                helper.drop_orders()
        for peer in peers:
            log.error("provider %s is quarantined: it sent what is not the product of the pinned weights", peer.name)

    def _lie(self, peers: Sequence[Peer], part: _Part, *, what: str, certain: bool = True) -> VerificationError:
        return VerificationError(
            provider=(" and " if certain else " or ").join(peer.name for peer in peers),
            group_name=self.preparation.facts[part.index].entry.name,
            direction=part.direction,
            what=what,
        )

    def _live(self) -> _Runtime:
        if self._closed:
            raise SymbiosisError("this session is closed; load the model again")
        if self._runtime is None:
            runtime = _Runtime(
                self._federation,
                self.preparation,
                self._scheme,
                self._options,
                self._store,
                is_quarantined=self._is_quarantined,
            )
            # for those who do not call `backend_of(model).close()`
            self._finalizer = weakref.finalize(self, runtime.close_in_background)
            self._finalizer.atexit = False  # `_close_all` closes what is open then, and waits for it
            self._runtime = runtime
        return self._runtime

    def ledger(self) -> Ledger:
        """Counters so far."""
        runtime = self._runtime
        if runtime is None:
            return Ledger()
        to_executors = [c.traffic for e in runtime.executors for c in e.lanes]
        to_helpers = [c.traffic for h in runtime.helpers for c in h.channels]
        return Ledger(
            rows=self._rows,
            products=self._products,
            answers_verified=self._verified,
            answers_rejected=self._rejected,
            effects_verified=self._effects_verified,
            pads_taken=sum(p.taken for p in runtime.pools.values()),
            pads_dry=sum(p.dry for p in runtime.pools.values()),
            pads_ready=sum(p.ready() for p in runtime.pools.values()),
            executor_round_trips=sum(t.round_trips for t in to_executors),
            helper_round_trips=sum(t.round_trips for t in to_helpers),
            bytes_to_executors=sum(t.bytes_sent for t in to_executors),
            bytes_from_executors=sum(t.bytes_received for t in to_executors),
            bytes_to_helpers=sum(t.bytes_sent for t in to_helpers),
            bytes_from_helpers=sum(t.bytes_received for t in to_helpers),
        )

    def close(self) -> None:
        """Close connections and forget the secret. A product that another thread waits for fails."""
        self._closed = True
        if (runtime := self._runtime) is not None:
            runtime.close()  # wakes whoever holds the lock
        with self._lock:
            if self._runtime is not None:
                self._runtime.close()
            self._forget_runtime()

    def _begin_again(self) -> None:
        """In a forked child: nothing of the parent's is used or disturbed, nor a lock that one of its threads held."""
        self._lock, self._counting = threading.RLock(), threading.Lock()
        if self._runtime is not None:
            self._runtime.abandon()
        self._forget_runtime()

    def _forget_runtime(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._runtime = self._finalizer = None


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _begin_all_again() -> None:
    _open.clear()
    for session in _sessions:
        session._begin_again()


os.register_at_fork(after_in_child=_begin_all_again)


@dataclass(frozen=True)
class _Part:
    """Some rows of a product, as many as one request may have.

    Args:
        index: of the layer group.
        direction: forward or backward.
        rows: all rows of the product.
        start: the first of these.
        sent: int32 `[r, d]`, these rows in the ring, and zeros where the bucket asks for more than there are.
        column: R.
        expected: int64 `[r]`, what R makes of their true product.
        pads: for these rows; none without masking.
    """

    index: int
    direction: Direction
    rows: Rows
    start: int
    sent: Tensor
    column: Column
    expected: Tensor
    pads: Sequence[Pad]

    def put_on_pads(self) -> None:
        """Mask the rows. They are what is sent from now on, and they do not change again (rule 3)."""
        for pad, first in _placed(self.pads):
            pad.put_on(self.sent[first : first + pad.rows])

    def decode(self, answer: Tensor) -> bool:
        """Take the effects off an answer and hand it on, if it is the product; see `Rows.decode`."""
        places = [(first, pad.rows, pad.effects()) for pad, first in _placed(self.pads)] or [(0, len(self.sent), [])]
        return all(self._decode(answer, first, count, effects) for first, count, effects in places)

    def _decode(self, answer: Tensor, first: int, count: int, effects: Sequence[Tensor]) -> bool:
        real = min(max(self.rows.count - self.start - first, 0), count)
        filled = slice(first + real, first + count)  # zeros: checked like rows, so that nobody can tell them apart
        zeros = unmask(
            answer[filled],
            effects=[effect[real:] for effect in effects],
            column=self.column,
            expected=self.expected[filled],
        )
        if zeros is None or not real:
            return zeros is not None
        own = slice(first, first + real)
        return self.rows.decode(
            self.start + first,
            answer[own],
            effects=[effect[:real] for effect in effects],
            column=self.column,
            expected=self.expected[own],
        )


def _placed(pads: Sequence[Pad]) -> Iterator[tuple[Pad, int]]:
    """Pads one below the other, and the row where each begins."""
    first = 0
    for pad in pads:
        yield pad, first
        first += pad.rows


@dataclass(frozen=True)
class _Executor:
    """An executor, and the connections to it."""

    peer: Peer
    lanes: tuple[Channel, ...]


class _Runtime:
    """What must not outlive a process: the secret and its counters, pads, threads, connections."""

    def __init__(
        self,
        federation: Federation,
        preparation: Preparation,
        scheme: SessionScheme,
        options: SessionOptions,
        store: WeightStore | None,
        *,
        is_quarantined: Callable[[Peer], bool],
    ) -> None:
        helpers = federation.helpers if "helper" in scheme.roles else ()
        check_parties(
            [*federation.executors, *helpers], companies=federation.companies, pad_helpers=federation.pad_helpers
        )
        self.pools: dict[tuple[int, Direction], NoisePool] = {}
        self._facts = preparation.facts
        self._memory = PoolMemory(options.pool_memory)
        self._refill = Worker("refill")
        self.buffers = Buffers(limit=_UNUSED_BYTES)
        notices = Notices(option=options.deadline_option)

        def channel(peer: Peer) -> Channel:
            return Channel(
                peer,
                certificate=federation.tenant_certificate,
                key=federation.tenant_key,
                model_digest=federation.model_digest,
                deadline_s=options.deadline_s,
                buffers=self.buffers,
                notices=notices,
                wiretap=options.wiretap,
            )

        self.executors = [
            _Executor(peer, tuple(channel(peer) for _ in range(_LANES)))
            for peer in federation.executors
            if not is_quarantined(peer)
        ]
        self._second_lane = Worker("lane")
        secret = SessionSecret()
        self.gate = threading.Lock()
        self.helpers = [Helper(channel(peer), channel(peer), secret, gate=self.gate) for peer in helpers]
        self.source = scheme.effects(Materials(facts=self._facts, secret=secret, helpers=self.helpers, store=store))
        self.closed = False
        _open.add(self)

    def take(self, index: int, direction: Direction, rows: int) -> list[Pad]:
        """Fresh pads for `rows` rows; none without masking."""
        if self.source is None:
            return []
        pool = self.pools.get((index, direction))
        if pool is None:
            facts = self._facts[index]
            pool = self.pools[index, direction] = NoisePool(
                self.source,
                index=index,
                direction=direction,
                refill=self._refill,
                memory=self._memory,
                row_bytes=wire.ITEM_BYTES * facts.outputs(direction) * max(1, len(self.helpers)),
                max_rows=self.row_limit(facts),
            )
        return pool.take(rows)

    def in_lanes(self, parts: Sequence[Callable[[int], None]]) -> None:
        """Do the parts of a product, two at a time, each told the number of its lane.

        Raises what the first of them raises to fail; then no other one begins, and none is still at work.
        """
        waiting = deque(parts)

        def work(lane: int) -> None:
            try:
                while waiting:
                    with contextlib.suppress(IndexError):  # the other lane was faster
                        part = waiting.popleft()
                        part(lane)
            except BaseException:
                waiting.clear()
                raise

        if len(parts) == 1:
            return work(0)
        inference = torch.is_inference_mode_enabled()  # belongs to a thread, and to the results that parts write

        def work_beside() -> None:
            with torch.inference_mode(inference):
                work(1)

        beside = self._second_lane.submit(work_beside)
        try:
            work(0)
        except Exception:  # an interrupt need not wait
            wait([beside])  # bounded by the deadline of its request
            raise
        return beside.result()

    def row_limit(self, facts: GroupFacts) -> int:
        """Rows of one request: what the limits of an executor and of every helper allow, both ways."""
        return row_limit(facts, self._welcomes)

    @functools.cached_property
    def _welcomes(self) -> list[wire.Welcome]:
        return [self.executors[0].lanes[0].welcome(), *(helper.channels[0].welcome() for helper in self.helpers)]

    def close(self) -> None:
        """Stop threads and close connections, for good. Waits for the threads, up to `_JOIN_S` in all."""
        self.closed = True
        workers, channels = self._workers(), self._channels()
        for worker in workers:
            worker.stop()
        for channel in channels:
            channel.close()
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
        for channel in self._channels():
            channel.abandon()

    def _workers(self) -> list[Worker]:
        source = self.source.workers if self.source is not None else ()
        return [
            self._refill,
            self._second_lane,
            *source,
            *(worker for helper in self.helpers for worker in helper.workers),
        ]

    def _channels(self) -> list[Channel]:
        lanes = (channel for executor in self.executors for channel in executor.lanes)
        return [*lanes, *(channel for helper in self.helpers for channel in helper.channels)]


_open: set[_Runtime] = set()


@atexit.register
def _close_all() -> None:
    """Whatever a script has left open; afterwards no thread of ours is in the way of the interpreter's end."""
    for runtime in tuple(_open):
        runtime.close()


def keys_of(peer: Peer) -> frozenset[str]:
    """Fingerprints of the public keys that a provider may show."""
    return frozenset(key_fingerprint(load_pin(path)) for path in peer.pins)


def row_limit(facts: GroupFacts, welcomes: Sequence[wire.Welcome]) -> int:
    """Rows of one request that fit every one of these limits, both ways."""
    widest = wire.ITEM_BYTES * max(facts.entry.inputs, facts.entry.stacked_outputs)
    return max(1, min(min(w.max_rows, w.max_payload // widest) for w in welcomes))
