"""The fast lane: products of a few rows, in a straight line, while everything is usual.

Decoding sends one row per product, and Python's way through the session takes longer than the product. After the usual
way (`session`) has computed a product of a few rows at its first attempt, a `Lane` repeats it with all that does not
change prepared: the arguments of the compiled passes (`core.parts.FewRows`), and the bytes of both headers, in which
only the nonce changes. What the next product needs besides its rows (pads, their masks, memory) is made ready while an
answer is awaited. The steps, their order and every bit are the same: encode, burn pads, mask, gate, send, check.

Everything unusual goes back to the usual way, with rows, pads and bytes as they are: pads that do not fit or whose
effects are not there, no free connection, an answer with another header, a failure, a row that fails the check. A lane
chooses nothing: it exists where one executor serves the group, and ends when an executor joins or leaves, or states
other limits.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from symbiosis_priv import native
from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.errors import NonFiniteError
from tenant.connections.channel import KnownFrames, fresh_nonce
from tenant.connections.executor_client import Answer, ExecutorClient
from tenant.core.masked import mask
from tenant.core.pads import Pad
from tenant.core.parts import MOST_FEW, Effects, FewRows, FloatRows, Part, Space
from tenant.core.verifier import V
from tenant.routing.known_provider import KnownProvider
from tenant.routing.routes import Routes
from tenant.session import tally
from tenant.session.supply import Supply, has_effects
from tenant.session.tally import Tally, clock, sights


class Attempt(NamedTuple):
    """A request that a lane has made and cannot finish: the executor's answer, or why there is none."""

    provider: KnownProvider
    began: float
    outcome: Answer | BaseException

    def result(self) -> Answer:
        """The answer. Raises the error if there is none."""
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


class Unfinished(NamedTuple):
    """What the usual way must go on with: all rows if `part` is None, or the part, which has pads. `attempt` is None if
    nothing was sent."""

    part: Part | None = None
    attempt: Attempt | None = None


class _Ready(NamedTuple):
    """What a product needs besides its rows."""

    pads: Sequence[Pad]
    effects: Effects
    space: Space


class Lane:
    """Products like one that the usual way has computed.

    Args:
        part: its only part.
        v: V of the matrix.
        client: the executor that has answered.
    """

    def __init__(
        self,
        part: Part,
        v: V,
        client: ExecutorClient,
        routes: Routes,
        pads: Supply,
        counters: Tally,
        *,
        deadline_s: float,
    ) -> None:
        [[request]] = part.requests.values()
        assert isinstance(v, Column)
        self._routes, self._pads, self._tally, self._deadline_s = routes, pads, counters, deadline_s
        self._client, self._provider = client, client.provider
        self._few = FewRows(part, v)
        self._frames = KnownFrames(request, inputs=part.width, outputs=part.outputs)
        self._place, self._size = (part.index, part.direction), part.size
        self._asked = next(iter(part.requests))
        self._version, self._welcome = routes.version, client.provider.welcome
        self._ready: list[_Ready] = []  # popping is atomic, also with threads

    def multiply(self, rows: FloatRows) -> Unfinished | None:
        """Compute a product. Returns None if it is done."""
        few, routes, provider = self._few, self._routes, self._provider
        if not (routes.all_up and routes.version == self._version and provider.welcome == self._welcome):
            return Unfinished()
        if (places := few.takes(rows)) is None:
            return Unfinished()
        inputs, outputs = places
        times = [clock()]
        try:
            ready = self._ready.pop()
        except IndexError:  # another thread has taken it, or no pad was there
            ready = None
        space = few.space() if ready is None else ready.space
        try:
            few.encode(inputs, space)
        except NonFiniteError:
            if ready is not None:
                self._ready.append(ready)  # nothing was masked with its pads
            raise
        times.append(clock())
        if ready is not None:
            pads, effects = ready.pads, ready.effects
            self._pads.used(*self._place, few.count)
        else:
            pads = self._pads.take(*self._place, few.count)
            if pads and not (len(pads) == 1 and has_effects(pads[0])):
                return Unfinished(few.part(rows, space, pads, None))
            effects = few.effects(pads)
        times.append(clock())
        if sights:
            tally.before_mask(space.words)
        sent = mask(space.words, pads)
        times.append(clock())
        since = time.monotonic()
        nonce = fresh_nonce()
        routes.taken(provider)
        try:
            answer = self._client.repeat(
                self._frames, nonce, sent, deadline=since + self._deadline_s, meanwhile=self._prepare_next
            )
        except BaseException as error:
            return self._unfinished(few.part(rows, space, pads, sent), nonce, since, error)
        if answer is None:
            routes.cancelled(provider)
            return Unfinished(few.part(rows, space, pads, sent))
        times.append(clock())
        if not few.decode(answer.words, effects, space, outputs):
            return self._unfinished(few.part(rows, space, pads, sent), nonce, since, answer)
        if tally.recording is not None:
            tally.record_steps([*times, clock()])
        if sights:
            tally.after_answer(sent, ring_bits=rows.ring_bits)
        routes.answered(provider, seconds=answer.seconds, size=self._size)
        routes.record_verified(provider, sent.holders)
        with self._tally.lock:
            counts = self._tally.counts
            counts.products += 1
            counts.rows += few.count
            counts.answers_verified += few.count
            counts.effects_verified += few.count if sent.holders else 0
        return None

    def _unfinished(self, part: Part, nonce: bytes, began: float, outcome: Answer | BaseException) -> Unfinished:
        part.requests[self._asked] = [self._frames.message(nonce)]  # a retry sends identical bytes (rule 3)
        return Unfinished(part, Attempt(self._provider, began, outcome))

    def _prepare_next(self) -> None:
        """Work while the answer is awaited: order pads, and make ready what the next product needs besides its rows."""
        self._pads.order(*self._place, self._few.count)
        if self._ready or (pads := self._pads.take_ready(*self._place, self._few.count)) is None:
            return
        for pad in pads:
            for share in pad.shares:
                share.keystream.make_ahead(share.first_row, pad.rows)
        self._ready.append(_Ready(pads, self._few.effects(pads), self._few.space()))


def may_repeat(part: Part, routes: Routes, pads: Supply) -> bool:
    """Returns True if a lane can compute products like a part that was answered at its first attempt."""
    return (
        part.count == part.rows.count <= MOST_FEW
        and type(part.rows) is FloatRows
        and part.counts is None
        and pads.relays is None
        and all(type(pad) is Pad for pad in part.pads)
        and native.library() is not None
        and [len(requests) for requests in part.requests.values()] == [1]
        and sum(provider.serves(part.index) for provider in routes.executors) == 1
    )
