"""The secret of a session, and the counters of its mask rows (rules 2, 3 and 12)."""

import secrets
import threading
from collections import defaultdict
from typing import NoReturn

from symbiosis_priv.arithmetic.forks import generation
from symbiosis_priv.arithmetic.keystream import SEED_BYTES, Seed, derive
from symbiosis_priv.errors import BurntRowError


class SessionSecret:
    """A fresh 256-bit secret and its row counters. They are never stored or copied.

    In a forked child every method raises `BurntRowError`, because parent and child would use the same rows (rule 2).
    The child opens its own session.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(SEED_BYTES)
        self._generation = generation()
        self._lock = threading.Lock()
        self._next_row: defaultdict[tuple[str, str], int] = defaultdict(int)

    def seed_for(self, *holder: str) -> Seed:
        """Return the 32-byte seed for one holder, for a helper its name and its key's fingerprint (rule 11)."""
        self._check_alive()
        return Seed(derive(self._secret, "helper", *holder))

    def burn(self, *, group_name: str, direction: str, rows: int) -> int:
        """Burn `rows` fresh row indices of a (group, direction). Returns the first. No index is returned twice."""
        self._check_alive()
        if rows < 0:
            raise BurntRowError(f"a counter never goes back: cannot burn {rows} rows")
        with self._lock:
            first = self._next_row[group_name, direction]
            self._next_row[group_name, direction] = first + rows
        return first

    @property
    def alive(self) -> bool:
        """False in a forked child."""
        return generation() == self._generation

    def _check_alive(self) -> None:
        if not self.alive:
            raise BurntRowError("this process was forked from the one that drew the session secret; open a new session")

    def __reduce__(self) -> NoReturn:
        raise BurntRowError("a session secret and its counters are never stored or copied; open a new session")

    def __repr__(self) -> str:
        return "SessionSecret(...)"
