"""Who lied, once something was refused, and what follows: quarantine, before anybody is asked for anything else."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from safetensors import SafetensorError
from torch import Tensor

from symbiosis_priv.errors import QuarantinedError, VerificationError
from symbiosis_priv.federation import Peer
from tenant.core.facts import Preparation
from tenant.core.parts import Part
from tenant.routing.route import Route
from tenant.routing.routes import Routes
from tenant.session.tally import Tally
from tenant.session.turn import Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blame:
    """See the module's text.

    Args:
        preparation: has the keys that tell.
        routes: is told whom to quarantine.
        gate: no request leaves while it is held.
        tally: where rejected answers are counted.
    """

    preparation: Preparation
    routes: Routes
    gate: threading.Lock
    tally: Tally

    def accuse(self, route: Route, part: Part, answer: Tensor, turn: Turn) -> None:
        """A product is wrong: the executor's answer, int32 `[r, o]`, or an effect of the part's pads.

        Raises:
            VerificationError: those who are left cannot make the product.
        """
        with self.gate:
            involved = [executor := route.peer, *part.holders]
            # another part may have found somebody out just now, and the keys that tell are gone by now
            found = [peer for peer in involved if peer in self.routes.quarantined] or liars(
                self.preparation, executor, part, answer
            )
            suspects = list(dict.fromkeys(found or involved))
            self.tally.add(answers_rejected=len(suspects) if found else 1)
            self._quarantine(*suspects)
        what = "an answer" if executor in suspects else "an effect"
        lie = self._lie(suspects, part, what=what, certain=bool(found))
        turn.lied(lie)
        if executor in suspects:
            turn.failed(route, lie)
        self.check(part, turn)

    def broke_protocol(self, route: Route, part: Part, error: Exception, turn: Turn) -> None:
        """An executor sent what is no answer at all. Raises it if those who are left cannot make the product."""
        self.tally.add(answers_rejected=1)
        self._quarantine(route.peer)
        turn.lied(error)
        turn.failed(route, error)
        self.check(part, turn)

    def broke_promise(self, holder: Peer, part: Part, error: Exception, turn: Turn) -> None:
        """The same of a helper.

        Raises:
            VerificationError: those who are left cannot make the product.
        """
        self.tally.add(answers_rejected=1)
        self._quarantine(holder)
        lie = self._lie([holder], part, what="an effect")
        lie.__cause__ = error
        turn.lied(lie)
        self.check(part, turn)

    def check(self, part: Part, turn: Turn) -> None:
        """Raises what was found if those who have not lied cannot make the product."""
        try:
            self.routes.check(part.index)
        except QuarantinedError as error:
            raise turn.lie or error from None
        if turn.lie is not None and turn.lies > len(self.routes.executors) + len(self.routes.helpers):
            raise turn.lie  # each of them lies but once: somebody is asked who should not be

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


def liars(preparation: Preparation, executor: Peer, part: Part, answer: Tensor) -> list[Peer]:
    """Those whose answer or effect is not the product modulo 2^32; nobody if that cannot be told.

    Args:
        executor: who gave the answer.
        part: what it was asked; its effects are there.
        answer: int32 `[r, o]`, refused.
    """
    if not part.holders:
        return [executor]
    accepts = functools.partial(preparation.blame.accepts, part.index, part.direction)
    found: list[Peer] = []
    try:
        if not accepts(rows=part.sent, answer=answer):
            found.append(executor)
        for pad in part.pads:
            for share, effect in zip(pad.shares, pad.effects(), strict=True):
                if share.holder is None:
                    continue
                mask = share.keystream.expand(share.first_row + pad.start, pad.rows)
                if not accepts(rows=mask, answer=effect):
                    found.append(share.holder)
    except (OSError, SafetensorError) as error:
        log.error("cannot read the keys that say who lied: %s", error)
    return found
