"""The gate that every request of a session passes before it is sent: rule 8 and quarantine.

Rule 8: a company that knows a seed of a pad never sees a row masked with that pad. The executor and all helpers of a
pad together know everything about the row, so the privacy of `pad` depends on this rule. The gate checks every request
after routing has chosen its provider: routing cannot override the gate.

Quarantine: nothing more is sent to a provider whose answer or effect was not the product of the pinned weights. Another
name or key does not end the quarantine, because a party that shares a name, a certificate, a key or an address with the
provider is the same party (rule 11). Another executor of the same operator is another party, and is judged by its own
answers.
"""

import functools
import logging
import threading
from collections.abc import Collection, Iterable
from typing import Final

from symbiosis_priv.errors import QuarantinedError, RoleConflictError
from symbiosis_priv.federation import Federation, Peer, Traits, check_parties, in_common, traits
from tenant.core.masked import MaskedRows

log = logging.getLogger(__name__)

# limit of cached peers: an executor from a registry becomes another peer whenever it announces other layers
_REMEMBERED: Final = 1024


class Quarantine:
    """The quarantined providers of a session.

    Attributes:
        parties: the traits of these providers.
    """

    def __init__(self) -> None:
        self.parties: list[Traits] = []
        # pinned files are read once: a file that is replaced later makes no difference
        self._traits = functools.lru_cache(_REMEMBERED)(traits)

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
    """Lets requests of one process pass, or raises an error. Thread-safe.

    Args:
        federation: decides which providers are one company.
        helpers: the helpers of the federation that are used.

    Attributes:
        settling: a lock that is held while a fault is attributed. No request is sent while it is held.

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
        """Check a request before its first byte is sent.

        Args:
            peer: the provider that receives the request.
            rows: the rows of the request; None for a request to a helper.

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

    def check_relay(self, executor: Peer, holders: Collection[Peer]) -> None:
        """Check rule 8 before these helpers of a pad are told to relay its effects. Raises `RoleConflictError`."""
        if not self._may_see(executor, tuple(holders)):
            raise RoleConflictError(
                f"a helper was about to relay to {executor.name!r} of its own company; nothing was ordered"
            )
