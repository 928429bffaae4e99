"""The objects of a session that belong to one process: the secret and its counters, pads, threads and connections
(rules 2 and 12).

A forked child does not use its parent's `Runtime`. A `Runtime` is closed with its session, when the session is garbage
collected, or when the program ends: it tells its threads to stop, shuts connections down, which wakes the threads that
read from them, and joins the threads while the interpreter still works (`tenant.worker`).
"""

import atexit
import contextlib
import functools
import logging
import math
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from symbiosis_priv.arithmetic.buffers import Buffers
from symbiosis_priv.arithmetic.forks import generation
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import QuarantinedError
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.channel import Channel
from tenant.connections.executor_client import ExecutorClient, row_limit
from tenant.connections.helper_client import HelperClient, RelayInstruction
from tenant.connections.notices import Notices
from tenant.core.gate import Gate
from tenant.core.masked import UNMASKED_BY_CHOICE, UnmaskedByChoice
from tenant.core.pads import EffectSource, Pad
from tenant.core.secret import SessionSecret
from tenant.masking.scheme import Materials, SessionScheme
from tenant.preparation.prepared import Preparation
from tenant.routing.discovery import Discovery
from tenant.routing.probing import Prober
from tenant.routing.route import Route
from tenant.routing.routes import Routes
from tenant.session.options import SessionOptions
from tenant.session.pools import PadPool, PoolMemory
from tenant.session.relays import Relays
from tenant.worker import Worker

log = logging.getLogger(__name__)

_UNUSED_BYTES = 256 << 20  # a few answers of the size that fills a request, and their effects
_PROBE_S = 10.0  # time limit of one attempt in the background
_REFUSED_S = 5.0  # how long a refused first connection is retried: wrong port, or provider not started
_JOIN_S = 5.0  # a thread may be in the middle of a product or of a name lookup


