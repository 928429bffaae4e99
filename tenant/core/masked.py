"""`MaskedRows`, the only rows that may leave the tenant, and the gate that every request passes: rule 8, quarantine.

The promise is a type. A connection accepts rows only as `MaskedRows`, and only this module makes them: `mask` adds
one-time pads that cover every row, and `remask` replaces pads. mypy reports a raw tensor, and a connection refuses it.

The exception `UNMASKED_BY_CHOICE` in place of pads sends rows unchanged. It is for schemes that the tenant has chosen
(`masking = "none"`, `"paper-pool"`), and for rows without data. `test_masked.py` lists the modules that may use it.

The gate checks every request before it is sent, after routing has chosen its provider: routing cannot override it.
Rule 8: a company that knows a seed of a pad never sees a row masked with that pad. The executor and all helpers of a
pad together know everything about the row, so the privacy of `pad` depends on this rule. Quarantine: nothing more is
sent to a provider whose answer or effect was not the product of the pinned weights. Another name or key does not end
the quarantine, because a party that shares a name, a certificate, a key or an address with the provider is the same
party (rule 11). Another executor of the same operator is another party, and is judged by its own answers.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, Final, NoReturn

from torch import Tensor

from symbiosis_priv.errors import BurntRowError, QuarantinedError, RoleConflictError
from symbiosis_priv.federation import Federation, Peer, Traits, check_parties, in_common, traits
from tenant.core.pads import Pad, row_range, with_first_rows

log = logging.getLogger(__name__)


class UnmaskedByChoice(tuple[Pad, ...]):
    """No pads, because the tenant has chosen a scheme without pads. An empty list of pads is an error instead."""


UNMASKED_BY_CHOICE: Final = UnmaskedByChoice()
_MAKER: Final = object()
# an executor from a registry becomes another peer whenever it announces other layers
_CACHED_PEERS: Final = 1024


class MaskedRows:
    """Rows of one layer group and direction, ready to be sent. Only `mask` and `remask` make them. Frozen.
    `masked_words`: int32 `[r, d]`, as they are sent; they never change, because a retry sends identical bytes (rule 3).
    `pads`: the pads that cover the rows, in order. `holders`: the helpers that know a seed of a pad. They never see
    these rows, nor does their company (rule 8)."""

    __slots__ = ("holders", "masked_words", "pads")
    masked_words: Tensor
    pads: Sequence[Pad]
    holders: tuple[Peer, ...]

    def __init__(self, maker: object, masked_words: Tensor, pads: Sequence[Pad]) -> None:
        if maker is not _MAKER:
            raise TypeError("only tenant.core.masked makes MaskedRows; mask the rows")
        holders = [share.holder for pad in pads for share in pad.shares if share.holder is not None]
        assign = object.__setattr__
        assign(self, "masked_words", masked_words)
        assign(self, "pads", pads)
        assign(self, "holders", tuple(holders if len(holders) < 2 else dict.fromkeys(holders)))  # without hashing one

    def split(self, rows: int) -> list[MaskedRows]:
        """Split into matrices of at most `rows` rows. Each names all pads and all holders."""
        return [MaskedRows(_MAKER, masked_words, self.pads) for masked_words in self.masked_words.split(rows)]

    def first(self, *, ring_bits: int) -> list[int]:
        """Return the first row as a provider gets it, as numbers, which no connection takes."""
        words: list[int] = (self.masked_words[0] << 32 - ring_bits >> 32 - ring_bits).tolist()
        return words

    def __len__(self) -> int:
        return self.masked_words.shape[0]

    def __setattr__(self, name: str, value: object = None) -> NoReturn:
        raise AttributeError("MaskedRows are frozen")

    __delattr__ = __setattr__

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("MaskedRows are neither copied nor stored")

    def __repr__(self) -> str:
        return f"MaskedRows({list(self.masked_words.shape)})"


def cut(pads: Sequence[Pad], rows: int) -> tuple[Sequence[Pad], Sequence[Pad]]:
    """Split pads into those for the first `rows` rows and those for the other rows. `UNMASKED_BY_CHOICE` stays."""
    if pads is UNMASKED_BY_CHOICE:
        return pads, pads
    head, rest = list[Pad](), deque(pads)
    while rest and rows:
        pad = rest.popleft()
        if pad.rows > rows:
            pad, later = pad.split(rows)
            rest.appendleft(later)
        head.append(pad)
        rows -= pad.rows
    return head, list(rest)


def mask(rows: Tensor, pads: Sequence[Pad], *, added: bool = False) -> MaskedRows:
    """Mask rows, int32 `[r, d]`, in place. The caller must not write to them before their product is done. `pads`: pads
    for exactly these rows, none of them used before; or `UNMASKED_BY_CHOICE`. `added`: True if the pads' masks were
    added to the rows already (`parts.FewRows`). Raises `BurntRowError`: a pad was used before, or the pads do not cover
    the rows."""
    if pads is not UNMASKED_BY_CHOICE:
        first = 0
        for pad in pads:
            pad.add_mask(row_range(rows, first, pad.rows), added=added)
            first += pad.rows
        if first != rows.shape[0]:
            raise BurntRowError(f"{first} rows of pads were drawn for {rows.shape[0]} rows; nothing was sent")
    return MaskedRows(_MAKER, rows, pads)


def remask(masked: MaskedRows, fresh: Mapping[int, Pad]) -> MaskedRows:
    """Replace pads. The masked rows change, and no replaced pad is used again (rule 3). `masked`: rows under pads;
    unchanged. `fresh`: new pads by the index of the pad that each replaces, with the same number of rows. Raises
    `BurntRowError`: a pad was used before, or has another number of rows."""
    masked_words, pads = masked.masked_words.clone(), list(masked.pads)
    for number, (first, old) in enumerate(with_first_rows(masked.pads)):
        if (new := fresh.get(number)) is None:
            continue
        if new.rows != old.rows:
            raise BurntRowError(f"a pad of {new.rows} rows cannot replace one of {old.rows}")
        rows = row_range(masked_words, first, old.rows)
        old.subtract_mask(rows)
        new.add_mask(rows)
        pads[number] = new
    return MaskedRows(_MAKER, masked_words, pads)


class Quarantine:
    """The quarantined providers of a session. `parties`: the traits of these providers."""

    def __init__(self) -> None:
        self.parties: list[Traits] = []
        # pinned files are read once: a file that is replaced later makes no difference
        self._traits = functools.lru_cache(_CACHED_PEERS)(traits)

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
    """Lets requests of one process pass, or raises an error. Thread-safe. `federation`: decides which providers are one
    company. `attributing`: a lock that is held while a fault is attributed. No request is sent while it is held. Raises
    `RoleConflictError`: a company has both roles, and would know a pad and see a row under it; `ConfigError`: two
    parties are not distinct (rule 11)."""

    def __init__(self, federation: Federation, helpers: Iterable[Peer], quarantined: Quarantine) -> None:
        check_parties(
            [*federation.executors, *helpers],  # executors that join later were checked when they joined
            companies=federation.companies,
            pad_helpers=federation.pad_helpers,
        )
        self.attributing = Lock()
        self._quarantined = quarantined
        self._may_see = functools.lru_cache(_CACHED_PEERS)(federation.admissible)
        self._passed: tuple[Peer, tuple[Peer, ...]] | None = None  # the latest; hashing peers takes longer

    def check(self, peer: Peer, rows: MaskedRows | None) -> None:
        """Check a request before its first byte is sent. `rows`: the rows of the request; None for a request to a
        helper. Raises `QuarantinedError`: the provider is quarantined; `RoleConflictError`: the provider's company
        knows a seed of these rows' pads (rule 8)."""
        with self.attributing:
            if self._quarantined.parties and peer in self._quarantined:
                raise QuarantinedError(f"{peer.role} {peer.name!r} is quarantined; nothing more is sent")
        if rows is None:
            if peer.role != "helper":
                raise RoleConflictError(f"{peer.role} {peer.name!r} was about to get a seed; nothing was sent")
        elif (peer, rows.holders) != self._passed:
            if peer.role != "executor" or (rows.holders and not self._may_see(peer, rows.holders)):
                raise RoleConflictError(
                    f"{peer.role} {peer.name!r} was about to get rows under a pad of its own company; nothing was sent"
                )
            self._passed = peer, rows.holders
