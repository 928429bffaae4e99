"""The objects of a session that belong to one process: the secret and its counters, pads, threads and connections
(rules 2 and 12).

A `Runtime` is closed with its session, when the session is garbage collected, or when the program ends: it tells its
threads to stop, shuts connections down, which wakes the threads that read from them, and joins the threads while the
interpreter still works (`tenant.worker`).
"""

import atexit
import contextlib
import functools
import logging
import math
import ssl
import threading
import time
from collections.abc import Callable

from torch import Tensor

from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.arithmetic.passes import Buffers
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from symbiosis_priv.system.locked import protect_process
from tenant.connections.channel import Channel
from tenant.connections.executor_client import ExecutorClient
from tenant.connections.helper_client import HelperClient
from tenant.connections.notices import Notices
from tenant.core.masked import Gate
from tenant.core.pads import SessionSecret, generation
from tenant.core.parts import Part, Plan
from tenant.core.verifier import V
from tenant.masking.scheme import SessionScheme
from tenant.options import SessionOptions
from tenant.preparation.prepared import Preparation
from tenant.routing.discovery import Discovery
from tenant.routing.known_provider import KnownProvider
from tenant.routing.probing import Prober
from tenant.routing.routes import Routes
from tenant.session.lane import Lane
from tenant.session.supply import Supply
from tenant.session.tally import Tally
from tenant.worker import Worker

log = logging.getLogger(__name__)

_UNUSED_BYTES = 256 << 20  # a few answers of the size that fills a request, and their effects
_PROBE_S = 10.0  # time limit of one attempt in the background
_REFUSED_S = 5.0  # how long a refused first connection is retried: wrong port, or provider not started
_FLIGHTS = 4  # threads for products that are under way beside another one
_JOIN_S = 5.0  # a thread may be in the middle of a product or of a name lookup


