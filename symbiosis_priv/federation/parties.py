"""Who counts as one party, and that nobody is listed twice or in two roles (rules 8 and 11).

Rule 11: the parties of a federation are pairwise distinct in certificate, public key and address. Two helpers with one
key would otherwise be one party, and an executor listed twice would be asked again after its quarantine.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence

from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates import fingerprint, key_fingerprint, load_pin
from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.federation.peers import Company, Peer
from symbiosis_priv.federation.spelling import plain, plain_host


def check_parties(peers: Sequence[Peer], *, companies: Sequence[Company] = (), pad_helpers: int | None = None) -> None:
    """Rules 8 and 11: no two entries are one party, and no company is both executor and helper.

    Names, operators and addresses are compared as they are meant, not as they are spelled; certificates and public keys
    by fingerprint, the next ones included.

    Args:
        companies: who else counts as one party.
        pad_helpers: as `Federation.pad_helpers`. If helpers are chosen for each pad, a company may have both roles.

    Raises:
        RoleConflictError: an executor and a helper have something in common.
        ConfigError: two of one role have.
        CertificateError: a pinned file cannot be read, or does not hold one provider's certificate.
    """
    known = Parties(peers, companies)
    parties = [(peer, traits(peer)) for peer in peers]
    for (one, mine), (other, theirs) in itertools.combinations(parties, 2):
        shared = in_common(mine, theirs)
        if one.role != other.role and pad_helpers is None:
            if plain(one.operator) == plain(other.operator):
                shared.insert(0, "operator")
            elif known.same(one, other) and "name" not in shared:
                shared.insert(0, "company")
        if not shared:
            continue
        pair = f"{one.role} {one.name!r} and {other.role} {other.name!r} have the same {', '.join(shared)}"
        if shared == ["name"]:
            raise ConfigError(f"{pair}, and case does not count: give each of them its own")
        if one.role != other.role:
            raise RoleConflictError(
                f"{pair}: together they would see everything. Choose a helper that somebody else runs, "
                f"or masking = 'local'."
            )
        raise ConfigError(
            f"{pair}: every party is listed once, under a name, a certificate, a key and an address of its own. "
            f"Remove one of the entries, or pin what its own operator gave you."
        )


Traits = Mapping[str, frozenset[object]]
"""What must tell a party from others, each in one spelling."""


def in_common(one: Traits, other: Traits) -> list[str]:
    """What two parties have in common that must tell them apart (rule 11); nothing if they are distinct."""
    return [what for what in one if not one[what].isdisjoint(other[what])]


def traits(peer: Peer) -> Traits:
    """A peer's. CertificateError if its pinned file cannot be read, or does not hold one provider's certificate."""
    pinned = [load_pin(path) for path in peer.pins]
    return {
        "name": frozenset({plain(peer.name)}),
        "certificate": frozenset(fingerprint(c.public_bytes(Encoding.DER)) for c in pinned),
        "public key": frozenset(map(key_fingerprint, pinned)),
        "address": frozenset({(plain_host(peer.host), peer.port)}),
    }


class Parties:
    """Who counts as one: a union-find over names and operators, so that a chain of companies is one company."""

    def __init__(self, peers: Sequence[Peer], companies: Sequence[Company]) -> None:
        self._above: dict[Hashable, Hashable] = {}
        for peer in peers:
            self._join(_name(peer.name), _operator(peer.operator))
        for company in companies:
            own = _operator(company.name)
            for mark in (*map(_name, company.members), *map(_operator, company.operators)):
                self._join(own, mark)

    def same(self, one: Peer, other: Peer) -> bool:
        return not self.roots(one).isdisjoint(self.roots(other))

    def roots(self, peer: Peer) -> frozenset[Hashable]:
        """One for a peer that was given at the start; a stranger's name and operator may belong to two companies."""
        return frozenset({self._root(_name(peer.name)), self._root(_operator(peer.operator))})

    def _join(self, one: Hashable, other: Hashable) -> None:
        self._above[self._root(one)] = self._root(other)

    def _root(self, mark: Hashable) -> Hashable:
        while (above := self._above.get(mark, mark)) != mark:
            mark = above
        return mark


def _name(text: str) -> Hashable:
    return "name", plain(text)


def _operator(text: str) -> Hashable:
    return "operator", plain(text)
