"""One-time masks: AES-256-CTR, addressed by row.

Theory of operation. A session draws one 256-bit secret. Everything else is derived with HKDF-SHA256 (RFC 5869):

    session secret --"helper", name, key fingerprint--> helper seed      (all that a helper ever receives)
    helper seed    --"mask", group_name, direction--> AES-256 key   (one keystream per layer group and direction)

Row r of a keystream occupies its own whole AES blocks, starting at block `r * ceil(4 d / 16)`: any row can be made
without the ones before it, by the tenant and the helper alike, and rows never overlap. Info strings
are length-prefixed, so that no two derivations can collide. Masks come from nowhere else (rule 1); a row index is
handed out by `RowCounter` exactly once, and neither secret nor counter survives the process (rules 2 and 3).
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections import defaultdict
from typing import NoReturn

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from symbiosis_priv.errors import BurntRowError, RangeError
from symbiosis_priv.forks import generation

SEED_BYTES = 32
MAX_ROW = 1 << 63
MAX_BYTES = 1 << 32  # of one expansion; a frame holds no more either
_BLOCK = 16
_PIECE = 1 << 19  # bytes at a time: enough to hide what a call costs, and they stay in the cache
_ZEROS = memoryview(bytes(_PIECE))  # what is encrypted


def derive(secret: bytes, *labels: str) -> bytes:
    """HKDF-SHA256 of a uniform secret, bound to labels. Returns 32 bytes."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in (b"symbiosis-priv v1", *map(str.encode, labels)))
    return HKDF(algorithm=SHA256(), length=SEED_BYTES, salt=None, info=info).derive(secret)


def expand(key: bytes, *, first_row: int, rows: int, width: int) -> Tensor:
    """Rows `first_row .. first_row + rows` of a keystream, uniform over the ring.

    Args:
        key: 32 bytes, used for one width only (`derive` binds layer group and direction).
        first_row: index of the first row, 0..2^63.
        rows: number of rows; may be 0.
        width: columns d.

    Returns:
        int32 `[rows, d]`, contiguous, on the CPU.

    Raises:
        RangeError: out of range, or more than `MAX_BYTES`; nothing was allocated.
    """
    padded = _padded(width)
    encryptor = _encryptor(key, first_row=first_row, rows=rows, width=width)
    stream = _next_words(encryptor, _room(rows * padded), rows * padded).view(rows, padded)
    return stream if padded == width else stream[:, :width].contiguous()


def add_keystream(key: bytes, *, first_row: int, to: Tensor) -> None:
    """Add rows of a keystream to a matrix modulo 2^32, piece by piece: no mask as large as the matrix is made.

    Args:
        key: as for `expand`.
        first_row: as for `expand`.
        to: int32 `[rows, d]` on the CPU; changed in place.

    Raises:
        RangeError: as for `expand`; nothing was changed.
    """
    rows, width = to.shape
    padded = _padded(width)
    encryptor = _encryptor(key, first_row=first_row, rows=rows, width=width)
    step = max(1, _PIECE // (4 * padded))
    room = _room(min(step, rows) * padded)
    for piece in to.split(step):
        words = _next_words(encryptor, room, len(piece) * padded)
        piece.add_(words.view(-1, padded)[:, :width])


def _padded(width: int) -> int:
    """Columns that a row takes of the keystream: whole blocks."""
    return -(-4 * width // _BLOCK) * _BLOCK // 4


def _encryptor(key: bytes, *, first_row: int, rows: int, width: int) -> CipherContext:
    """The keystream from a row on. Raises `RangeError` for what `expand` refuses."""
    padded = _padded(width)
    possible = first_row >= 0 and rows >= 0 and width >= 1 and first_row + rows <= MAX_ROW
    if not possible or 4 * rows * padded > MAX_BYTES or len(key) != SEED_BYTES:
        raise RangeError(f"no keystream: key {len(key)} bytes, rows {first_row}..{first_row + rows}, width {width}")
    counter = (first_row * 4 * padded // _BLOCK).to_bytes(_BLOCK, "big")
    return Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor()


def _room(words: int) -> Tensor:
    """Memory for so many words of a keystream: `update_into` asks for most of a block more than it writes."""
    return torch.empty(4 * words + _BLOCK, dtype=torch.uint8, device="cpu")


def _next_words(encryptor: CipherContext, room: Tensor, words: int) -> Tensor:
    """The next words of a keystream, little-endian: int32 `[words]`, at the beginning of `room`."""
    data, size = room.numpy().data, 4 * words
    for start in range(0, size, _PIECE):
        encryptor.update_into(_ZEROS[: size - start], data[start:])
    stream = room[:size].view(torch.int32)
    if sys.byteorder == "big":
        stream.numpy().byteswap(inplace=True)
    return stream


class SessionSecret:
    """A fresh 256-bit secret and its row counters; never stored, copied or carried over a fork.

    After a fork the child finds the secret dead: `BurntRowError` tells it to open a session of its own,
    since parent and child would otherwise hand out the same rows (rule 2).
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(SEED_BYTES)
        self._generation = generation()
        self._lock = threading.Lock()
        self._next_row: defaultdict[tuple[str, str], int] = defaultdict(int)

    def seed_for(self, *holder: str) -> bytes:
        """The seed that `holder` may know, 32 bytes: for a helper, its name and its key's fingerprint (rule 11)."""
        self._check_alive()
        return derive(self._secret, "helper", *holder)

    def burn(self, *, group_name: str, direction: str, rows: int) -> int:
        """Take `rows` fresh row indices of a (group, direction) and return the first. They are never returned again."""
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


def mask_key(seed: bytes, *, group_name: str, direction: str) -> bytes:
    """The AES key of one (group, direction) keystream under a helper's seed."""
    return derive(seed, "mask", group_name, direction)
