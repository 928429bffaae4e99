"""The newest descriptor of each key, in memory: after a restart, executors announce themselves within minutes.

A descriptor is kept, even after its expiry, for as long as an older descriptor of the same key could be valid. So an
older descriptor never replaces a newer one.

The number of descriptors is limited. When the store is full, a new executor replaces an executor of the operator with
the most executors.
"""

import threading
from collections import Counter
from collections.abc import Callable

from symbiosis_priv.errors import DescriptorError
from symbiosis_priv.federation.parties import plain
from symbiosis_priv.registry.descriptor import MEMORY_S, MS, VerifiedDescriptor
from symbiosis_priv.registry.protocol import MAX_LISTED


class Store:
    """The stored descriptors. Thread-safe."""

    def __init__(self, *, limit: int = MAX_LISTED) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._newest: dict[str, VerifiedDescriptor] = {}

    def put(self, new: VerifiedDescriptor, *, now: float, admit: Callable[[], object] = lambda: None) -> None:
        """Store a descriptor unless it is stored already. `admit` is called just before, and may raise. `now` is in
        seconds since 1970. Raises `DescriptorError`: a newer one of the key is stored, or the store is full."""
        with self._lock:
            past = MS * (now - MEMORY_S)
            self._newest = {key: one for key, one in self._newest.items() if one.descriptor.issued >= past}
            if self._holds(new):
                return
            admit()
            if new.key not in self._newest:
                counts = Counter(sorted(plain(one.operator) for one in self._newest.values()))
                if counts.total() >= self._limit:
                    busiest, most = counts.most_common(1)[0]
                    if most <= counts[plain(new.operator)] + 1:
                        raise DescriptorError(f"there are {self._limit} executors already")
                    theirs = (one for one in self._newest.values() if plain(one.operator) == busiest)
                    del self._newest[min(theirs, key=lambda one: one.descriptor.expires).key]
            self._newest[new.key] = new

    def holds(self, new: VerifiedDescriptor) -> bool:
        """Returns True if the descriptor is stored. Raises `DescriptorError`: a newer one of its key is."""
        with self._lock:
            return self._holds(new)

    def _holds(self, new: VerifiedDescriptor) -> bool:
        known = self._newest.get(new.key)
        if known is not None and known.age > new.age:
            raise DescriptorError("a newer descriptor of the same key is known")
        return known is not None and known.age == new.age

    def listed(self, model: str | None, *, now: float) -> list[bytes]:
        """The descriptors that have not expired, of one model or of all models, in order of issue."""
        with self._lock:
            stored = sorted(self._newest.values(), key=lambda one: one.age)
        return [
            one.data
            for one in stored
            if one.descriptor.expires > MS * now and model in (None, one.descriptor.model_digest)
        ]

    def drop_unless(self, good: Callable[[VerifiedDescriptor], bool]) -> int:
        """Remove the descriptors for which `good` is False. Returns their number."""
        with self._lock:
            before, self._newest = self._newest, {key: one for key, one in self._newest.items() if good(one)}
            return len(before) - len(self._newest)
