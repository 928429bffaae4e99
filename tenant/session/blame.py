"""Finds who is at fault after a product was refused, and quarantines the provider before the next request leaves."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from symbiosis_priv.errors import CheckpointError, QuarantinedError, VerificationError
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
        own_weights: folder of the tenant's own packed weights, for messages; None if it has none.
    """

    preparation: Preparation
    routes: Routes
    gate: threading.Lock
    tally: Tally
    own_weights: Path | None = None

    def accuse(self, route: Route, part: Part, answer: Tensor, turn: Turn) -> None:
        """A product is wrong: the executor's answer, int32 `[r, o]`, or an effect of the part's pads.

        Raises:
            VerificationError: those who are left cannot make the product.
            CheckpointError: the tenant's own packed weights are damaged.
        """
        with self.gate:
            involved = [executor := route.peer, *part.holders]
            # another part may have found a liar just now, and the keys that tell are gone by now
            found = [peer for peer in involved if peer in self.routes.quarantined]
            if not found:
                found, own = faults(self.preparation, executor, part, answer)
                if own:
                    self._quarantine(*found)
                    raise self._own_damage(part)
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
        if suspects:
            self.routes.quarantine(*suspects)
            self.preparation.forget_keys()

    def _own_damage(self, part: Part) -> CheckpointError:
        return CheckpointError(
            f"this machine's own packed weights of {self.preparation.facts[part.index].entry.name} in "
            f"{self.own_weights} are damaged: an effect that was computed from them is not the product of the pinned "
            f"weights. No provider is to blame for it. Delete that folder and load the model again."
        )

    def _lie(self, peers: Sequence[Peer], part: Part, *, what: str, certain: bool = True) -> VerificationError:
        return VerificationError(
            provider=(" and " if certain else " or ").join(peer.name for peer in peers),
            group_name=self.preparation.facts[part.index].entry.name,
            direction=part.direction,
            what=what,
        )


class Faults(NamedTuple):
    """Whose result is not the product modulo 2^32.

    Args:
        providers: whose answer or effect is wrong.
        own: whether an effect that the tenant computed itself is wrong.
    """

    providers: list[Peer]
    own: bool


def faults(preparation: Preparation, executor: Peer, part: Part, answer: Tensor) -> Faults:
    """Check the answer and every effect of a refused product with the blame keys; no faults if that cannot tell.

    Args:
        executor: the provider that gave the answer.
        part: what the executor was asked; the part's effects are there.
        answer: int32 `[r, o]`, refused.
    """
    accepts = functools.partial(preparation.blame.accepts, part.index, part.direction)
    found: list[Peer] = []
    own = False
    try:
        if not accepts(rows=part.sent, answer=answer):
            found.append(executor)
        for pad in part.pads:
            for share, effect in zip(pad.shares, pad.effects(), strict=True):
                mask = share.keystream.expand(share.first_row + pad.start, pad.rows)
                if accepts(rows=mask, answer=effect):
                    continue
                if share.holder is None:
                    own = True
                else:
                    found.append(share.holder)
    except (OSError, SafetensorError) as error:
        log.error("cannot read the keys that say who lied: %s", error)
    return Faults(found, own)
