"""Who may be asked for what: the providers of a session, and which of them nothing is sent to any more."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from symbiosis_priv.certificates import key_fingerprint, load_pin
from symbiosis_priv.errors import QuarantinedError
from symbiosis_priv.federation import Peer

log = logging.getLogger(__name__)


class Routes:
    """The providers of a session. Outlives forks: who has lied to the parent is asked for nothing by the child.

    Args:
        executors: in the order in which they are asked.
        helpers: all of them share every pad.

    Attributes:
        quarantined: fingerprints of public keys: a liar by another name is the same liar.
    """

    def __init__(self, executors: Sequence[Peer], helpers: Sequence[Peer]) -> None:
        self.executors, self.helpers = tuple(executors), tuple(helpers)
        self.quarantined: set[str] = set()
        self._keys_of = functools.cache(keys_of)  # as they are now, whatever becomes of the pinned files

    def check(self) -> None:
        """Raises `QuarantinedError` if what is left cannot make a product."""
        if not self.quarantined:
            return
        if helper := next(filter(self.is_quarantined, self.helpers), None):
            raise QuarantinedError(f"helper {helper.name!r} is quarantined; nothing more is sent")
        if all(map(self.is_quarantined, self.executors)):
            raise QuarantinedError(
                "every executor of the federation is quarantined for this session; nothing more is sent"
            )

    def is_quarantined(self, peer: Peer) -> bool:
        """Whether it, by whatever name, has sent what is not a product of the pinned weights."""
        return bool(self.quarantined) and not self.quarantined.isdisjoint(self._keys_of(peer))

    def quarantine(self, *suspects: Peer) -> None:
        """Send nothing to them any more."""
        for peer in suspects:
            if not self.is_quarantined(peer):
                self.quarantined |= self._keys_of(peer)
                log.error(
                    "provider %s is quarantined: it sent what is not the product of the pinned weights", peer.name
                )


def keys_of(peer: Peer) -> frozenset[str]:
    """Fingerprints of the public keys that a provider may show."""
    return frozenset(key_fingerprint(load_pin(path)) for path in peer.pins)