class Runtime:
    """Secret, pads, threads and connections of one process; see the module's docstring. Thread-safe.

    Attributes:
        gate: checks every request before it is sent.
        closing: set when the runtime is being closed.
        prober: asks providers what they serve.
        source: draws pads; None if the scheme returned `UNMASKED_BY_CHOICE`.
        relays: decides which effects are relayed; None unless the federation file has `relay = true`.
        buffers: memory for rows and answers.
        notices: tells the user what is being waited for.
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
        self.gate = Gate(federation, [route.peer for route in routes.helpers], routes.quarantined)
        self.buffers = Buffers(limit=_UNUSED_BYTES)
        self.notices = Notices(option=options.deadline_option)
        self.closing = threading.Event()
        self._federation, self._options, self._routes = federation, options, routes
        self._facts = preparation.facts
        self._memory = PoolMemory(options.pool_memory)
        self._pools: dict[tuple[GroupIndex, Direction], PadPool] = {}
        self._executors: dict[Route, ExecutorClient] = {}
        self._probing: set[Channel] = set()
        self._making = threading.Lock()
        self.relays = Relays(self.gate, routes, self.executor) if federation.relay else None
        self._refill = Worker("refill")
        secret = SessionSecret()
        self._helpers = {}
        for route in routes.helpers:
            new_channel = functools.partial(self._channel, route.peer, federation.tls_context(route.peer))
            self._helpers[route] = HelperClient(route, routes, new_channel, secret, ring_bits=options.ring_bits)
        materials = Materials(facts=self._facts, secret=secret, holders=self._holders, store=store)
        effects = scheme.effects(materials)
        self.source = None if isinstance(effects, UnmaskedByChoice) else effects
        self._discovery = None if federation.registries is None else Discovery(federation, changed=routes.update)
        self._discovering = False
        self._version = routes.version
        self.prober = Prober(
            routes,
            preparation.manifest,
            retry=self._connect_with_retries,
            try_once=self._try_once,
            closing=self.closing,
            before=self._discover,
        )
        _open.add(self)

    @property
    def executors(self) -> tuple[ExecutorClient, ...]:
        """The clients of all executors used so far."""
        return tuple(self._executors.values())

    @property
    def helpers(self) -> tuple[HelperClient, ...]:
        """The clients of all helpers."""
        return tuple(self._helpers.values())

    @property
    def pools(self) -> tuple[PadPool, ...]:
        """The pools in use so far."""
        return tuple(self._pools.values())

    def executor(self, route: Route) -> ExecutorClient:
        """Return the client of an executor, and make it on first use."""
        if (executor := self._executors.get(route)) is not None:
            return executor
        with self._making:
            if route not in self._executors:
                executor = ExecutorClient(
                    route, functools.partial(self._channel, route.peer), relay=self._federation.relay
                )
                self._executors[route] = executor
                if self.closing.is_set():
                    executor.close()
            return self._executors[route]

    def refresh(self) -> None:
        """Close the connections to executors that have left the federation and have no request in flight."""
        if self._version == self._routes.version:
            return
        with self._making:
            here = set(self._routes.executors)
            left = [executor for route, executor in self._executors.items() if route not in here]
            gone = [executor for executor in left if not executor.route.in_flight]
            for executor in gone:
                del self._executors[executor.route]
            if len(gone) == len(left):
                self._version = self._routes.version
        for executor in gone:
            executor.close()

    def take(
        self, index: GroupIndex, direction: Direction, rows: int, *, counts: Counts | None = None
    ) -> Sequence[Pad]:
        """Return fresh pads for `rows` rows; `UNMASKED_BY_CHOICE` for a scheme without pads. Pads for rows with counts
        are drawn now."""
        if self.source is None:
            return UNMASKED_BY_CHOICE
        if counts is not None:
            return [self.source.draw(index, direction, rows, counts=counts, ahead=False)]
        return self._pool(index, direction, self.source).take(rows)

    def order(self, index: GroupIndex, direction: Direction, rows: int) -> None:
        """Draw pads for `rows` rows ahead; see `PadPool.order`."""
        if self.source is not None:
            self._pool(index, direction, self.source).order(rows)

    def draw(
        self, index: GroupIndex, direction: Direction, rows: int, *, counts: Counts | None, executor: Route | None
    ) -> Pad:
        """Draw a fresh pad for rows that an executor will see. With None, every executor that serves the group may see
        them."""
        assert self.source is not None
        peer = None if executor is None else executor.peer
        return self.source.draw(index, direction, rows, counts=counts, ahead=False, executor=peer)

    def signer(self, helper: str) -> tuple[Peer, PublicKeyTypes] | None:
        """Return the helper with a certificate; see `Relays.signer`."""
        return None if self.relays is None else self.relays.signer(helper)

    def end_relays(self, executor: Peer) -> None:
        """End relaying to an executor for this session."""
        if self.relays is not None:
            self.relays.pause(executor, for_good=True)
        for client in self.executors:
            client.uses_blocks = client.uses_blocks and client.route.peer != executor

    def row_limit(self, widest: int) -> int:
        """Return the row limit of one request: the largest limit among the executors, for request and answer.

        A provider with lower limits gets several requests, so its limits do not affect requests to other providers.
        """
        limits = [row_limit(widest, route.welcome) for route in self._routes.executors if route.welcome is not None]
        return max(limits, default=1)

    def close(self) -> None:
        """Stop threads and close connections. Waits for the threads, up to `_JOIN_S` in all. The runtime cannot be used
        again."""
        self.closing.set()
        with self._making:
            executors = self.executors
        workers = self._workers()
        for worker in workers:
            worker.stop()
        for executor in executors:
            executor.close()
        for helper in self.helpers:
            helper.close()
        for channel in tuple(self._probing):
            channel.close()
        if self._discovery is not None:
            self._discovery.close(_JOIN_S)
        until = time.monotonic() + _JOIN_S
        if not all(worker.join(max(0.0, until - time.monotonic())) for worker in workers):
            log.warning("a session's thread is still busy %g s after it was told to stop", _JOIN_S)
        _open.discard(self)

    def close_in_background(self) -> None:
        """Close in a new thread. A finaliser uses it, because it may run on a thread that `close` would wait for."""
        if not self.closing.is_set():
            # no thread can be started: the program is ending, and `_close_all` runs next
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self.close, name="close").start()

    def abandon(self) -> None:
        """Drop the connections that a forked child shares with its parent, without sending a byte."""
        if self._discovery is not None:
            self._discovery.abandon()
        for executor in self._executors.values():
            executor.pool.abandon()
        for helper in self.helpers:
            for channel in helper.channels:
                channel.abandon()

    def _pool(self, index: GroupIndex, direction: Direction, source: EffectSource) -> PadPool:
        if (pool := self._pools.get((index, direction))) is not None:
            return pool
        facts = self._facts[index]
        with self._making:
            return self._pools.setdefault(
                (index, direction),
                PadPool(
                    source,
                    index=index,
                    direction=direction,
                    refill=self._refill,
                    memory=self._memory,
                    row_bytes=wire.RING32.size(1, facts.outputs(direction)) * max(1, self._routes.helpers_per_pad),
                    max_rows=functools.partial(self.row_limit, facts.widest),
                ),
            )

    def _discover(self) -> None:
        """Ask the registries now, and again when an executor is missing."""
        if self._discovery is not None:
            self._discovery.refresh()
            if not self._discovering:
                self._discovering = True
                self._discovery.start()

    def _holders(self, index: GroupIndex, executor: Peer | None) -> tuple[list[HelperClient], RelayInstruction | None]:
        """Return the helpers of the next pad and the instruction to relay; see `scheme.Materials`."""
        route = next((route for route in self._routes.executors if route.peer == executor), None)
        target = None if self.relays is None else self.relays.target(index, route)
        routes = self._routes.holders(index, target or route)
        if len(routes) < max(1, self._routes.helpers_per_pad):
            raise QuarantinedError(
                f"a pad is shared by {self._routes.helpers_per_pad} helpers of companies other than the executor's; "
                f"for {self._facts[index].entry.name} only {len(routes)} are left; nothing is sent. Add helpers."
            )
        order = None
        if self.relays is not None and target is not None:
            order = self.relays.order(target, [route.peer for route in routes])
        return [self._helpers[route] for route in routes], order

    def _connect_with_retries(self, route: Route, wanted: Callable[[], bool]) -> wire.Welcome:
        # a provider that answered before may be restarting
        refused_s = _REFUSED_S if route.welcome is None else math.inf
        if (helper := self._helpers.get(route)) is not None:
            return helper.channels[False].welcome(wanted=wanted, refused_s=refused_s)
        until = time.monotonic() + self._options.deadline_s
        return self.executor(route).welcome(until=until, wanted=wanted, refused_s=refused_s)

    def _try_once(self, route: Route) -> wire.Welcome:
        channel = self._channel(route.peer)  # own connections: the others may be in use
        self._probing.add(channel)
        try:
            if self.closing.is_set():  # `close` began after this channel was made, and has not seen it
                channel.close()
            until = time.monotonic() + min(_PROBE_S, self._options.deadline_s)
            return channel.connect(deadline=until, wanted=lambda: False)
        finally:
            self._probing.discard(channel)
            channel.close()

    def _channel(self, peer: Peer, context: ssl.SSLContext | None = None) -> Channel:
        return Channel(
            peer,
            context=context or self._federation.tls_context(peer),
            model_digest=self._federation.model_digest,
            deadline_s=self._options.deadline_s,
            buffers=self.buffers,
            notices=self.notices,
            wiretap=self._options.wiretap,
            ring_bits=self._options.ring_bits,
            relay=self._federation.relay,
            permit=self.gate.check,
        )

    def _workers(self) -> list[Worker]:
        source = () if self.source is None else self.source.workers
        of_executors = (worker for executor in self.executors for worker in executor.workers)
        of_helpers = (channel.worker for helper in self.helpers for channel in helper.channels)
        return [self._refill, *source, *self.prober.workers, *of_executors, *of_helpers]


_open: set[Runtime] = set()


def forget_all() -> None:
    """In a forked child, forget open sessions, because they belong to the parent."""
    _open.clear()


@atexit.register
def _close_all() -> None:
    """Close the sessions that a script left open. Afterwards, none of our threads delays the interpreter's exit."""
    generation()  # in a forked child, open sessions belong to the parent
    for runtime in tuple(_open):
        runtime.close()
