"""Providers that have sent what is not a product of the pinned weights: nothing is sent to them any more."""

from __future__ import annotations

import functools
import logging

from symbiosis_priv.certificates import key_fingerprint, load_pin
from symbiosis_priv.federation import Peer

log = logging.getLogger(__name__)


class Quarantine:
    """Of a session. A liar by another name is the same liar: what counts is its key.

    Attributes:
        keys: fingerprints of public keys.
    """

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self._keys_of = functools.cache(keys_of)  # as they are now, whatever becomes of the pinned files

    def __contains__(self, peer: Peer) -> bool:
        return bool(self.keys) and not self.keys.isdisjoint(self._keys_of(peer))

    def __bool__(self) -> bool:
        return bool(self.keys)

    def add(self, peer: Peer) -> None:
        """For the rest of the session."""
        if peer not in self:
            self.keys |= self._keys_of(peer)
            log.error("provider %s is quarantined: it sent what is not the product of the pinned weights", peer.name)


def keys_of(peer: Peer) -> frozenset[str]:
    """Fingerprints of the public keys that a provider may show."""
    return frozenset(key_fingerprint(load_pin(path)) for path in peer.pins)
