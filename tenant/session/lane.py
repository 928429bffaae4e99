"""The fast lane: products of a few rows, in a straight line, while everything is usual.

After the usual way (`session`) has computed a product of a few rows at its first attempt, a `Lane` repeats it with all
that does not change prepared: the arguments of the compiled passes (`core.parts.FewRows`), and the bytes of both
headers, in which only the nonce changes. The next product's pads and masks are made ready while an answer is awaited,
and memory is used again. The steps and every bit are the same: encode, mask, burn pads, gate, send, check.

Everything unusual goes back to the usual way, with rows, pads and bytes as they are: pads that do not fit or whose
effects are not there, no free connection, an answer with another header, a failure, a row that fails the check. A lane
chooses nothing: it exists where one executor serves the group, and ends when an executor joins or leaves, or states
other limits.
"""

import ctypes
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.errors import NonFiniteError
from symbiosis_priv.native import FORMATS
from tenant.connections.channel import KnownFrames, RepeatedRequest, fresh_nonce
from tenant.connections.executor_client import Answer, ExecutorClient
from tenant.core.pads import Pad
from tenant.core.parts import MOST_FEW, FewRows, FloatRows, Layout, Part, Places, PreparedPads, Space
from tenant.routing.known_provider import KnownProvider
from tenant.routing.routes import Routes
from tenant.session import tally
from tenant.session.supply import Supply
from tenant.session.tally import Tally, clock, sights

_ONE_MATRIX = ctypes.c_int64 * 5  # as `native.layout` of a matrix


class Attempt(NamedTuple):
    """A request that a lane has made and cannot finish: the executor's answer, or why there is none."""

    provider: KnownProvider
    began: float
    outcome: Answer | BaseException


class Unfinished(NamedTuple):
    """What the usual way must go on with: the rows if nothing is masked, or the masked request. `attempt` is None if
    nothing was sent."""

    masked: tuple[RepeatedRequest, Space] | None = None
    attempt: Attempt | None = None


