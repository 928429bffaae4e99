"""The gate that every request of a session passes on its way out: rule 8 and quarantine.

Rule 8. A company that knows a seed of a pad never sees a row masked with that pad. Executor and helpers of a pad,
pooled, know everything about the row, so this rule is what the privacy of `pad` rests on. The gate asks it of every
request with rows, after routing has chosen an executor: routing may prefer, but it cannot overrule.

Quarantine. Nothing more is sent to a provider whose answer or effect was not the product of the pinned weights. A
provider stays quarantined under another name and with another key: a party that shares a name, a certificate, a key or
an address with it is the same party (rule 11). So an executor from a registry does not come back by announcing another
key, or other layers. Another executor of its operator is another party, and is judged by its own answers.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable
from typing import Final

from symbiosis_priv.errors import QuarantinedError, RoleConflictError
from symbiosis_priv.federation import Federation, Peer, Traits, check_parties, in_common, traits
from tenant.core.masked import MaskedRows

log = logging.getLogger(__name__)

_REMEMBERED: Final = 1024  # peers: an executor from a registry is another one whenever it announces other layers


class Quarantine:
    """The quarantined providers of a session.

    Attributes:
        parties: what tells them from others, read once: later changes of pinned files make no difference.
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
        """Quarantine a provider for the rest of the session."""
        if peer not in self:
            self.parties.append(self._traits(peer))
            log.error("provider %s is quarantined: it sent what is not the product of the pinned weights", peer.name)


class Gate:
    """Lets requests of one process pass, or raises. Thread-safe.

    Args:
        federation: says which providers are one company.
        helpers: those of its helpers that are used.
        quarantined: providers that get no request.

    Attributes:
        settling: no request leaves while this lock is held. It is held while a fault is attributed.

    Raises:
        RoleConflictError: a company has both roles, and would know a pad and see a row under it.
        ConfigError: two parties are not distinct (rule 11).
    """

    def __init__(self, federation: Federation, helpers: Iterable[Peer], quarantined: Quarantine) -> None:
        check_parties(
            [*federation.executors, *helpers],  # executors that join later were checked when they joined
            companies=federation.companies,
            pad_helpers=federation.pad_helpers,
        )
        self.settling = threading.Lock()
        self._quarantined = quarantined
        self._may_see = functools.lru_cache(_REMEMBERED)(federation.admissible)

    def check(self, peer: Peer, rows: MaskedRows | None) -> None:
        """Called for every request before its first byte leaves.

        Args:
            peer: the provider that the request goes to.
            rows: what the request carries; None for a request to a helper.

        Raises:
            QuarantinedError: the provider is quarantined.
            RoleConflictError: the provider's company knows a seed of these rows' pads (rule 8).
        """
        with self.settling:
            if peer in self._quarantined:
                raise QuarantinedError(f"{peer.role} {peer.name!r} is quarantined; nothing more is sent")
        if rows is None:
            if peer.role != "helper":
                raise RoleConflictError(f"{peer.role} {peer.name!r} was about to get a seed; nothing was sent")
        elif peer.role != "executor" or (rows.holders and not self._may_see(peer, rows.holders)):
            raise RoleConflictError(
                f"{peer.role} {peer.name!r} was about to get rows under a pad of its own company; nothing was sent"
            )
