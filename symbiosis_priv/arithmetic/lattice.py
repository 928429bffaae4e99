"""Masks under the learning-with-errors assumption (LWE): samplers, and products with a sparse secret.

A mask is `n = c P + e` modulo 2^32. P is a uniform matrix with `HEIGHT` rows. c has `WEIGHT` / 2 entries +1 and as many
entries -1, all others are 0. e has entries `popcount(64 random bits) - 32`: a centred binomial distribution with
standard deviation 4. c and e are fresh for each row, from a keystream. So products with c are sums of `WEIGHT` rows.

c is uniform among all such vectors, except that 128 random bits choose each of 192 numbers: the probability of a c
differs from a uniform one's by a factor of 1 ± 2^-109, and 2^40 of them from uniform ones by less than 2^-68. e is
exact. No branch depends on c or e. Addresses of memory depend on c, so only the tenant's own machine may do this.

Matrices are stored in panels of 256 bytes of every row, which stay in the cache of a core while many secrets are
multiplied. Entries may be rounded to 16, 20 or 24 bits; what rounding adds is returned by `Panels.put`.
"""

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.keystream import StreamKey, expand
from symbiosis_priv.arithmetic.modular import PRIME, shifted
from symbiosis_priv.limits import HintBits

HEIGHT: Final = 2048  # K, the length of c and the rows of P
WEIGHT: Final = 128  # h, the number of entries of c that are not 0
SIGMA: Final = 4.0
MOST_NOISE: Final = 32  # the largest entry of e
WORDS: Final = 4 * (WEIGHT + WEIGHT // 2)  # words of keystream for one c
NOISE_WORDS: Final = 2  # words of keystream for one entry of e

_PANEL_BYTES: Final = 256
_PANEL_ROWS: Final = 64  # rows times panels that are worth another thread
_ONES = torch.tensor([number.bit_count() for number in range(256)], dtype=torch.int32, device="cpu")


class _Plane(NamedTuple):
    """`bits` bits of every entry, from bit `shift` on. `entries` is the kind as lattice.h numbers it. A panel has
    `parts` runs of columns, which share its bytes."""

    entries: int
    dtype: type[np.generic]
    bits: int
    shift: int
    parts: int = 1

    @property
    def columns(self) -> int:
        """Columns of a panel."""
        return 8 * _PANEL_BYTES // self.bits

    def panels(self, width: int) -> int:
        return -(-width // self.columns)


_UPPER, _UNIFORM = _Plane(1, np.uint16, 16, 16), _Plane(0, np.int32, 32, 0)
_PLANES: Final[dict[HintBits, tuple[_Plane, ...]]] = {
    16: (_UPPER,),
    20: (_UPPER, _Plane(3, np.uint8, 4, 12, parts=2)),
    24: (_UPPER, _Plane(2, np.uint8, 8, 8)),
    32: (_UNIFORM,),
}


def most_error(bits: HintBits) -> int:
    """The largest entry of a product of c with what rounding to `bits` bits adds."""
    return WEIGHT << 31 - bits if bits < 32 else 0


def secrets(words: Tensor) -> Tensor:
    """Sample secrets from keystream: int32 `[r, WORDS]` to int16 `[r, WEIGHT]`, the positions of +1, then of -1."""
    count, library = len(words), native.library()
    out = torch.empty((count, WEIGHT), dtype=torch.int16, device="cpu")
    if library is not None:
        words = words.contiguous()
        library.lattice_secrets(native.best(library), words.data_ptr(), count, out.data_ptr())
        return out
    choices = (words.to(torch.int64) & 0xFFFFFFFF).view(count, WORDS // 4, 4)
    support = _subset(choices[:, :WEIGHT], HEIGHT)
    positive = _subset(choices[:, WEIGHT:], WEIGHT)
    negative = torch.ones((count, WEIGHT), dtype=torch.int8, device="cpu").scatter_(1, positive, 0)
    return out.copy_(support.gather(1, negative.sort(dim=1, stable=True).indices))


def _subset(choices: Tensor, limit: int) -> Tensor:
    """Uniform subsets of numbers below `limit`: int64 `[r, count, 4]` to `[r, count]`; see `choose_subset` in
    lattice.h."""
    rows, count, _ = choices.shape
    chosen = torch.full((rows, count), -1, dtype=torch.int64, device="cpu")
    for i in reversed(range(count)):
        carry = torch.zeros(rows, dtype=torch.int64, device="cpu")
        for word in choices[:, i].unbind(dim=1):
            carry = (carry >> 32) + word * (limit - i)
        number = i + (carry >> 32)
        taken = (chosen == number[:, None]).any(dim=1)
        chosen[:, i] = number.masked_fill(taken, i)
    return chosen


def noise(words: Tensor) -> Tensor:
    """Sample errors from keystream: int32 `[r, NOISE_WORDS d]` to int32 `[r, d]`."""
    words, library = words.contiguous(), native.library()
    rows, width = len(words), words.shape[1] // NOISE_WORDS
    if library is None:
        ones = _ONES[words.reshape(-1).view(torch.uint8).to(torch.int64)]
        return ones.view(rows, width, 4 * NOISE_WORDS).sum(dim=2, dtype=torch.int32) - 32
    out = torch.empty((rows, width), dtype=torch.int32, device="cpu")
    library.lattice_noise(native.best(library), words.data_ptr(), rows * width, out.data_ptr())
    return out


def weigh(secrets: Tensor, residues: Tensor) -> Tensor:
    """Products of secrets, int16 `[r, WEIGHT]`, with a column of residues, int64 `[HEIGHT]`, modulo p: int64 `[r]`."""
    picked = torch.stack([residues & (1 << 31) - 1, residues >> 31], dim=1)[secrets.to(torch.int64)]
    low, high = (picked[:, : WEIGHT // 2].sum(1) - picked[:, WEIGHT // 2 :].sum(1)).remainder_(PRIME).unbind(dim=1)
    return (shifted(high, 31) + low).remainder_(PRIME)


def panel_bytes(width: int, *, bits: HintBits) -> int:
    """Bytes of a matrix `[HEIGHT, width]` in panels."""
    return sum(HEIGHT * _PANEL_BYTES * plane.panels(width) for plane in _PLANES[bits])


class Panels:
    """A matrix `[HEIGHT, width]` modulo 2^32 in panels, with `bits` bits of each entry. Its `memory`, uint8
    `[panel_bytes(width, bits=bits)]`, may be a read-only map of a file."""

    def __init__(self, memory: NDArray[np.uint8], *, width: int, bits: HintBits) -> None:
        self.width, self.bits, self._memory = width, bits, memory
        self._planes, start = list[tuple[_Plane, NDArray[np.generic]]](), 0
        for plane in _PLANES[bits]:
            size = HEIGHT * _PANEL_BYTES * plane.panels(width)
            values = memory[start : start + size].view(plane.dtype).reshape(plane.panels(width), HEIGHT, -1)
            self._planes.append((plane, values))
            start += size

    @classmethod
    def empty(cls, width: int, *, bits: HintBits) -> "Panels":
        return cls(np.zeros(panel_bytes(width, bits=bits), dtype=np.uint8), width=width, bits=bits)

    def narrowed(self, width: int) -> "Panels":
        """The first columns of a matrix with one plane, in the same memory."""
        assert len(self._planes) == 1
        return Panels(self._memory[: panel_bytes(width, bits=self.bits)], width=width, bits=self.bits)

    def put(self, first: int, rows: Tensor) -> Tensor:
        """Store rows, int32 `[n, width]`, from row `first` on. Returns int32 `[n, width]`, what rounding has added."""
        dropped = 32 - self.bits
        rounded = rows if not dropped else rows + (1 << dropped - 1) >> dropped << dropped
        for plane, values in self._planes:
            padded = torch.zeros((len(rows), len(values) * plane.columns), dtype=torch.int32, device="cpu")
            padded[:, : self.width] = rounded >> plane.shift & (1 << plane.bits) - 1 if dropped else rounded
            parts = padded.view(len(rows), len(values), plane.parts, -1)
            entries = sum(parts[:, :, part] << plane.bits * part for part in range(plane.parts))
            assert isinstance(entries, Tensor)
            values[:, first : first + len(rows)] = entries.transpose(0, 1).numpy().astype(plane.dtype)
        return rounded - rows

    def add_product(self, secrets: Tensor, out: Tensor) -> None:
        """Add the products with secrets, int16 `[r, WEIGHT]`, to `out`, int32 `[r, width]` contiguous, modulo 2^32."""
        library, count = native.library(), len(secrets)
        if library is None:
            self._add_product_densely(secrets, out)
            return
        isa, operands = native.best(library), (secrets.data_ptr(), count)
        for plane, values in self._planes:
            matrix = values.ctypes.data

            def work(begin: int, end: int, plane: _Plane = plane, matrix: int = matrix) -> None:
                to = plane.shift, out.data_ptr(), self.width, begin, end
                library.lattice_gather(isa, plane.entries, matrix, *operands, *to)

            native.for_each_slice(work, total=len(values), least=max(1, _PANEL_ROWS // max(1, count)))

    def _add_product_densely(self, secrets: Tensor, out: Tensor) -> None:
        signs = torch.ones((len(secrets), WEIGHT), dtype=torch.int32, device="cpu")
        signs[:, WEIGHT // 2 :] = -1
        dense = torch.zeros((len(secrets), HEIGHT), dtype=torch.int32, device="cpu")
        dense.scatter_(1, secrets.to(torch.int64), signs)
        for plane, values in self._planes:
            width = plane.columns // plane.parts
            for number, panel in enumerate(values):
                entries = torch.from_numpy(panel.astype(np.int32))
                for part in range(plane.parts):
                    to = out[:, (number * plane.parts + part) * width :][:, :width]
                    own = entries if plane.parts == 1 else entries >> plane.bits * part & (1 << plane.bits) - 1
                    to += (dense @ own << plane.shift)[:, : to.shape[1]]

    def rows(self, first: int, count: int) -> Tensor:
        """Return rows as they are stored, int32 `[count, width]`."""
        out = torch.zeros((count, self.width), dtype=torch.int32, device="cpu")
        for plane, values in self._planes:
            entries = torch.from_numpy(values[:, first : first + count].astype(np.int32)).transpose(0, 1)
            mask = (1 << plane.bits) - 1 if plane.bits < 32 else -1
            parts = [entries >> plane.bits * part & mask for part in range(plane.parts)]
            out |= torch.stack(parts, dim=2).reshape(count, -1)[:, : self.width] << plane.shift
        return out


def uniform(key: StreamKey, width: int) -> Panels:
    """P: a uniform matrix `[HEIGHT, width]`. A narrower one from the same key has its first columns."""
    panels = -(-width // _UNIFORM.columns)
    memory = expand(key, first_row=0, rows=HEIGHT * panels, width=_UNIFORM.columns).numpy()
    return Panels(memory.reshape(-1).view(np.uint8), width=width, bits=32)
