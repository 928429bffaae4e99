"""Providers that have sent what is not a product of the pinned weights: nothing is sent to them any more.

A liar stays one under another name, and with another key: what has its name, a certificate or key of its, or its
address in common with it is one party with it (rule 11). So an executor from a registry does not come back by
announcing another key, or other layers. Another executor of its operator is another party, judged by its own answers.
"""

from __future__ import annotations

import functools
import logging
from typing import Final

from symbiosis_priv.federation import Peer, Traits, in_common, traits

log = logging.getLogger(__name__)

_REMEMBERED: Final = 1024  # peers: an executor from a registry is another one whenever it announces other layers


class Quarantine:
    """Of a session.

    Attributes:
        parties: by what tells them from others, whatever becomes of the pinned files.
    """

    def __init__(self) -> None:
        self.parties: list[Traits] = []
        self._traits = functools.lru_cache(_REMEMBERED)(traits)  # reads files, and is asked for every request

    def __contains__(self, peer: Peer) -> bool:
        if not self.parties:
            return False
        own = self._traits(peer)
        return any(in_common(own, party) for party in self.parties)

    def __bool__(self) -> bool:
        return bool(self.parties)

    def add(self, peer: Peer) -> None:
        """For the rest of the session."""
        if peer not in self:
            self.parties.append(self._traits(peer))
            log.error("provider %s is quarantined: it sent what is not the product of the pinned weights", peer.name)
