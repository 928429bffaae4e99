"""Keeps keys and values of sequences that have ended, for requests that begin with the same tokens.

Keys and values of a token have the same bits whichever step computed them (`row_blocks`, `attention`), so any common
beginning may be used. They depend on the adapter, and on when it was loaded: an adapter that was loaded again may
be another one under the same name. A sequence that has released blocks of a sliding window (`kv`) has its longest
beginnings only.

A client finds only its own sequences. Otherwise a client could read the texts of others, token by token: it would ask
with a guess, and the number of cached tokens, which answers state and times show, would say how far the guess is right.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from tenant.endpoint.engine.kv import KeyValues, held_bytes

_Key = tuple[Hashable, tuple[int, ...]]


class Prefixes:
    """A cache of sequences, the least recently used one first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Key, KeyValues] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Memory of the cached sequences."""
        return held_bytes(self._kept.values())

    def keep(self, owner: Hashable, tokens: Sequence[int], kv: KeyValues) -> None:
        """Keep a sequence that has ended, in the place of those whose beginnings it has.

        Args:
            owner: tells clients, adapters and their loads apart.
            tokens: the tokens that `kv` has keys and values of.
            kv: not used elsewhere any more.
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
        """Return keys and values of the longest known beginning of `tokens`, or None."""
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
    """Number of tokens at the beginning that are equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