class Lane:
    """Products like one that the usual way has computed. `part`: its only part. `memory`: of finished products, which
    lanes use again."""

    def __init__(
        self,
        part: Part,
        client: ExecutorClient,
        routes: Routes,
        pads: Supply,
        counters: Tally,
        memory: list[Tensor],
        *,
        deadline_s: float,
    ) -> None:
        [[request]] = part.requests.values()
        self._routes, self._tally, self._deadline_s, self._memory = routes, counters, deadline_s, memory
        self._client, self._provider = client, client.provider
        self.few = FewRows(part)
        self.place, self._pads = (part.index, part.direction), pads
        self._frames = KnownFrames(request, inputs=part.plan.inputs, outputs=part.outputs)
        self._size = part.size
        self._asked = next(iter(part.requests))
        self._version, self._welcome = routes.version, client.provider.welcome
        self._ready: list[PreparedPads] = []  # popping is atomic, also with threads
        self._used: tuple[Tensor, Space] | None = None  # the latest memory, as this lane divides it

    @property
    def ended(self) -> bool:
        """True if another executor may serve the group, or if this one states other limits."""
        return self._routes.version != self._version or self._provider.welcome != self._welcome

    def places(self, rows: FloatRows) -> Places | None:
        """Where these rows are read and their results written; None if they are not like those that this lane was made
        for. The compiled code trusts these shapes."""
        inputs, outputs = self._layout(rows.inputs, self.few.width), self._layout(rows.outputs, self.few.outputs)
        return None if inputs is None or outputs is None or rows.bound is not self.few.bound else (inputs, outputs)

    def _layout(self, matrices: Sequence[Tensor], width: int) -> Layout | None:
        dtype, rows = matrices[0].dtype, self.few.count
        for matrix in matrices:
            shape = matrix.shape
            if matrix.dtype is not dtype or len(shape) != 2 or shape[0] != rows or matrix.stride(1) != 1:
                return None
            width -= shape[1]
        return None if width or dtype not in FORMATS else native.layout(matrices)

    def outputs(self, x: Tensor, widths: Sequence[int], dtype: torch.dtype) -> tuple[list[Tensor], Places] | None:
        """Allocate the outputs `[..., w_k]` of inputs `[..., d]`. Returns them, and the places of both; None if this
        lane does not take such inputs."""
        few, (*lead, width), read, written = self.few, x.shape, FORMATS.get(x.dtype), FORMATS.get(dtype)
        if read is None or written is None or width != few.width or sum(widths) != few.outputs:
            return None
        if not (x.is_cpu and x.is_contiguous() and x.numel() == few.count * width):
            return None
        fields, outputs = [written, len(widths)], list[Tensor]()
        for width in widths:
            out = torch.empty((*lead, width), dtype=dtype, device="cpu")
            outputs.append(out)
            fields += out.data_ptr(), width, width
        inputs = _ONE_MATRIX(read, 1, x.data_ptr(), few.width, few.width)
        return outputs, (inputs, (ctypes.c_int64 * len(fields))(*fields))

    def multiply(self, places: Places) -> Unfinished | None:
        """Compute a product of rows at these places. Returns None if it is done."""
        few, routes, provider = self.few, self._routes, self._provider
        if not routes.all_up or sights or self.ended:
            return Unfinished()
        inputs, outputs = places
        began = clock()
        if not self._ready:
            self._prepare_next()
        try:
            pads = self._ready.pop()
        except IndexError:  # no pad was there, or another thread has taken it
            return Unfinished()
        taken = clock()
        memory, space = self._take_memory()
        try:
            sent = few.mask(inputs, pads, space)
        except NonFiniteError:
            self._ready.append(pads)
            raise
        since, request = time.monotonic(), RepeatedRequest(self._frames, fresh_nonce(), sent, space.answer)
        masked = clock()
        routes.taken(provider)
        try:
            deadline = since + self._deadline_s
            answer = self._client.repeat(request, deadline=deadline, meanwhile=self._prepare_next)
        except BaseException as error:
            return self._unfinished(request, space, Attempt(provider, since, error))
        if answer is None:
            routes.cancelled(provider)
            return self._unfinished(request, space, None)
        arrived = clock()
        if not few.decode(answer.words, pads, space, outputs):
            return self._unfinished(request, space, Attempt(provider, since, answer))
        self._memory.append(memory)
        if tally.recording is not None:
            tally.record("take pads", since=began, until=taken)
            tally.record("quantise", since=taken, until=masked)  # and mask
            tally.record("network + product", since=masked, until=arrived)
            tally.record("unmask + verify + dequantise", since=arrived)
        routes.answered(provider, seconds=answer.seconds, size=self._size, verified=sent.holders)
        with self._tally.lock:
            counts = self._tally.counts
            counts.products += 1
            counts.rows += few.count
            counts.answers_verified += few.count
            if pads.kept:
                counts.pads_taken += few.count
                counts.effects_verified += few.count if sent.holders else 0
        return None

    def part(self, rows: FloatRows, unfinished: Unfinished) -> Part:
        """The part with which the usual way goes on."""
        assert unfinished.masked is not None
        request, space = unfinished.masked
        part = self.few.part(rows, space, request.rows)
        if unfinished.attempt is not None:  # a retry sends identical bytes (rule 3)
            part.requests[self._asked] = [self._frames.message(request.nonce)]
        return part

    def _unfinished(self, request: RepeatedRequest, space: Space, attempt: Attempt | None) -> Unfinished:
        with self._tally.lock:
            self._tally.counts.pads_taken += sum(pad.rows for pad in request.rows.pads)
        return Unfinished((request, space), attempt)

    def _take_memory(self) -> tuple[Tensor, Space]:
        try:
            memory = self._memory.pop()
        except IndexError:
            memory = torch.empty(0, dtype=torch.int32, device="cpu")
        used = self._used
        if used is None or used[0] is not memory:
            if len(memory) < self.few.entries:
                memory = torch.empty(self.few.entries, dtype=torch.int32, device="cpu")
            used = self._used = memory, self.few.space(memory)
        return used

    def _prepare_next(self) -> None:
        if self._ready:
            return
        pads = self._pads.take_ready(*self.place, self.few.count, most=MOST_FEW)
        self._pads.order(*self.place, self.few.count)
        if pads is not None:
            self._ready += self.few.prepared(pads)


def may_repeat(part: Part, routes: Routes, pads: Supply) -> bool:
    """Returns True if a lane can compute products like a part that was answered at its first attempt."""
    return (
        part.count == part.rows.count <= MOST_FEW
        and type(part.rows) is FloatRows
        and part.counts is None
        and all(type(pad) is Pad for pad in part.pads)
        and native.library() is not None
        and [len(requests) for requests in part.requests.values()] == [1]
        and sum(provider.serves(part.index) for provider in routes.executors) == 1
    )
