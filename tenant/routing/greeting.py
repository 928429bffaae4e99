"""Hearing from providers what they serve: from all of them when a session opens, and again from who was away.

A session opens once every layer group is covered by executors that were heard, and enough helpers for a pad. Whoever is
not needed for that may be away; greetings go on in the background and never hold up a product. If somebody is needed
who does not come, or a range of layers is served by nobody, the session says so before anything is sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from symbiosis_priv.checkpoints.layers import spans
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.errors import SymbiosisError, UncoveredError
from symbiosis_priv.federation import Federation
from symbiosis_priv.network import wire
from tenant.routing.route import Route
from tenant.routing.routes import Routes
from tenant.worker import Worker

Greeting = Callable[[Route], wire.Welcome]
_GRACE_S = 0.25  # for those who are not needed, so that the first products have a choice


class Greeter:
    """See the module's text. Thread-safe.

    Args:
        routes: who there is; is told what they say.
        manifest: the layer groups that must be covered.
        persist: greets a provider until the session's deadline, or for as long as what it is told says that it is
            wanted: nobody is waited for who can be done without.
        try_once: greets it once.
        closing: set once the session is being closed: then it is nobody's failure that a greeting fails.
        before: finds out who there is.
    """

    def __init__(
        self,
        routes: Routes,
        manifest: Manifest,
        *,
        persist: Callable[[Route, Callable[[], bool]], wire.Welcome],
        try_once: Greeting,
        closing: threading.Event,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._routes, self._manifest, self._closing = routes, manifest, closing
        self._persist, self._try_once, self._before = persist, try_once, before
        self._lock = threading.Lock()
        self._met: Future[None] | None = None
        self._has_met = False
        self._errors: dict[Route, SymbiosisError] = {}
        self._workers: dict[Route, Worker] = {}  # no longer than a greeting: executors of registries come and go

    @property
    def workers(self) -> Sequence[Worker]:
        """Threads of greetings that are under way."""
        with self._lock:
            return tuple(self._workers.values())

    def meet(self) -> None:
        """Hear from as many as are needed, once; several threads may wait for it.

        Raises:
            UncoveredError: nobody serves some layers.
            SymbiosisError: somebody who is needed is away, or is not what it should be.
        """
        if self._has_met:  # every product asks
            return None
        with self._lock:
            mine = self._met is None or self._met.done()
            met = self._met = Future() if self._met is None or mine else self._met
        if not mine:
            return met.result()
        try:
            self._meet()
        except BaseException as error:
            met.set_exception(error)
            raise
        self._has_met = True
        met.set_result(None)
        return None

    def revive(self, urgent: Collection[Route] = ()) -> None:
        """Greet those in the background that have been left alone for long enough; see `Routes.to_greet`."""
        for route in self._routes.to_greet(urgent):
            self._greet(route, self._try_once)

    def _meet(self) -> None:
        self._before()
        waiting = {
            greeting
            for route in (*self._routes.executors, *self._routes.helpers)
            if route.peer not in self._routes.quarantined and (greeting := self._greet(route, self._until_enough))
        }
        grace_over: float | None = None
        while waiting:
            enough = self._enough()
            if enough and grace_over is None:
                grace_over = time.monotonic() + _GRACE_S
            left = None if grace_over is None else grace_over - time.monotonic()
            if left is not None and left <= 0:
                return
            _, waiting = wait(waiting, left, FIRST_COMPLETED)  # without a grace: each of them has its deadline
        if not self._enough():
            raise self._missing()

    def _until_enough(self, route: Route) -> wire.Welcome:
        return self._persist(route, lambda: not self._enough())

    def _enough(self) -> bool:
        heard = sum(route.welcome is not None for route in self._routes.helpers)
        return heard >= self._routes.helpers_per_pad and not self._routes.uncovered(len(self._manifest.groups))

    def _missing(self) -> SymbiosisError:
        """What to say, of all that went wrong."""
        routes = self._routes
        needed: tuple[Route, ...] = routes.executors if len(routes.executors) == 1 else ()
        if not (uncovered := routes.uncovered(len(self._manifest.groups))):
            needed = routes.helpers
        for route in needed:
            if error := self._errors.get(route):
                return error
        layers = self._manifest.layers
        said = [self._said(route, layers) for route in routes.executors]
        return UncoveredError(
            f"nobody serves layers {_text([layers[group] for group in uncovered])} of this model: {'; '.join(said)}. "
            f"Add an executor of them to the federation, or start it; `symbiosis-priv federation check` shows who "
            f"serves what."
        )

    def _said(self, route: Route, layers: Sequence[int]) -> str:
        if route.welcome is not None:
            served = [layer for group, layer in enumerate(layers) if route.serves(group)]
            return f"{route} serves {_text(served)}"
        return f"{route} was not heard ({self._errors.get(route, 'it is quarantined')})"

    def _greet(self, route: Route, greeting: Greeting) -> Future[None] | None:
        with self._lock:
            if route in self._workers:
                return None
            worker = self._workers[route] = Worker(f"greet-{route.peer.name}")
        return worker.submit(self._hear, route, greeting)

    def _hear(self, route: Route, greeting: Greeting) -> None:
        try:
            welcome = greeting(route)
        except SymbiosisError as error:
            here = {*self._routes.executors, *self._routes.helpers}
            with self._lock:
                self._errors = {other: why for other, why in self._errors.items() if other in here} | {route: error}
            if not self._closing.is_set():
                self._routes.failed(route, error)
        else:
            self._routes.greeted(route, welcome)
        finally:
            with self._lock:
                self._workers.pop(route).stop()


def check_expected(federation: Federation, manifest: Manifest) -> None:
    """Raises `UncoveredError` if the federation file itself leaves layers out: every executor in it says what it is to
    serve, and no registry may bring another one."""
    ranges = [peer.layers for peer in federation.executors if peer.layers is not None]
    if federation.registries is not None or len(ranges) < len(federation.executors):
        return
    if missing := [layer for layer in manifest.layers if not any(layer in served for served in ranges)]:
        listed = "; ".join(f"{peer.name!r} serves {peer.layers}" for peer in federation.executors)
        raise UncoveredError(
            f"nobody serves layers {_text(missing)} of this model, by the federation file: {listed}. "
            f"Add an executor of them."
        )


def _text(layers: Sequence[int]) -> str:
    """`0-3, 7`."""
    return ", ".join(map(str, spans(layers))) or "none"
