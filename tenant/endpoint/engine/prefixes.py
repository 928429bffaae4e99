"""Keeps keys and values of sequences that have ended, for requests that begin with the same tokens.

Keys and values of a token have the same bits in every step (`row_blocks`, `attention`), so any common beginning can be
used. They depend on the adapter and its load, because an adapter that is loaded again may have changed. If a sequence
has released blocks of a sliding window (`kv`), only its longest beginnings can be used.

A client finds only its own sequences. Otherwise a client could guess the texts of others token by token: the number of
cached tokens, which answers state and times reveal, would show how much of a guess is right.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from tenant.endpoint.engine.kv import KeyValues, held_bytes

_Key = tuple[Hashable, tuple[int, ...]]


class Prefixes:
    """A cache of sequences, ordered by last use."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Key, KeyValues] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Bytes of the cached sequences."""
        return held_bytes(self._kept.values())

    def keep(self, owner: Hashable, tokens: Sequence[int], kv: KeyValues) -> None:
        """Keep a sequence that has ended. It replaces cached sequences that are beginnings of it.

        Args:
            owner: identifies the client, the adapter and its load.
            kv: keys and values; the caller must not use them afterwards.
        """
        tokens = tuple(tokens)
        for key in [key for key in self._kept if key[0] == owner]:
            if key[1] == tokens[: len(key[1])] and kv.shortest <= len(key[1]):
                del self._kept[key]
            elif tokens == key[1][: len(tokens)] and self._kept[key].shortest <= len(tokens):
                self._kept.move_to_end(key)
                return
        if tokens:
            self._kept[owner, tokens] = kv

    def find(self, owner: Hashable, tokens: Sequence[int]) -> KeyValues | None:
        """Return keys and values of the longest cached beginning of `tokens`, or None."""
        tokens = tuple(tokens)
        common = {key: _common(key[1], tokens) for key in self._kept if key[0] == owner}
        usable = [key for key, length in common.items() if length >= max(1, self._kept[key].shortest)]
        if not usable:
            return None
        key = max(usable, key=common.__getitem__)
        length = common[key]
        self._kept.move_to_end(key)
        return self._kept[key].prefix(length)

    def drop_one(self) -> bool:
        """Free the least recently used sequence. Returns False if there is none."""
        if self._kept:
            self._kept.popitem(last=False)
            return True
        return False


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the number of equal tokens at the beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
