"""A tenant that sends requests without a model, over TLS, in a `Child`, for `bench provider`.

There are three phases. First the tenant sends its requests alone and keeps the answers. Then other tenants send
requests too, and the tenant compares every answer with the kept one. In the third phase, which is measured, it compares
only one row of each answer, to use little CPU time.

A generating tenant sends its rows through every layer group forward, as for one token of a batch. A training tenant
sends them forward and backward, as for one step. Between two requests a tenant computes with its adapter.
"""

import contextlib
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.federation import load_federation
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import client_context
from tenant.connections.channel import Channel, fresh_nonce
from tenant.core.masked import UNMASKED_BY_CHOICE, mask

Kind = Literal["generating", "training"]
Phase = Literal["alone", "checked", "measured"]
DEADLINE_S = 120.0
_NICE = 10  # the provider has priority, because in practice tenants have their own machines


@dataclass(frozen=True, kw_only=True)
class RequestLoad:
    """One tenant, and the requests that it sends. Its adapter has rank `rank` on every layer group. `rows`: of each
    request, one for each sequence of a batch. `groups`: (inputs, outputs) of each layer group. `checked_s`: seconds
    before the measurement, in which every answer is compared."""

    name: str
    identity: Identity
    kind: Kind
    rows: int
    rank: int
    federation: Path
    groups: tuple[tuple[int, int], ...]
    seconds: float
    checked_s: float


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """The result of a tenant: seconds of each measured token or step (at least one); and in the checked and the
    measured phase, the number of compared answers and of those that differ from the answers received alone."""

    turns: list[float]
    answers: int
    wrong: int


@contextmanager
def serve_load(load: RequestLoad) -> Iterator[Callable[[Phase], LoadResult | None]]:
    """The work of a `Child`: the handler runs a phase. "alone" keeps the answers, "checked" compares every answer, and
    "measured" returns the `LoadResult`."""
    torch.set_num_threads(1)
    os.nice(_NICE)
    with contextlib.closing(_Tenant(load)) as tenant:
        phases: dict[Phase, Callable[[], LoadResult | None]] = {
            "alone": tenant.keep_answers,
            "checked": tenant.check,
            "measured": tenant.measure,
        }
        yield lambda phase: phases[phase]()


class _Tenant:
    def __init__(self, load: RequestLoad) -> None:
        federation = load_federation(load.federation)
        self._load, self._groups = load, load.groups
        executor, identity = federation.executors[0], load.identity
        self._channel = Channel(
            executor,
            context=client_context(certificate=identity.certificate, key=identity.key, pins=executor.pins),
            model_digest=federation.model_digest,
            deadline_s=DEADLINE_S,
        )
        generator = torch.Generator().manual_seed(zlib.crc32(load.name.encode()))
        self._rows, self._hidden, self._adapters = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()
        draw = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
        for width in sorted({width for shape in load.groups for width in shape}):
            words = torch.empty(load.rows, width, dtype=torch.int32, device="cpu")
            self._rows[width] = words.random_(-(1 << 31), 1 << 31, generator=generator)
            self._hidden[width], self._adapters[width] = draw(load.rows, width), draw(width, load.rank)
        self._alone: list[Tensor] = []
        self._answers = self._wrong = 0

    def keep_answers(self) -> None:
        self._alone = [self._ask(*step) for step in self._turn()]

    def check(self) -> None:
        end = time.monotonic() + self._load.checked_s
        while time.monotonic() < end:
            self._take_turn(slice(None))

    def measure(self) -> LoadResult:
        turns: list[float] = []
        end = time.monotonic() + self._load.seconds
        while (start := time.monotonic()) < end or not turns:
            row = len(turns) % max(1, self._load.rows)
            self._take_turn(slice(row, row + 1))
            turns.append(time.monotonic() - start)
        return LoadResult(turns=turns, answers=self._answers, wrong=self._wrong)

    def close(self) -> None:
        self._channel.close()

    def _take_turn(self, compared: slice) -> None:
        for step, expected in zip(self._turn(), self._alone, strict=True):
            answer = self._ask(*step)
            self._answers += 1
            self._wrong += not torch.equal(answer[compared], expected[compared])
            inputs, outputs = self._columns(*step)
            _ = (self._hidden[inputs] @ self._adapters[inputs]) @ self._adapters[outputs].T  # the adapter's products

    def _turn(self) -> Iterator[tuple[int, Direction]]:
        for group in range(len(self._groups)):
            yield group, FORWARD
        if self._load.kind == "training":
            for group in reversed(range(len(self._groups))):
                yield group, BACKWARD

    def _columns(self, index: int, direction: Direction) -> tuple[int, int]:
        inputs, outputs = self._groups[index]
        return (inputs, outputs) if direction == FORWARD else (outputs, inputs)

    def _ask(self, index: int, direction: Direction) -> Tensor:
        inputs, outputs = self._columns(index, direction)
        rows = self._rows[inputs]
        request = wire.Execute(nonce=fresh_nonce(), group=index, direction=direction, arithmetic="ring", rows=len(rows))
        return self._channel.request(request, mask(rows, UNMASKED_BY_CHOICE), outputs=outputs)
