"""Handles a wrong result: quarantines its provider before the next request leaves.

`tenant.core.blame` finds whose result was wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from symbiosis_priv.errors import CheckpointError, QuarantinedError, TransportError, VerificationError
from symbiosis_priv.federation import Peer
from tenant.connections.executor_client import Answer
from tenant.core.blame import attribute
from tenant.core.gate import Gate
from tenant.core.parts import Part
from tenant.preparation.prepared import Preparation
from tenant.routing.route import Route
from tenant.routing.routes import Routes
from tenant.session.evidence import Signer, restore_product
from tenant.session.retry import RetryState
from tenant.session.tally import Tally


@dataclass(frozen=True)
class Faults:
    """Quarantines providers at fault. Raises an error if the remaining providers cannot compute the product.

    Args:
        preparation: has the keys that attribute faults.
        routes: quarantines providers, and knows which ones are left.
        gate: is closed while a fault is attributed.
        end_relays: ends the relays to an executor.
        signer: finds the helper whose key signs blocks; see `evidence.Signer`.
        own_weights: folder of the tenant's own packed weights, for messages; None if the tenant has none.
    """

    preparation: Preparation
    routes: Routes
    gate: Gate
    tally: Tally
    end_relays: Callable[[Peer], None]
    signer: Signer
    own_weights: Path | None = None

    def product_refused(
        self, route: Route, part: Part, answer: Answer, retry: RetryState, *, may_wrap: bool = False
    ) -> bool:
        """Handle a product that failed the check: the executor's answer or an effect of its pads is wrong; or, if
        `may_wrap` is True, the product has left a narrow ring.

        Returns:
            False if the keys find no error, and the product may have left the ring. No provider is suspected then.

        Raises:
            VerificationError: the remaining providers cannot compute the product.
            CheckpointError: the tenant's own packed weights are damaged.
        """
        with self.gate.settling:
            involved = [executor := route.peer, *part.sent.holders]
            # another part may have found the same fault already, and the keys that attribute faults may be deleted
            found = [peer for peer in involved if peer in self.routes.quarantined]
            try:
                if not found and part.relayed:
                    at_fault = restore_product(part, answer.words, answer.fetch_block, self.signer)
                    found = [] if at_fault is None else [at_fault]
            except TransportError as lost:  # no evidence, so no provider is suspected
                self.end_relays(executor)
                part.requests.clear()  # the stored requests name blocks
                retry.failed(route, lost)
                return True
            if not found:
                found, own = attribute(self.preparation.blame, executor, part, answer.words)
                if own:
                    self._quarantine(*found)
                    raise self._own_damage(part)
                if not found and may_wrap:
                    return False
            suspects = list(dict.fromkeys(found or involved))
            self.tally.add(answers_rejected=len(suspects) if found else 1)
            self._quarantine(*suspects)
        what = "an answer" if executor in suspects else "an effect"
        error = self._error(suspects, part, what=what, certain=bool(found))
        retry.faulted(error)
        if executor in suspects:
            retry.failed(route, error)
        self.check(part, retry)
        return True

    def malformed_answer(self, route: Route, part: Part, error: Exception, retry: RetryState) -> None:
        """Handle an executor that broke the protocol. Raises `error` if the remaining providers cannot compute the
        product."""
        self.tally.add(answers_rejected=1)
        self._quarantine(route.peer)
        retry.faulted(error)
        retry.failed(route, error)
        self.check(part, retry)

    def malformed_effect(self, holder: Peer, part: Part, error: Exception, retry: RetryState) -> None:
        """Handle a helper that broke the protocol.

        Raises:
            VerificationError: the remaining providers cannot compute the product.
        """
        self.tally.add(answers_rejected=1)
        self._quarantine(holder)
        fault = self._error([holder], part, what="an effect")
        fault.__cause__ = error
        retry.faulted(fault)
        self.check(part, retry)

    def check(self, part: Part, retry: RetryState) -> None:
        """Raise the last fault if the providers that are not quarantined cannot compute the product."""
        try:
            self.routes.check(part.index)
        except QuarantinedError as error:
            raise retry.fault or error from None
        if retry.fault is not None and retry.faults > len(self.routes.executors) + len(self.routes.helpers):
            # each provider is found at fault once at most; another fault means that a quarantined provider was asked
            raise retry.fault

    def _quarantine(self, *suspects: Peer) -> None:
        if suspects:
            self.routes.quarantine(*suspects)
            self.preparation.forget_keys()

    def _error(self, peers: Sequence[Peer], part: Part, *, what: str, certain: bool = True) -> VerificationError:
        return VerificationError(
            provider=(" and " if certain else " or ").join(peer.name for peer in peers),
            group_name=self.preparation.facts[part.index].entry.name,
            direction=part.direction,
            what=what,
        )

    def _own_damage(self, part: Part) -> CheckpointError:
        return CheckpointError(
            f"this machine's own packed weights of {self.preparation.facts[part.index].entry.name} in "
            f"{self.own_weights} are damaged: an effect that was computed from them is not the product of the pinned "
            f"weights. No provider is to blame for it. Delete that folder and load the model again."
        )
