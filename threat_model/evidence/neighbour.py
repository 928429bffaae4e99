"""A second tenant of the same executor, which observes the effects of the first tenant."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from provider.operations.health_request import ask_health
from symbiosis_priv.arithmetic.keystream import expand, random_key
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import client_context
from tenant.connections.channel import Channel, fresh_nonce
from tenant.core.masked import UNMASKED_BY_CHOICE, mask
from threat_model.evidence.public import Public
from threat_model.evidence.views import NeighbourView

_ASK_EVERY_S, _HEALTH_EVERY_S = 0.05, 0.5  # a report needs its own connection
_START_S = 120.0
_GROUP, _ROWS = 0, 4  # rows of each of its requests


class Neighbour:
    """A second tenant that sends requests and reads health reports while the first tenant works."""

    def __init__(self, executor: Peer, identity: Identity, public: Public) -> None:
        self._executor, self._identity, self._public = executor, identity, public
        self._seen: list[tuple[float, int]] = []
        self._own: list[Tensor] = []
        self._stop, self._ready = threading.Event(), threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Send requests and read the provider's reports until the block ends."""
        thread = threading.Thread(target=self._watch, name="neighbour")
        thread.start()
        self._ready.wait(_START_S)
        try:
            yield
        finally:
            self._stop.set()
            thread.join(_START_S)

    def view(self) -> NeighbourView:
        """The view so far."""
        return NeighbourView(tuple(self._seen), torch.cat(self._own) if self._own else torch.zeros((0, 1)))

    def _watch(self) -> None:
        channel = Channel(
            self._executor,
            context=client_context(
                certificate=self._identity.certificate, key=self._identity.key, pins=self._executor.pins
            ),
            model_digest=self._public.manifest.digest,
            deadline_s=60,
        )
        entry = self._public.manifest.groups[_GROUP]
        weight = self._public.quantised(_GROUP).weight.to(torch.int32)
        started, asked, due = time.monotonic(), 0, 0.0
        while True:
            last = self._stop.is_set()
            rows = expand(random_key(), first_row=0, rows=_ROWS, width=entry.inputs)
            request = wire.Execute(nonce=fresh_nonce(), group=_GROUP, direction=FORWARD, arithmetic="ring", rows=_ROWS)
            answer = channel.request(request, mask(rows, UNMASKED_BY_CHOICE), outputs=entry.stacked_outputs)
            self._own.append((answer - rows @ weight.t()).double())
            asked += 1
            if last or time.monotonic() >= due:
                due = time.monotonic() + _HEALTH_EVERY_S
                report = self._report()
                self._seen.append((time.monotonic() - started, report.requests - asked))
            self._ready.set()
            if last:
                break
            self._stop.wait(_ASK_EVERY_S)
        channel.close()

    def _report(self) -> wire.HealthReport:
        assert isinstance(self._executor.certificate, Path)
        return ask_health(
            f"{self._executor.host}:{self._executor.port}",
            provider_certificate=self._executor.certificate,
            tenant_certificate=self._identity.certificate,
            tenant_key=self._identity.key,
        )
