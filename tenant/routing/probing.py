"""Connects to all providers when a session opens, and later to those that were away. Records what they serve.

A session opens when executors that have answered cover every layer group, and enough helpers for a pad have answered.
Other providers may be away: attempts to connect to them continue in the background and never delay a product. If a
needed provider does not answer, or no executor serves some layers, the session raises an error before anything is sent.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from symbiosis_priv.checkpoints.layers import spans
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.errors import ProviderError, SymbiosisError, UncoveredError
from symbiosis_priv.federation import Federation
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.routing.known_provider import KnownProvider
from tenant.routing.routes import Routes
from tenant.worker import Worker

Probe = Callable[[KnownProvider], wire.Welcome]
_GRACE_S = 0.25  # seconds to wait for providers that are not needed, so that the first products have a choice


class Prober:
    """Connects to the providers of a session, which must cover all layer groups of `manifest`. Thread-safe. `retry`:
    connects to a provider, until the session's deadline, or while its second argument returns True. `try_once`:
    connects without retries. `closing`: set when the session closes; then no failure counts against a provider."""

    def __init__(
        self,
        routes: Routes,
        manifest: Manifest,
        *,
        retry: Callable[[KnownProvider, Callable[[], bool]], wire.Welcome],
        try_once: Probe,
        closing: threading.Event,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._routes, self._manifest, self._closing = routes, manifest, closing
        self._retry, self._try_once, self._before = retry, try_once, before
        self._lock = threading.Lock()
        self._connecting: Future[None] | None = None
        self._connected = False
        self._errors: dict[KnownProvider, SymbiosisError] = {}
        # referenced during a probe only, because executors from registries come and go
        self._probes: dict[KnownProvider, tuple[Worker, Future[None]]] = {}

    @property
    def workers(self) -> Sequence[Worker]:
        with self._lock:
            return tuple(worker for worker, _ in self._probes.values())

    def connect(self) -> None:
        """Connect to the needed providers, once per session. Several threads may wait in this method; if the thread
        that connects is interrupted, another one goes on. Raises `UncoveredError`: no executor serves some layers;
        `SymbiosisError`: a needed provider is away, or is another one."""
        while not self._connected:  # every product calls this
            with self._lock:
                mine = self._connecting is None or self._connecting.done()
                connecting = self._connecting = Future() if self._connecting is None or mine else self._connecting
            if not mine:
                if isinstance(error := connecting.exception(), Exception):
                    raise error
                continue
            try:
                self._connect()
            except BaseException as error:
                connecting.set_exception(error)
                raise
            self._connected = True
            connecting.set_result(None)

    def reconnect(self, urgent: Collection[KnownProvider] = ()) -> None:
        """Reconnect in the background to providers whose pause is over; see `Routes.to_probe`."""
        for provider in self._routes.to_probe(urgent):
            self._probe(provider, self._try_once)

    def reaches_executor(self) -> bool:
        """Connect to executors until one answers, once each. Returns False if none does."""
        for provider in self._routes.executors:
            if provider.peer not in self._routes.quarantined:
                with contextlib.suppress(SymbiosisError):
                    with contextlib.suppress(ProviderError):  # it is busy, or has enough connections
                        self._try_once(provider)
                    return True
        return False

    def _connect(self) -> None:
        self._before()

        def until_enough(provider: KnownProvider) -> wire.Welcome:
            return self._retry(provider, lambda: not self._enough())

        waiting = {
            self._probe(provider, until_enough)
            for provider in (*self._routes.executors, *self._routes.helpers)
            if provider.peer not in self._routes.quarantined
        }
        grace_over: float | None = None
        while waiting:
            enough = self._enough()
            if enough and grace_over is None:
                grace_over = time.monotonic() + _GRACE_S
            left = None if grace_over is None else grace_over - time.monotonic()
            if left is not None and left <= 0:
                return
            # without a timeout, because each attempt has its own deadline
            _, waiting = wait(waiting, left, FIRST_COMPLETED)
        if not self._enough():
            raise self._missing()

    def _enough(self) -> bool:
        return not self._routes.uncovered(len(self._manifest.groups)) and not self._without_helpers()

    def _without_helpers(self) -> list[int]:
        needed, groups = self._routes.helpers_per_pad, map(GroupIndex, range(len(self._manifest.groups)))
        answered = {index: [one.welcome is not None for one in self._routes.holders(index)] for index in groups}
        return [index for index, holders in answered.items() if sum(holders) < needed]

    def _missing(self) -> SymbiosisError:
        routes = self._routes
        uncovered = routes.uncovered(len(self._manifest.groups))
        role, providers, needed = "executor", routes.executors, routes.executors
        if uncovered and len({provider.peer.name for provider in providers}) > 1:
            needed = ()
        elif not uncovered:
            role, providers, needed, uncovered = "helper", routes.helpers, routes.helpers, self._without_helpers()
        for provider in needed:
            if error := self._errors.get(provider):
                return error
        layers = self._manifest.layers
        states = []
        for provider in providers:
            if provider.welcome is None:
                states.append(f"{provider} has not answered ({self._errors.get(provider, 'it is quarantined')})")
            else:
                served = [layer for group, layer in enumerate(layers) if provider.serves(GroupIndex(group))]
                states.append(f"{provider} serves {_text(served)}")
        return UncoveredError(
            f"no {role} serves layers {_text([layers[group] for group in uncovered])} of this model: "
            f"{'; '.join(states)}. Add one of them to the federation, or start it; `symbiosis-priv federation "
            f"check` shows the layers of each."
        )

    def _probe(self, provider: KnownProvider, probe: Probe) -> Future[None]:
        """Probe a provider in the background, unless a probe of it is running."""
        with self._lock:
            if provider not in self._probes:
                worker = Worker(f"probe-{provider.peer.name}")
                self._probes[provider] = worker, worker.submit(self._run, provider, probe)
            return self._probes[provider][1]

    def _run(self, provider: KnownProvider, probe: Probe) -> None:
        try:
            welcome = probe(provider)
        except SymbiosisError as error:
            known = {*self._routes.executors, *self._routes.helpers}
            with self._lock:
                self._errors = {other: why for other, why in self._errors.items() if other in known} | {provider: error}
            if not self._closing.is_set():
                self._routes.failed(provider, error)
        else:
            self._routes.connected(provider, welcome)
        finally:
            with self._lock:
                self._probes.pop(provider)[0].stop()


def check_expected(federation: Federation, manifest: Manifest) -> None:
    """Raise `UncoveredError` if the executors of the federation file leave layers out. Not checked if an executor in
    the file has no `layers`, or a registry may add executors."""
    ranges = [peer.layers for peer in federation.executors if peer.layers is not None]
    if federation.registries is not None or len(ranges) < len(federation.executors):
        return
    if missing := [layer for layer in manifest.layers if not any(layer in served for served in ranges)]:
        listed = "; ".join(f"{peer.name!r} serves {peer.layers}" for peer in federation.executors)
        raise UncoveredError(
            f"no executor serves layers {_text(missing)} of this model, by the federation file: {listed}. "
            f"Add an executor of them."
        )


def _text(layers: Sequence[int]) -> str:  # such as `0-3, 7`
    return ", ".join(map(str, spans(layers))) or "none"
