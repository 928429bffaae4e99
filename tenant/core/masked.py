"""`MaskedRows`: the only rows that may leave the tenant.

The promise is a type. A connection accepts rows only as `MaskedRows`, and only this module makes them: `mask` adds
one-time pads that cover every row, and `remask` replaces pads. A raw tensor cannot be sent by mistake: mypy reports it,
and the connection raises `TypeError`.

There is one exception: `UNMASKED_BY_CHOICE` in place of pads sends rows unchanged. It is for schemes without one-time
pads that the tenant has chosen (`masking = "none"`, `"paper-pool"`), and for rows that hold no data.
`tests/tenant/core/test_masked.py` lists the modules that may use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from torch import Tensor

from symbiosis_priv.errors import BurntRowError
from symbiosis_priv.federation import Peer
from tenant.core.pads import Pad, row_range, with_first_rows


class UnmaskedByChoice(tuple[Pad, ...]):
    """No pads, because the tenant has chosen a scheme without pads. An empty list of pads is an error instead."""


UNMASKED_BY_CHOICE: Final = UnmaskedByChoice()
_MAKER: Final = object()


class MaskedRows:
    """Rows of one layer group and direction, ready to be sent. Only `mask` and `remask` make them. Frozen.

    Attributes:
        masked_words: int32 `[r, d]`, as they are sent. They never change: a retry sends identical bytes (rule 3).
        pads: the pads that cover the rows, in order.
        holders: the helpers that know a seed of a pad. They never see these rows, nor does their company (rule 8).
    """

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
        assign(self, "holders", tuple(dict.fromkeys(holders)))

    def split(self, rows: int) -> list[MaskedRows]:
        """Split into matrices of at most `rows` rows. Each names all pads and all holders."""
        return [MaskedRows(_MAKER, masked_words, self.pads) for masked_words in self.masked_words.split(rows)]

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


def mask(rows: Tensor, pads: Sequence[Pad]) -> MaskedRows:
    """Mask rows with pads.

    Args:
        rows: int32 `[r, d]`; masked in place. The caller must not write to them afterwards.
        pads: pads for exactly these rows, none of them used before; or `UNMASKED_BY_CHOICE`.

    Raises:
        BurntRowError: a pad was used before, or the pads do not cover the rows.
    """
    if pads is not UNMASKED_BY_CHOICE:
        first = 0
        for pad in pads:
            pad.add_mask(row_range(rows, first, pad.rows))
            first += pad.rows
        if first != rows.shape[0]:
            raise BurntRowError(f"{first} rows of pads were drawn for {rows.shape[0]} rows; nothing was sent")
    return MaskedRows(_MAKER, rows, pads)


def remask(masked: MaskedRows, fresh: Mapping[int, Pad]) -> MaskedRows:
    """Replace pads. The masked rows change, and no replaced pad is used again (rule 3).

    Args:
        masked: rows under pads; unchanged.
        fresh: new pads by the index of the pad that each replaces, with the same number of rows.

    Raises:
        BurntRowError: a pad was used before, or has another number of rows.
    """
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
