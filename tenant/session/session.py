"""A masked, verified session with the providers of a federation: `RingProduct` over the wire.

    session.Session      the public class: opens and closes, counts, notices forks
    product.multiply     one product: quantise, mask, send, open, check
    routes.Routes        the providers that may be asked
    runtime.Runtime      what belongs to one process: the secret, pads, threads, connections

Several threads may multiply at the same time, also by the same layer group. No thread holds a lock while it waits for
the network. The secret, the counters, the pools and the connections belong to one process: after a fork the child
starts with fresh ones (rules 2 and 12).
"""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.federation import Federation
from symbiosis_priv.limits import GroupIndex
from tenant.connections.channel import Channel
from tenant.core.pads import call_in_child, generation
from tenant.core.parts import Rows
from tenant.masking.backend import RingRows
from tenant.masking.registry import session_scheme
from tenant.options import SessionOptions
from tenant.preparation.prepared import Preparation
from tenant.routing.known_provider import ProviderFigures
from tenant.routing.probing import check_expected
from tenant.routing.routes import Routes
from tenant.session.product import multiply
from tenant.session.runtime import Runtime, forget_all
from tenant.session.tally import Ledger, Tally


class Session:
    """A masked, verified session with the providers of a federation. Thread-safe.

    Args:
        preparation: facts and verification keys of the pinned model.
        store: the tenant's own copy of the weights, for schemes that need it.

    Attributes:
        routes: the providers that may be asked.

    Raises:
        RoleConflictError, ConfigError: the scheme cannot be used with these providers (`Scheme.check`).
        UncoveredError: no provider in the federation file serves some layers of the model.
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
        self._scheme.check(federation)
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

    def product(self, index: GroupIndex, direction: Direction, rows: Tensor, *, counts: Counts | None = None) -> Tensor:
        """Multiply integer rows, int32 `[r, d]`, whose true product fits int32. Returns int32 `[r, o]`.

        Args:
            counts: rows of every expert of a stack, by which they are sorted; None to multiply by the whole matrix.
        """
        outputs = self.preparation.facts[index].for_rows(counts).outputs(direction)
        ring_rows = RingRows(rows, outputs=outputs, counts=counts, ring_bits=self._options.ring_bits)
        self.multiply(index, direction, ring_rows)
        return ring_rows.product

    @property
    def closed(self) -> bool:
        """True if the session was closed."""
        return self._closed

    @property
    def runtime(self) -> Runtime:
        """The secret, pads, threads and connections of this process. They are made at the first access."""
        return self._open()

    def ledger(self) -> Ledger:
        """Return the counters of the session so far."""
        ledger = self._tally.ledger()
        ledger.providers = self.routes.figures()
        if (runtime := self._runtime) is None:
            return ledger
        to_executors = [c.traffic for e in runtime.executors for c in e.channels]
        to_helpers = [c.traffic for h in runtime.helpers for c in h.channels]
        peers = [one.peer for one in (*self.routes.executors, *self.routes.helpers)]
        late = {(peer.role, peer.name) for peer in peers if runtime.notices.is_waited_for(peer.label)}
        ledger.providers = tuple(
            replace(one, state="not answering") if (one.role, one.name) in late and one.state == "up" else one
            for one in ledger.providers
        )
        channels = {("executor", e.provider.peer.name): e.channels for e in runtime.executors}
        channels |= {("helper", h.peer.name): h.channels for h in runtime.helpers}
        ledger.providers = tuple(_with_bytes(one, channels.get((one.role, one.name), ())) for one in ledger.providers)
        pools = runtime.pads.pools
        ledger.pads_taken = sum(p.taken for p in pools)
        ledger.pads_dry = sum(p.dry for p in pools)
        ledger.pads_ready = sum(p.ready() for p in pools)
        ledger.executor_round_trips = sum(t.round_trips for t in to_executors)
        ledger.helper_round_trips = sum(t.round_trips for t in to_helpers)
        ledger.bytes_to_executors = sum(t.bytes_sent for t in to_executors)
        ledger.bytes_from_executors = sum(t.bytes_received for t in to_executors)
        ledger.bytes_to_helpers = sum(t.bytes_sent for t in to_helpers)
        ledger.bytes_from_helpers = sum(t.bytes_received for t in to_helpers)
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
                self._runtime = Runtime(
                    self._federation,
                    self.preparation,
                    self._scheme,
                    self._options,
                    self._store,
                    self.routes,
                    self._tally,
                )
                # closes the connections if the caller does not call `backend_of(model).close()`
                self._finalizer = weakref.finalize(self, self._runtime.close_in_background)
                self._finalizer.atexit = False  # `runtime` then closes the connections, and waits
            return self._runtime

    def _reset_after_fork(self) -> None:
        """In a forked child, drop all state of the parent, and replace locks that its threads may have held."""
        self._lock = threading.RLock()
        self._tally.reset_after_fork()
        self.routes.reset_after_fork()
        if self._runtime is not None:
            self._runtime.abandon()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._runtime = self._finalizer = None


def _with_bytes(figures: ProviderFigures, channels: Sequence[Channel]) -> ProviderFigures:
    sent, received = (sum(getattr(c.traffic, name) for c in channels) for name in ("bytes_sent", "bytes_received"))
    return replace(figures, bytes_sent=sent, bytes_received=received)


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _reset_all_after_fork() -> None:
    forget_all()
    for session in _sessions:
        session._reset_after_fork()


call_in_child(_reset_all_after_fork)