class Runtime:
    """Secret, pads, threads and connections of one process. Thread-safe. `lanes`: repeat products of few rows, by layer
    group, direction and number of rows. `flights`: threads for products beside the caller's. `closing`: set when the
    runtime is being closed. `version`: `Routes.version` at the last `refresh`."""

    def __init__(
        self,
        federation: Federation,
        preparation: Preparation,
        scheme: SessionScheme,
        options: SessionOptions,
        store: WeightStore | None,
        routes: Routes,
        tally: Tally,
    ) -> None:
        protect_process()
        self.preparation, self.options, self.store = preparation, options, store
        self.routes, self.tally = routes, tally
        self.gate = Gate(federation, federation.helpers if routes.helpers else (), routes.quarantined)
        self.buffers = Buffers(limit=_UNUSED_BYTES)
        self.notices = Notices()
        self.closing = threading.Event()
        self._federation = federation
        self.lanes: dict[tuple[GroupIndex, Direction, int], Lane] = {}
        self._lane_memory: list[Tensor] = []
        self._plans: dict[tuple[GroupIndex, Direction], Plan] = {}
        self.executors = _Clients(self._new_executor)
        self._probing: set[Channel] = set()
        self.flights = [Worker(f"flight-{number}") for number in range(_FLIGHTS)]
        secret = SessionSecret()
        clients = {}
        for provider in routes.helpers:
            new_channel = functools.partial(self._channel, provider.peer, federation.tls_context(provider.peer))
            clients[provider] = HelperClient(provider, routes, new_channel, secret, ring_bits=options.ring_bits)
        self.helpers, self._helpers = tuple(clients.values()), clients
        self.pads = Supply(preparation, scheme, options, store, routes, secret=secret, helpers=clients)
        self._discovery = None if federation.registries is None else Discovery(federation, changed=routes.update)
        self._discovering = False
        self.version = routes.version
        self.prober = Prober(
            routes,
            preparation.manifest,
            retry=self._connect_with_retries,
            try_once=self._try_once,
            closing=self.closing,
            before=self._discover,
        )
        _open.add(self)

    def refresh(self) -> None:
        """Close the connections to executors that have left the federation and have no request in flight."""
        with self.executors.making:
            here = set(self.routes.executors)
            left = [executor for provider, executor in self.executors.items() if provider not in here]
            gone = [executor for executor in left if not executor.provider.in_flight]
            for executor in gone:
                del self.executors[executor.provider]
            if len(gone) == len(left):
                self.version = self.routes.version
        for executor in gone:
            executor.close()

    def plan(self, index: GroupIndex, direction: Direction, *, by_expert: bool) -> Plan:
        """Return what all products of a group and direction have in common; `by_expert`: with rows for experts."""
        if (plan := self._plans.get((index, direction))) is not None and not by_expert:
            return plan
        preparation, facts = self.preparation, self.preparation.facts[index]
        r, v = preparation.keys.for_rows(index, direction, by_expert=by_expert)

        def second() -> tuple[Column, V]:
            return preparation.second().for_rows(index, direction, by_expert=by_expert)

        inputs, outputs = (facts.for_rows(()) if by_expert else facts).columns[direction]
        plan = Plan(index, direction, inputs, outputs, r, v, second)
        if not by_expert:  # V of all experts, in limbs, takes too much memory to be kept
            self._plans[index, direction] = plan
        return plan

    def add_lane(self, part: Part, provider: KnownProvider) -> None:
        """Let a lane compute products like this one, unless there is a lane already."""
        place = part.index, part.direction, part.count
        if place not in self.lanes:
            given = self.executors[provider], self.routes, self.pads, self.tally, self._lane_memory
            self.lanes[place] = Lane(part, *given, deadline_s=self.options.deadline_s)

    def close(self) -> None:
        """Stop threads and close connections. Waits for the threads, up to `_JOIN_S` in all. The runtime cannot be used
        again."""
        self.closing.set()
        with self.executors.making:
            executors = tuple(self.executors.values())
        workers = [self.pads.refill, *self.prober.workers, *self.flights]
        workers += () if self.pads.source is None else self.pads.source.workers
        workers += [worker for executor in executors for worker in executor.workers]
        workers += [channel.worker for helper in self.helpers for channel in helper.channels]
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
        """Close in a new thread, because a finaliser may run on a thread that `close` would wait for."""
        if not self.closing.is_set():
            # no thread can be started: the program is ending, and `_close_all` runs next
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self.close, name="close").start()

    def abandon(self) -> None:
        """Drop the connections that a forked child shares with its parent, without sending a byte."""
        if self._discovery is not None:
            self._discovery.abandon()
        for executor in self.executors.values():
            executor.abandon()
        for helper in self.helpers:
            for channel in helper.channels:
                channel.abandon()

    def _discover(self) -> None:
        if self._discovery is not None:
            self._discovery.refresh()
            if not self._discovering:
                self._discovering = True
                self._discovery.start()

    def _connect_with_retries(self, provider: KnownProvider, wanted: Callable[[], bool]) -> wire.Welcome:
        refused_s = _REFUSED_S if provider.welcome is None else math.inf  # otherwise it may be restarting
        if (helper := self._helpers.get(provider)) is not None:
            return helper.channels[0].welcome(wanted=wanted, refused_s=refused_s)
        with self.executors[provider].take(until=time.monotonic() + self.options.deadline_s) as channel:
            return channel.welcome(wanted=wanted, refused_s=refused_s)

    def _try_once(self, provider: KnownProvider) -> wire.Welcome:
        channel = self._channel(provider.peer)  # own connections: the others may be in use
        self._probing.add(channel)
        try:
            if self.closing.is_set():  # `close` began after this channel was made, and has not seen it
                channel.close()
            until = time.monotonic() + min(_PROBE_S, self.options.deadline_s)
            return channel.connect(deadline=until, wanted=lambda: False)
        finally:
            self._probing.discard(channel)
            channel.close()

    def _new_executor(self, provider: KnownProvider) -> ExecutorClient:
        executor = ExecutorClient(provider, functools.partial(self._channel, provider.peer))
        if self.closing.is_set():
            executor.close()
        return executor

    def _channel(self, peer: Peer, context: ssl.SSLContext | None = None) -> Channel:
        return Channel(
            peer,
            context=context or self._federation.tls_context(peer),
            model_digest=self._federation.model_digest,
            deadline_s=self.options.deadline_s,
            buffers=self.buffers,
            notices=self.notices,
            wiretap=self.options.wiretap,
            ring_bits=self.options.ring_bits,
            permit=self.gate.check,
        )


class _Clients(dict[KnownProvider, ExecutorClient]):
    """The clients of executors, made by `new` when they are first looked up, under the lock `making`."""

    def __init__(self, new: Callable[[KnownProvider], ExecutorClient]) -> None:
        super().__init__()
        self._new, self.making = new, threading.Lock()

    def __missing__(self, provider: KnownProvider) -> ExecutorClient:
        with self.making:
            return self.get(provider) or self.setdefault(provider, self._new(provider))


_open: set[Runtime] = set()


def forget_all() -> None:
    """In a forked child, forget open sessions, because they belong to the parent."""
    _open.clear()


@atexit.register
def _close_all() -> None:  # afterwards, none of our threads delays the interpreter's exit
    generation()  # in a forked child, open sessions belong to the parent
    for runtime in tuple(_open):
        runtime.close()
