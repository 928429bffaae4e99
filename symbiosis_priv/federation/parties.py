"""Decides which entries of a federation are one party, and refuses duplicates and conflicting roles (rules 8 and 11).

Rule 11: the parties of a federation are pairwise distinct in certificate, public key and address. Without rule 11, one
party could appear as two helpers, and an executor that is listed twice could be asked again after its quarantine.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence

from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates.reading import fingerprint, key_fingerprint, load_pin
from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.federation.peers import Company, Peer
from symbiosis_priv.federation.spelling import plain, plain_host


def check_parties(peers: Sequence[Peer], *, companies: Sequence[Company] = (), pad_helpers: int | None = None) -> None:
    """Checks rules 8 and 11: no two entries are one party, and no company is both executor and helper.

    Names, operators and addresses are compared in normal form (`spelling`). Certificates and public keys are compared
    by fingerprint, including the next certificates.

    Args:
        companies: providers and operators that count as one party.
        pad_helpers: as `Federation.pad_helpers`. If helpers are chosen for each pad, a company may have both roles.

    Raises:
        RoleConflictError: an executor and a helper have a trait, an operator or a company in common.
        ConfigError: two executors or two helpers have a trait in common, or two entries have one name.
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
            raise ConfigError(f"{pair}, and case does not count: give each entry a different name")
        if one.role != other.role:
            raise RoleConflictError(
                f"{pair}: together they could remove the mask. Choose a helper of another company, "
                f"or masking = 'local'."
            )
        raise ConfigError(
            f"{pair}: list every party once, each with a different name, certificate, key and address. "
            f"Remove one of the entries, or pin the certificate that its operator gave you."
        )


Traits = Mapping[str, frozenset[object]]
"""The values that must differ between parties, by kind of value, in normal form."""


def in_common(one: Traits, other: Traits) -> list[str]:
    """The kinds of traits that two parties share although rule 11 forbids it; empty if the parties are distinct."""
    return [kind for kind in one if not one[kind].isdisjoint(other[kind])]


def traits(peer: Peer) -> Traits:
    """The traits of a peer. Raises `CertificateError`: a pinned file cannot be read, or does not hold one provider's
    certificate."""
    pinned = [load_pin(path) for path in peer.pins]
    return {
        "name": frozenset({plain(peer.name)}),
        "certificate": frozenset(fingerprint(c.public_bytes(Encoding.DER)) for c in pinned),
        "public key": frozenset(map(key_fingerprint, pinned)),
        "address": frozenset({(plain_host(peer.host), peer.port)}),
    }


class Parties:
    """Decides which peers are one party: a union-find over names and operators, so a chain of companies is one."""

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
        """The roots of a peer's name and operator: one root for a peer of the constructor's `peers`.

        For another peer the two roots may differ, because its name and its operator may belong to two companies.
        """
        return frozenset({self._root(_name(peer.name)), self._root(_operator(peer.operator))})

    def company_of(self, operator: str) -> Hashable:
        """The root of an operator: equal for operators of one company."""
        return self._root(_operator(operator))

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
