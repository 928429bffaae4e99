"""One-time masks: AES-256-CTR, addressed by row.

Theory of operation. A session draws one 256-bit secret. Everything else is derived with HKDF-SHA256 (RFC 5869):

    session secret --"helper", name, key fingerprint--> helper seed      (the only secret that a helper receives)
    helper seed    --"mask", group_name, direction--> AES-256 key   (one keystream per layer group and direction)

Row r of a keystream occupies whole AES blocks of its own, starting at block `r * ceil(4 d / 16)`. So the tenant and the
helper can make any row without the rows before it, and rows never overlap. Info strings are length-prefixed, so that no
two derivations can collide. All masks come from here (rule 1). `tenant.core.pads` hands out each row index exactly
once.
"""

import secrets
from collections.abc import Callable
from typing import NewType, NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

from symbiosis_priv.errors import RangeError
from symbiosis_priv.native import for_each_slice

Seed = NewType("Seed", bytes)  # 32 secret bytes. Tenant and helper derive the keys of their keystreams from it.
StreamKey = NewType("StreamKey", bytes)
"""The 32-byte AES key of one keystream: of one layer group, one direction and one width."""

SEED_BYTES = 32
MAX_ROW = 1 << 63
MAX_BYTES = 1 << 32  # limit of one expansion, and of one frame
_BLOCK = 16
_SLACK = _BLOCK // 4  # words
_PIECE = 1 << 18  # bytes at a time: large enough to amortise a call, and small enough for the cache
_AHEAD = 1 << 17  # bytes of rows that are worth expanding ahead of time
_TOGETHER = 16  # rows that are expanded ahead with one call, if fewer are needed
_ZEROS = memoryview(bytes(_PIECE))  # the plaintext


def derive(secret: bytes, *labels: str) -> bytes:
    """HKDF-SHA256 of a uniform secret, bound to labels. Returns 32 bytes."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in (b"symbiosis-priv v1", *map(str.encode, labels)))
    return HKDF(algorithm=SHA256(), length=SEED_BYTES, salt=None, info=info).derive(secret)


def random_key() -> StreamKey:
    """A fresh key from the operating system's generator."""
    return StreamKey(secrets.token_bytes(SEED_BYTES))


Memory = Callable[[int], NDArray[np.int32]]
"""Makes uninitialised memory for a number of entries."""


def ordinary_memory(entries: int) -> NDArray[np.int32]:
    """Uninitialised memory of the C library."""
    return np.empty(entries, dtype=np.int32)


def expand(key: StreamKey, *, first_row: int, rows: int, width: int) -> Tensor:
    """Expand rows `first_row .. first_row + rows` of a keystream, uniform over the ring: int32 `[rows, width]`,
    contiguous, on the CPU. A key is used for one width only (`derive` binds layer group and direction). `rows` may
    be 0. Raises `RangeError`: an argument is out of range, or the rows exceed `MAX_BYTES`; nothing was allocated."""
    return Keystream(key, width=width).expand(first_row, rows)


