"""One masked, verified product. The path of its rows, top to bottom:

    quantise                   inf or nan ends it here             rows.Rows
    take a pad (n, e)          burnt before anything leaves        noise.NoisePool
    choose an executor         that may see rows under this pad    routes.Routes
    send xq + n                one round trip, deadline            executor.Executor
    get ready for the next     while the answer is under way       noise.NoisePool, noise.Pad
    subtract e, check          before anything is used             verifier.VerificationKeys

An executor that is lost, late, busy or refuses is followed by another one that may see rows under these pads, and gets
identical bytes. If there is none, or if an effect is lost or late while helpers are to spare, the rows are put on fresh
pads and sent again (`turn` remembers what has gone wrong, and until when to go on). Whatever happens, the result is the
same bits.

If the check fails, an answer or an effect is wrong. Nobody is asked for anything until it is settled which (`blame`).
Who lied is quarantined: nothing is sent to it again, and the cached keys are dropped. The product goes on with the
others, if those who are left can make it.

A large product goes out in pieces (`pieces`). Each is a request with rows, pads, a deadline and a check of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.errors import (
    CertificateError,
    DeadlineExceededError,
    ProtocolError,
    ProviderError,
    QuarantinedError,
    TransportError,
)
from tenant.connections.executor import Executor
from tenant.connections.lanes import LanesInUseError
from tenant.core.facts import Preparation
from tenant.core.pads import Pad, cut, is_lost, some_rows
from tenant.core.parts import Part, piece_rows, product_bytes
from tenant.core.rows import Rows
from tenant.routing.route import Route
from tenant.routing.routes import Routes
from tenant.session.blame import Blame
from tenant.session.options import SessionOptions
from tenant.session.pieces import share
from tenant.session.runtime import Runtime
from tenant.session.spans import clock, took
from tenant.session.tally import Tally
from tenant.session.turn import Turn

_LOOK_AGAIN_S = 1.0  # whether by now there is another helper to ask


@dataclass(frozen=True)
class Products:
    """Makes products with what belongs to this process.

    Args:
        preparation: facts and verification keys of the pinned model.
        options: deadline, row bucket, size of pieces.
        routes: who may be asked.
        runtime: connections and pads.
        tally: where they are counted.
        blame: settles who lied.
    """

    preparation: Preparation
    options: SessionOptions
    routes: Routes
    runtime: Runtime
    tally: Tally
    blame: Blame

    def multiply(self, index: int, direction: Direction, rows: Rows) -> None:
        """One exact product; see `backend.RingProduct`."""
        self.routes.check(index)
        column, products = self.preparation.keys.columns(index, direction)
        xq, expected = self._encoded(index, direction, rows, products)
        self.runtime.greeter.meet()
        self.runtime.sweep()
        limit = self.runtime.row_limit(index)
        executors = self._sharers(index, xq, limit)
        parts = self._parts(index, direction, rows, xq, column, expected, limit=limit, executors=max(1, len(executors)))
        share(parts, executors, self._masked)
        self.tally.add(products=1, rows=rows.count)

    def _encoded(self, index: int, direction: Direction, rows: Rows, products: Column) -> tuple[Tensor, Tensor]:
        """All rows in the ring, filled up with zeros to the bucket, and what R makes of their true product, by V."""
        count = self._bucketed(rows)
        xq = self.runtime.buffers.matrix(count, self.preparation.facts[index].inputs(direction))
        expected = torch.empty(count, dtype=torch.int64, device="cpu")
        began = clock()
        rows.encode(some_rows(xq, 0, rows.count), column=products, expected=some_rows(expected, 0, rows.count))
        took("quantise", since=began)
        if rows.count < count:
            xq[rows.count :] = 0
            expected[rows.count :] = 0
        return xq, expected

    def _bucketed(self, rows: Rows) -> int:
        """How many rows are sent for these."""
        return rows.count + -rows.count % self.options.row_bucket

    def _sharers(self, index: int, xq: Tensor, limit: int) -> list[Executor]:
        """Those who may share a product; nobody if it goes out as one request."""
        count, entry = xq.shape[0], self.preparation.facts[index].entry
        if count <= limit and piece_rows(count, entry, piece_bytes=self.options.piece_bytes) == count:
            return []
        open_ones = self.routes.open_for(index, product_bytes(count, entry))
        return [self.runtime.executor(route) for route in open_ones]

    def _parts(
        self,
        index: int,
        direction: Direction,
        rows: Rows,
        xq: Tensor,
        column: Column,
        expected: Tensor,
        *,
        limit: int,
        executors: int,
    ) -> list[Part]:
        """Under pads that were burnt for them, in requests of a size that everybody takes."""
        facts = self.preparation.facts[index]
        count, outputs = xq.shape[0], facts.outputs(direction)
        piece = piece_rows(count, facts.entry, piece_bytes=self.options.piece_bytes, executors=executors)
        parts = []
        for first in range(0, count, limit):
            end = min(first + limit, count)
            began = clock()
            pads = self.runtime.take(index, direction, end - first)
            took("take pads", since=began)
            for start in range(first, end, piece):
                size = min(piece, end - start)
                mine, pads = cut(pads, size)
                sent, check = some_rows(xq, start, size), some_rows(expected, start, size)
                parts.append(Part(index, direction, rows, start, sent, column, check, mine, outputs))
        return parts

    def _masked(self, part: Part, seat: Route | None) -> None:
        """The product of some rows, by whoever can be had; `seat` is asked first."""
        began = clock()
        part.put_on_pads()
        took("mask", since=began)
        turn = Turn(self.options, self.runtime)
        while True:
            self._drop_spoilt_pads(part, turn)
            route = self._next(part, seat, turn)
            began = clock()
            answer = self._ask(route, part, turn)
            took("network + product", since=began)
            if answer is None:
                continue
            began = clock()
            complete = self._wait_for_effects(part, turn)
            took("wait for effects", since=began)
            if not complete:
                continue
            began = clock()
            passed = part.decode(answer)
            took("unmask + verify + dequantise", since=began)
            if passed:
                count = part.sent.shape[0]
                self.tally.add(answers_verified=count, effects_verified=count if part.holders else 0)
                self.routes.credit(route, part.holders)
                turn.over(route, self.tally)
                return
            self.blame.accuse(route, part, answer, turn)

    def _next(self, part: Part, seat: Route | None, turn: Turn) -> Route:
        """Whom to ask now. Waits for somebody to come back; puts the rows on other pads if that makes an executor
        admissible.

        Raises:
            DeadlineExceededError: nobody has come.
            SymbiosisError: what was found wrong with the last of them.
        """
        while True:
            self.runtime.greeter.revive()
            self.blame.check(part, turn)
            route = self.routes.choose(part.index, part.size, holders=part.holders, prefer=seat)
            other = None if route else self.routes.choose(part.index, part.size, holders=None)
            if route is None and other is None:
                self.runtime.greeter.revive(urgent=self.routes.executors)
            try:
                if other is not None:
                    self._change_pads(part, turn, other, spoilt=lambda pad: True)
                turn.go_on(pause=route is turn.last if route else other is None)
            except BaseException:
                if taken := route or other:
                    self.routes.given_up(taken)
                raise
            if taken := route or other:
                return taken

    def _ask(self, route: Route, part: Part, turn: Turn) -> Tensor | None:
        """An executor's answer, unverified; None if there is none, and somebody may be asked next."""
        if not self.routes.may_see(route, part.index, part.holders):  # the last word before rows leave (rule 8)
            self.routes.given_up(route)
            return None
        began = time.monotonic()
        patience = self.routes.patience_s(route, part.index, part.size, left_s=turn.deadline - began)
        executor, facts = self.runtime.executor(route), self.preparation.facts[part.index]
        try:
            answer, seconds = executor.ask(
                part,
                facts,
                patience_s=patience,
                deadline=turn.deadline,
                since=turn.began,
                meanwhile=partial(self._get_ready, part),
            )
        except QuarantinedError:
            self.routes.given_up(route)
            return None
        except LanesInUseError as error:
            self.routes.given_up(route)
            raise DeadlineExceededError(
                f"{route} was not asked within {self.options.deadline_s:g} s: {error} by other threads of this "
                f"program. Use fewer threads at once; {self.options.deadline_option} waits longer."
            ) from error
        except TransportError as error:
            self._failed(route, error, turn, waited_s=min(patience, time.monotonic() - began))  # the rest for a lane
            executor.lanes.drop_idle()
            return None
        except (ProviderError, CertificateError) as error:
            self._failed(route, error, turn, waited_s=min(patience, time.monotonic() - began))
            turn.refused.add(route)
            if turn.refused.issuperset(self.routes.able(part.index)):
                raise
            return None
        except ProtocolError as error:
            self.routes.given_up(route)
            self.blame.broke_protocol(route, part, error, turn)
            return None
        except BaseException:
            self.routes.given_up(route)
            raise
        self.routes.answered(route, seconds=seconds, size=part.size)
        return answer

    def _get_ready(self, part: Part) -> None:
        """For the next product, while the answer is under way: order as many pads as this one took, and make masks."""
        self.runtime.order(part.index, part.direction, self._bucketed(part.rows))
        for pad in part.pads:
            pad.make_next()

    def _failed(self, route: Route, error: Exception, turn: Turn, *, waited_s: float) -> None:
        if self.runtime.closing.is_set():
            raise error
        self.routes.failed(route, error, waited_s=waited_s)
        turn.failed(route, error)

    def _wait_for_effects(self, part: Part, turn: Turn) -> bool:
        """Whether they are all there. If not, some pads have to be replaced.

        Raises:
            SymbiosisError: they are not, and nobody else can make them.
        """
        self._wait_patiently(part, turn)
        for share_ in part.shares:
            if share_.holder in turn.late:
                return False
            error = share_.effect.exception()
            if error is None:
                continue
            assert share_.holder is not None or not isinstance(error, ProtocolError)  # nobody lies to itself
            if share_.holder is not None and isinstance(error, ProtocolError):
                self.blame.broke_promise(share_.holder, part, error, turn)
                return False
            if share_.holder is None or not self.routes.has_spares:
                raise error
            turn.effect_error = error
            if isinstance(error, ProviderError | CertificateError):
                turn.declined.add(share_.holder)
                if len(self.routes.holders(part.index, without=turn.declined)) < self.routes.helpers_per_pad:
                    raise error
            return False
        return True

    def _wait_patiently(self, part: Part, turn: Turn) -> None:
        """Until all effects are there, or those that are not are late and can be replaced."""
        missing = {share_ for share_ in part.shares if not share_.effect.done()}
        longest = self.options.deadline_s  # ordered ahead: behind many that an absent helper owes
        began = time.monotonic()
        until = began + longest
        while missing:
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineExceededError(
                    f"no effects from the helpers within {longest:g} s. Are they running? "
                    f"{self.options.deadline_option} waits longer."
                )
            holders = {share_.holder for share_ in missing if share_.holder is not None}
            spare = bool(holders) and self.routes.can_replace(part.index, holders)
            if spare:
                in_turn = turn.deadline - time.monotonic()
                patience = self.routes.patience_with_helpers_s(part.index, holders, part.size, left_s=in_turn)
            else:
                patience = min(left, _LOOK_AGAIN_S)
                waited = time.monotonic() - began
                wanted = self.routes.wanted(part.index, holders, part.size, waited_s=waited)
                self.runtime.greeter.revive(urgent=wanted)
            wait([share_.effect for share_ in missing], max(0.0, patience))
            missing = {share_ for share_ in missing if not share_.effect.done()}
            if missing and spare:
                turn.late |= {share_.holder for share_ in missing if share_.holder is not None}
                self.routes.late(turn.late, waited_s=patience)
                return

    def _drop_spoilt_pads(self, part: Part, turn: Turn) -> None:
        """Put rows on fresh pads where a helper was lost, late or has lied."""

        suspicion = bool(turn.late or self.routes.quarantined)  # hardly ever

        def spoilt(pad: Pad) -> bool:
            return is_lost(pad) or (
                suspicion and any(h in turn.late or h in self.routes.quarantined for h in pad.holders())
            )

        if part.pads and any(map(spoilt, part.pads)):
            self.blame.check(part, turn)
            self._change_pads(part, turn, None, spoilt=spoilt)
            turn.late.clear()

    def _change_pads(self, part: Part, turn: Turn, executor: Route | None, *, spoilt: Callable[[Pad], bool]) -> None:
        def draw(rows: int) -> Pad:
            return self.runtime.draw(part.index, part.direction, rows, executor=executor)

        turn.redraws += 1
        self.tally.add(pads_redrawn=part.change_pads(spoilt, draw))
