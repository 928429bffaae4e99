"""One masked, verified product. The path of its rows, top to bottom:

    quantise                   inf or nan ends it here             rows.Rows
    take a pad (n, e)          burnt before anything leaves        noise.NoisePool
    send xq + n                one round trip, deadline            channel.Channel
    subtract e, check          before anything is used             verifier.VerificationKeys

If the check fails, an answer or an effect is wrong. Nobody is asked for anything until it is settled which (`blame`).
Who lied is quarantined: nothing is sent to it again, and the cached keys are dropped. If that is the executor alone,
the same masked rows go to the next one of the federation, if there is one.

A large product goes out in pieces over several connections, so that masking, sending, multiplying, receiving and
checking overlap. Each piece is a request with rows, pads, a deadline and a check of its own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis_priv import wire
from symbiosis_priv.errors import (
    DeadlineExceededError,
    ProtocolError,
    QuarantinedError,
    SymbiosisError,
    VerificationError,
)
from symbiosis_priv.federation import Peer
from symbiosis_priv.ring import Direction
from tenant.blame import liars
from tenant.channel import fresh_nonce
from tenant.executor import Executor
from tenant.facts import GroupFacts, Preparation
from tenant.noise import cut, joined
from tenant.options import SessionOptions
from tenant.parts import Part, piece_rows
from tenant.routes import Routes
from tenant.rows import Rows
from tenant.runtime import Runtime, row_limit
from tenant.spans import span
from tenant.tally import Tally


@dataclass(frozen=True)
class Products:
    """Makes products with what belongs to this process.

    Args:
        preparation: facts and verification keys of the pinned model.
        options: deadline, row bucket, size of pieces.
        routes: who may be asked.
        runtime: connections and pads.
        tally: where they are counted.
    """

    preparation: Preparation
    options: SessionOptions
    routes: Routes
    runtime: Runtime
    tally: Tally

    def multiply(self, index: int, direction: Direction, rows: Rows) -> None:
        """One exact product; see `backend.RingProduct`."""
        self.routes.check()
        parts = self._parts(index, direction, rows)
        self.runtime.in_lanes([functools.partial(self._masked, part) for part in parts])
        self.tally.add(products=1, rows=rows.count)

    def _parts(self, index: int, direction: Direction, rows: Rows) -> list[Part]:
        """All rows, encoded and filled up with zeros to the bucket, under pads that were burnt for them, in requests of
        a size that everybody takes."""
        facts = self.preparation.facts[index]
        column, products = self.preparation.keys.columns(index, direction)
        count = rows.count + -rows.count % self.options.row_bucket
        xq = self.runtime.buffers.matrix(count, facts.inputs(direction))
        expected = torch.zeros(count, dtype=torch.int64, device="cpu")
        with span("quantise"):
            rows.encode(xq[: rows.count], column=products, expected=expected[: rows.count])
        xq[rows.count :] = 0
        limit, piece = self.runtime.row_limit(facts), self._piece(count, facts)
        parts = []
        for first in range(0, count, limit):
            end = min(first + limit, count)
            with span("take pads"):
                pads = self.runtime.take(index, direction, end - first)
            for start in range(first, end, piece):
                some = slice(start, min(start + piece, end))
                mine, pads = cut(pads, some.stop - some.start)
                parts.append(Part(index, direction, rows, start, xq[some], column, expected[some], mine))
        return parts

    def _piece(self, count: int, facts: GroupFacts) -> int:
        """Rows of a piece, by the product's size alone (rule 5)."""
        return piece_rows(count, facts.entry, piece_bytes=self.options.piece_bytes)

    def _masked(self, part: Part, first: Executor) -> None:
        """The product by the first executor whose answer passes. All of them are sent identical rows."""
        with span("mask"):
            part.put_on_pads()
        lie: SymbiosisError | None = None
        for executor in self.runtime.executors:
            try:
                with span("network + product"):
                    answer = self._ask(executor, part)
            except QuarantinedError:
                continue
            except ProtocolError as error:
                self._reject(executor.peer)
                lie = error
                continue
            with span("wait for effects"):
                self._wait_for_effects(part)
            with span("unmask + verify + dequantise"):
                passed = part.decode(answer)
            if passed:
                effects = sum(pad.rows for pad in part.pads if pad.holders())
                self.tally.add(answers_verified=len(part.sent), effects_verified=effects)
                return
            lie = self._accuse(executor.peer, part, answer)
        # nobody was asked if, while this part waited, another one has found the last of them lying
        raise lie or QuarantinedError("every executor of the federation is quarantined; nothing more is sent")

    def _ask(self, executor: Executor, part: Part) -> Tensor:
        """An executor's answer, unverified."""
        facts = self.preparation.facts[part.index]
        answers = []
        with executor.lanes.take(until=time.monotonic() + self.options.deadline_s) as channel:
            for rows in part.sent.split(row_limit(facts, [channel.welcome()])):
                request = wire.Execute(
                    nonce=fresh_nonce(), group=part.index, direction=part.direction, arithmetic="ring", rows=len(rows)
                )
                answers.append(channel.request(request, rows, outputs=facts.outputs(part.direction)))
        return joined(answers)

    def _wait_for_effects(self, part: Part) -> None:
        waited = self.options.deadline_s
        shares = part.shares()
        wait([share.effect for share in shares], waited)  # ordered ahead: behind many that an absent helper owes
        if not all(share.effect.done() for share in shares):
            raise DeadlineExceededError(
                f"no effects from the helpers within {waited:g} s. Are they running? "
                f"{self.options.deadline_option} waits longer."
            )
        for share in shares:
            try:
                share.effect.result()
            except ProtocolError as error:
                assert share.holder is not None  # the tenant breaks no protocol with itself
                self._reject(share.holder)
                raise self._lie([share.holder], part, what="an effect") from error

    def _accuse(self, executor: Peer, part: Part, answer: Tensor) -> VerificationError:
        """Quarantine who lied, before anybody is asked for anything else.

        Returns:
            What to raise if there is no other executor: this one alone has lied.

        Raises:
            VerificationError: an effect is wrong, or nobody can tell what is.
        """
        with self.runtime.gate:
            involved = [executor, *part.holders()]
            # another part may have found somebody out just now, and the keys that tell are gone by now
            found = [peer for peer in involved if self.routes.is_quarantined(peer)] or liars(
                self.preparation, executor, part, answer
            )
            suspects = list(dict.fromkeys(found or involved))
            self.tally.add(answers_rejected=len(suspects) if found else 1)
            self._quarantine(*suspects)
        what = "an answer" if executor in suspects else "an effect"
        lie = self._lie(suspects, part, what=what, certain=bool(found))
        if suspects != [executor]:
            raise lie
        return lie

    def _reject(self, peer: Peer) -> None:
        self.tally.add(answers_rejected=1)
        self._quarantine(peer)

    def _quarantine(self, *suspects: Peer) -> None:
        self.routes.quarantine(*suspects)
        self.preparation.forget_keys()

    def _lie(self, peers: Sequence[Peer], part: Part, *, what: str, certain: bool = True) -> VerificationError:
        return VerificationError(
            provider=(" and " if certain else " or ").join(peer.name for peer in peers),
            group_name=self.preparation.facts[part.index].entry.name,
            direction=part.direction,
            what=what,
        )
