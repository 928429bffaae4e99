"""A masked, verified session with the providers of a federation: `RingProduct` over the wire.

The hot path, top to bottom, for one layer group:

    take a pad (n, e)          burnt before anything leaves        noise.NoisePool
    send xq + n                one round trip, deadline            channel.Channel
    check the answer           before it is used for anything      verifier.VerificationKeys
    subtract e                 each e checked the same way         masking.pad
    check the range            the guard bits                      ring.in_range

A provider that fails a check is quarantined: nothing is sent to it again, the cached verification keys are dropped,
and the same masked rows go to the next executor of the federation, if there is one. Both checks end alike, so that
nobody learns which of them a lie has failed. The secret, the counters, the pools and the connections belong to one
process: after a fork the child starts with fresh ones (rules 2 and 12).

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
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

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
from symbiosis_priv.keystream import SessionSecret
from symbiosis_priv.ring import Direction, in_range
from symbiosis_priv.weights import WeightStore
from tenant.channel import DEADLINE_OPTION, Channel, Wiretap, fresh_nonce
from tenant.facts import GroupFacts, Preparation
from tenant.helper import Helper
from tenant.masking.registry import session_scheme
from tenant.masking.scheme import Materials, SessionScheme
from tenant.noise import NoisePool, Pad, PoolMemory, joined, padded
from tenant.notices import Notices
from tenant.worker import Worker

log = logging.getLogger(__name__)

_UNUSED_BYTES = 128 << 20  # a few answers of the size that fills a request
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
        wiretap: an observer of every frame (tests, reviewers), or None.
    """

    masking: str = "pad"
    deadline_s: float = 120.0
    deadline_option: str = DEADLINE_OPTION
    pool_memory: int = 256 << 20
    row_bucket: int = 1
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
        preparation: facts and verification keys of the pinned model.
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
        self._preparation = preparation
        self._options = options
        self._store = store
        self._rejected = self._verified = self._products = self._rows = 0
        self._keys_of = functools.cache(keys_of)  # as they are now, whatever becomes of the pinned files
        self._quarantined: set[str] = set()  # public keys: a liar by another name is the same liar
        self._lock = threading.RLock()
        self._closed = False
        self._runtime: _Runtime | None = None
        self._finalizer: weakref.finalize[..., Session] | None = None
        _sessions.add(self)

    def product(self, index: int, direction: Direction, rows: Tensor) -> Tensor:
        """One exact product, masked and verified. int32 `[r, d]` in, int32 `[r, o]` out."""
        with self._lock:
            runtime = self._live()
            if helper := next((h for h in runtime.helpers if self._is_quarantined(h.peer)), None):
                raise QuarantinedError(f"helper {helper.peer.name!r} is quarantined; nothing more is sent")
            if all(self._is_quarantined(channel.peer) for channel in runtime.executors):
                raise QuarantinedError(
                    "every executor of the federation is quarantined for this session; nothing more is sent"
                )
            limit = runtime.row_limit(self._preparation.facts[index])
            sent = padded(rows, bucket=self._options.row_bucket)
            parts = [self._masked(runtime, index, direction, part) for part in sent.split(limit)]
            self._products += 1
            self._rows += len(rows)
            return joined(parts)[: len(rows)]

    def _masked(self, runtime: _Runtime, index: int, direction: Direction, xq: Tensor) -> Tensor:
        """The product by the first executor whose answer passes both checks. All of them are sent identical rows."""
        pads = runtime.take(index, direction, len(xq))
        masked = xq + joined([pad.mask for pad in pads]) if pads else xq
        effects: Tensor | None = None
        outside: list[Peer] = []
        lie: SymbiosisError | None = None
        for channel in runtime.executors:
            if self._is_quarantined(channel.peer):
                continue
            try:
                answer = self._ask(channel, index, direction, masked)
            except (VerificationError, ProtocolError) as error:
                self._reject(channel.peer)
                lie = error
                continue
            if pads:
                effects = self._effects(pads) if effects is None else effects
                answer.sub_(effects)
            if in_range(answer):
                self._verified += len(masked)
                return answer
            # an error of 2^30 or 2^31 got past the columns; if it is an effect's, every answer will be outside
            self._reject(channel.peer)
            outside.append(channel.peer)
        if outside:  # and nobody is left to tell whether the answers or an effect are wrong
            helpers = [helper.peer for helper in runtime.helpers]
            self._quarantine(*helpers)
            lie = self._lie(*outside, *helpers, index=index, direction=direction)
        assert lie is not None  # somebody was asked
        raise lie

    def _ask(self, channel: Channel, index: int, direction: Direction, masked: Tensor) -> Tensor:
        """An executor's answer after the check of the columns."""
        facts = self._preparation.facts[index]
        parts = []
        for part in masked.split(row_limit(facts, [channel.welcome()])):
            request = wire.Execute(
                nonce=fresh_nonce(), group=index, direction=direction, arithmetic="ring", rows=len(part)
            )
            parts.append(channel.request(request, part, outputs=facts.outputs(direction)))
        answer = joined(parts)
        if not self._preparation.keys.accepts(index, direction, rows=masked, answer=answer):
            raise self._lie(channel.peer, index=index, direction=direction)
        return answer

    def _effects(self, pads: Sequence[Pad]) -> Tensor:
        waited = self._options.deadline_s
        wait([pad.effect for pad in pads], waited)  # ordered ahead, it may be behind many that an absent helper owes
        if not all(pad.effect.done() for pad in pads):
            raise DeadlineExceededError(
                f"no effects from the helpers within {waited:g} s. Are they running? "
                f"{self._options.deadline_option} waits longer."
            )
        try:
            return joined([pad.effect.result() for pad in pads])
        except VerificationError as error:
            self._reject(next(p for p in self._federation.helpers if p.name == error.provider))
            raise

    def _reject(self, peer: Peer) -> None:
        self._rejected += 1
        self._quarantine(peer)

    def _is_quarantined(self, peer: Peer) -> bool:
        return not self._quarantined.isdisjoint(self._keys_of(peer))

    def _quarantine(self, *peers: Peer) -> None:
        self._quarantined.update(*map(self._keys_of, peers))
        self._preparation.forget_keys()
        for helper in self._runtime.helpers if self._runtime else ():
            if helper.peer in peers:
                helper.drop_orders()
        for peer in peers:
            log.error("provider %s is quarantined: it sent what is not the product of the pinned weights", peer.name)

    def _lie(self, *peers: Peer, index: int, direction: Direction) -> VerificationError:
        return VerificationError(
            provider=" or ".join(peer.name for peer in peers),
            group_name=self._preparation.facts[index].entry.name,
            direction=direction,
            what="an answer",
        )

    def _live(self) -> _Runtime:
        if self._closed:
            raise SymbiosisError("this session is closed; load the model again")
        if self._runtime is None:
            runtime = _Runtime(
                self._federation,
                self._preparation,
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
        to_executors = [c.traffic for c in runtime.executors]
        to_helpers = [c.traffic for h in runtime.helpers for c in h.channels]
        return Ledger(
            rows=self._rows,
            products=self._products,
            answers_verified=self._verified,
            answers_rejected=self._rejected,
            effects_verified=runtime.source.verified if runtime.source else 0,
            pads_taken=sum(p.taken for p in runtime.pools.values()),
            pads_dry=sum(p.dry for p in runtime.pools.values()),
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
        self._lock = threading.RLock()
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
        check_parties([*federation.executors, *helpers])
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

        self.executors = [channel(peer) for peer in federation.executors if not is_quarantined(peer)]
        secret = SessionSecret()
        self.helpers = [Helper(channel(peer), channel(peer), secret) for peer in helpers]
        self.source = scheme.effects(
            Materials(facts=self._facts, secret=secret, helpers=self.helpers, keys=preparation.keys, store=store)
        )
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
                row_bytes=wire.ITEM_BYTES * (facts.entry.inputs + facts.entry.stacked_outputs),
                max_rows=self.row_limit(facts),
            )
        return pool.take(rows)

    def row_limit(self, facts: GroupFacts) -> int:
        """Rows of one request: what the limits of an executor and of every helper allow, both ways."""
        return row_limit(facts, self._welcomes)

    @functools.cached_property
    def _welcomes(self) -> list[wire.Welcome]:
        return [self.executors[0].welcome(), *(helper.channels[0].welcome() for helper in self.helpers)]

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
        return [self._refill, *source, *(worker for helper in self.helpers for worker in helper.workers)]

    def _channels(self) -> list[Channel]:
        return [*self.executors, *(channel for helper in self.helpers for channel in helper.channels)]


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