class Keystream:
    """One keystream. Keeps its cipher contexts, because setting up a key takes as long as many rows. Thread-safe.
    Raises `RangeError` if the key is not 32 bytes, or the width is below 1."""

    def __init__(self, key: StreamKey, *, width: int) -> None:
        if len(key) != SEED_BYTES or width < 1:
            raise RangeError(f"no keystream: key {len(key)} bytes, width {width}")
        self._algorithm, self._width = algorithms.AES256(key), width
        self._padded = -(-4 * width // _BLOCK) * _BLOCK // 4  # columns that a row occupies: whole blocks
        self._idle: list[CipherContext] = []  # append and pop are atomic
        self._ahead = (0, np.empty((0, width), dtype=np.int32))  # (first row, rows); replaced as a whole

    def expand(self, first_row: int, rows: int) -> Tensor:
        """Return `rows` rows from `first_row` on; see the function `expand`."""
        return torch.from_numpy(self.expanded(first_row, rows))

    def expanded(self, first_row: int, rows: int, memory: Memory = ordinary_memory) -> NDArray[np.int32]:
        """`expand` as an array, in memory from `memory` unless a row leaves part of a block. AES runs without the GIL,
        in as many threads as torch has."""
        self._check(first_row, rows)
        padded = self._padded
        space = memory(rows * padded + _SLACK)

        def fill(begin: int, end: int) -> None:
            cipher = self._cipher(first_row + begin)
            _encrypt(cipher, space[begin * padded : end * padded + _SLACK])  # the slack belongs to the next slice
            self._idle.append(cipher)

        for_each_slice(fill, total=rows, least=max(1, _PIECE // (4 * padded)))
        stream = space[:-_SLACK].reshape(rows, padded)
        return stream if padded == self._width else np.ascontiguousarray(stream[:, : self._width])

    def make_ahead(self, first_row: int, rows: int) -> None:
        """Expand a few rows ahead of time, for `add_to`. A single row is expanded with rows that follow it, because
        a call of the cipher takes longer than a row."""
        most = _AHEAD // (4 * self._padded)
        if self._made_ahead(first_row, rows) is None and rows <= most and first_row + rows <= MAX_ROW:
            rows = max(rows, min(_TOGETHER, most, MAX_ROW - first_row))
            self._ahead = first_row, self.expanded(first_row, rows)

    def add_to(self, matrix: Tensor, *, first_row: int) -> None:
        """Add rows to a matrix, int32 `[rows, d]` on the CPU, modulo 2^32 and in place: block by block, without
        allocating a mask as large as the matrix. If it raises `RangeError`, as `expand` does, the
        matrix is unchanged."""
        entries = matrix.numpy()  # numpy adds in this thread, without torch's start-up cost
        rows = len(entries)
        if (ahead := self._made_ahead(first_row, rows)) is not None:
            np.add(entries, ahead, out=entries)
            return
        self._check(first_row, rows)
        cipher, step = self._cipher(first_row), max(1, _PIECE // (4 * self._padded))
        space = np.empty(min(step, rows) * self._padded + _SLACK, dtype=np.int32)
        for start in range(0, rows, step):
            piece = entries[start : start + step]
            words = len(piece) * self._padded
            _encrypt(cipher, space[: words + _SLACK])
            np.add(piece, space[:words].reshape(len(piece), self._padded)[:, : self._width], out=piece)
        self._idle.append(cipher)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a keystream holds a key: it is neither copied nor stored")

    def _made_ahead(self, first_row: int, rows: int) -> NDArray[np.int32] | None:
        """Return rows that `make_ahead` has expanded, or None if it has not."""
        first, ahead = self._ahead
        skipped = first_row - first
        return ahead[skipped : skipped + rows] if 0 <= skipped <= len(ahead) - rows else None

    def _check(self, first_row: int, rows: int) -> None:
        if not (first_row >= 0 and rows >= 0 and first_row + rows <= MAX_ROW and 4 * rows * self._padded <= MAX_BYTES):
            raise RangeError(f"no keystream: rows {first_row}..{first_row + rows}, width {self._width}")

    def _cipher(self, first_row: int) -> CipherContext:
        """Return a cipher context at the beginning of a row. The caller owns it until it is put back."""
        counter = (first_row * 4 * self._padded // _BLOCK).to_bytes(_BLOCK, "big")
        try:
            cipher = self._idle.pop()
        except IndexError:
            return Cipher(self._algorithm, modes.CTR(counter)).encryptor()
        cipher.reset_nonce(counter)
        return cipher


def _encrypt(cipher: CipherContext, space: NDArray[np.int32]) -> None:
    """Fill contiguous words with the next words of a keystream, little-endian. The last `_SLACK` words are room that
    the cipher requires and does not write to."""
    data = space.view(np.uint8).data
    size = len(data) - _BLOCK
    for start in range(0, size, _PIECE):
        stop = min(start + _PIECE, size)
        cipher.update_into(_ZEROS[: stop - start], data[start : stop + _BLOCK])


def mask_key(seed: Seed, *, group_name: str, direction: str) -> StreamKey:
    """The AES key of one (group, direction) keystream under a helper's seed."""
    return StreamKey(derive(seed, "mask", group_name, direction))
