"""The hints of `masking = "lwe"`: products E = P W^T of a uniform matrix P with the weights, made once from the full
checkpoint, and kept on disk beside the verification keys.

P is expanded from the secret of the verification keys and the number of its draw, and a hint is sealed under them:
nothing here comes from another party. A hint takes gigabytes, so it is rounded to 16 bits by default, mapped into
memory, and shared by processes. The check stays exact: with what rounding has added, delta, a hint holds
`D_k = delta_k R` modulo p for each of its rows (`tenant.masking.lwe`). So hints belong to one R, and are deleted with
it.

What is secret. P may be public, as the matrix of LWE is, and E and delta follow from P and public weights. D may not:
with P, it is 2,048 linear equations of R. So D is encrypted under the keys' secret, and E is not.

Files, in the folder of the preparation: `lwe-<bits>/<group>.<direction>` with the panels of E, D and a MAC, and
`lwe-rows` with the number of rows that were masked under P, or reserved, and the number of P's draw. Both survive
restarts. Without this file there is no P, and the next preparation draws another. A copy of the folder counts on its
own, and who can write to the folder can set the number back. Either shows an attacker k times `MOST_ROWS` rows at most:
who solves one of N in time T solves one of N / k in k T, so this takes log2(k) bits. c and e are fresh all the same.
"""

import errno
import hashlib
import hmac
import mmap
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from symbiosis_priv.arithmetic import lattice
from symbiosis_priv.arithmetic.keystream import StreamKey, derive, expand
from symbiosis_priv.arithmetic.lattice import HEIGHT, WEIGHT, Panels, panel_bytes
from symbiosis_priv.arithmetic.modular import dot
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction, Headroom
from symbiosis_priv.checkpoints.layers import GroupSpec
from symbiosis_priv.checkpoints.weights import Progress, WeightStore
from symbiosis_priv.errors import CheckpointError, ConfigError, StorageError
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, GroupIndex, HintBits
from symbiosis_priv.system.files import PrivateFolder, lock, storing
from tenant.core.verifier import Place
from tenant.preparation.keys import mac
from tenant.preparation.prepared import Preparation, name_of

MOST_ROWS: Final = 1 << 40
"""Rows that may be masked under one P; the parameters are chosen for this number."""
_RESERVED: Final = 1 << 20  # rows that are reserved at a time
_ROWS: Final = "lwe-rows"
_MAC_BYTES: Final = 32
_STEP: Final = 256  # rows of P that are multiplied at a time
_PATIENCE_S: Final = 60.0


class Hint(NamedTuple):
    """The hint of one layer group and direction: E in panels, and D, int64 `[HEIGHT]`."""

    panels: Panels
    added: Tensor


def hint_bytes(outputs: int, bits: HintBits) -> int:
    """Bytes of a hint on disk, for products of width `outputs`."""
    return panel_bytes(outputs, bits=bits) + 8 * HEIGHT + _MAC_BYTES


def headroom(bits: HintBits) -> Headroom:
    """What a mask adds to a row, and a hint of this precision to a product."""
    return Headroom(noise=lattice.MOST_NOISE, error=lattice.most_error(bits))


class Hints:
    """The hints of a preparation with `bits` bits. Thread-safe. A hint is mapped and checked when it is first used."""

    def __init__(self, preparation: Preparation, bits: HintBits) -> None:
        self.bits = bits
        self._preparation, self._folder = preparation, _folder_of(preparation)
        self._lock = threading.Lock()
        self._mapped: dict[Place, tuple[Hint, NDArray[np.uint8]]] = {}
        self._uniform: Panels | None = None
        self._drawn: str | None = None
        self._reserved = 0

    @classmethod
    def find(cls, preparation: Preparation) -> Self:
        """Return the hints that are stored. Raises `CheckpointError` if there are none."""
        folder = _folder_of(preparation)
        for bits in get_args(HintBits):
            if (folder / _name(bits)).is_dir():
                return cls(preparation, bits)
        raise CheckpointError(f"no hints are prepared for model {preparation.manifest.digest}. {_advice()}")

    def hint(self, index: GroupIndex, direction: Direction) -> Hint:
        """Return the hint of a layer group and direction. Raises `CheckpointError`: it was not prepared, or is not the
        one that was prepared; `ConfigError`: other users can read or change it."""
        place = index, direction
        with self._lock:
            if place not in self._mapped:
                entry = self._preparation.manifest.groups[index]
                what = f"the hint of {entry.name} ({direction}) in {self._folder / _name(self.bits)}"
                try:
                    memory = self._map(place)
                except OSError as error:
                    advice = _advice("" if direction == FORWARD else " --training")
                    raise CheckpointError(f"{what} was not prepared ({error.strerror}). {advice}") from error
                if len(memory) != self._bytes(place) or not self._is_sealed(place, memory):
                    raise CheckpointError(f"{what} is damaged, or was made for other weights or keys. {_advice()}")
                width = entry.columns(direction).result
                end = len(memory) - _MAC_BYTES
                added = torch.from_numpy(memory[end - 8 * HEIGHT : end].view(np.int64) ^ self._hidden(place))
                panels = Panels(memory[: end - 8 * HEIGHT], width=width, bits=self.bits)
                self._mapped[place] = Hint(panels, added), memory
            return self._mapped[place][0]

    def is_intact(self, index: GroupIndex, direction: Direction) -> bool:
        """Returns True if the hint is on disk as it was made. Reads all of it again."""
        with self._lock:
            self._mapped.pop((index, direction), None)
        try:
            self.hint(index, direction)
        except CheckpointError:
            return False
        return True

    def matrix(self, width: int) -> Panels:
        """Return the first columns of P."""
        with self._lock:
            if self._uniform is None or self._uniform.width < width:
                # nothing rests on the key's secrecy: P could be public, but must be uniform and the tenant's own
                key = StreamKey(derive(self._preparation.keys.secret, "lwe matrix", self._draw()))
                self._uniform = lattice.uniform(key, width)
            return self._uniform.narrowed(width)

    def reserve(self, rows: int) -> None:
        """Count rows that are to be masked under P. Raises `ConfigError` if they would be more than `MOST_ROWS`,
        `CheckpointError` or `OSError` if they cannot be counted."""
        with self._lock:
            if rows > self._reserved:
                wanted = max(rows, _RESERVED)
                _count(self._preparation, self._draw(), wanted)
                self._reserved += wanted
            self._reserved -= rows

    def _draw(self) -> str:
        if self._drawn is None:  # it stays the same for this object
            with _counter(self._preparation) as descriptor:
                _, self._drawn = _counted(descriptor, self._folder)
        return self._drawn

    def _map(self, place: Place) -> NDArray[np.uint8]:
        with _opened(self._preparation) as parent, parent.subfolder(_name(self.bits)) as folder:
            descriptor = folder.open_file(name_of(place))
        with os.fdopen(descriptor, "rb") as file:
            try:
                return np.frombuffer(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ), dtype=np.uint8)
            except ValueError as error:  # an empty file
                raise OSError(errno.EINVAL, str(error)) from error

    def _bytes(self, place: Place) -> int:
        index, direction = place
        return hint_bytes(self._preparation.manifest.groups[index].columns(direction).result, self.bits)

    def _is_sealed(self, place: Place, memory: NDArray[np.uint8]) -> bool:
        return hmac.compare_digest(memory[-_MAC_BYTES:].tobytes(), self._seal(place, memory[:-_MAC_BYTES]))

    def _seal(self, place: Place, content: NDArray[np.uint8]) -> bytes:
        (index, direction), digest = place, hashlib.sha256(content.data).hexdigest()
        weights = self._preparation.manifest.groups[index].digest
        what = weights, str(index), direction, str(self.bits), f"{HEIGHT}/{WEIGHT}", self._draw(), digest
        return mac(self._preparation.keys, "hint with encrypted D", *what)

    def _hidden(self, place: Place) -> NDArray[np.int64]:
        """The keystream that hides D: int64 `[HEIGHT]`."""
        labels = "lwe D", self._draw(), str(self.bits), *map(str, place)
        key = StreamKey(derive(self._preparation.keys.secret, *labels))
        stream: NDArray[np.int64] = expand(key, first_row=0, rows=1, width=2 * HEIGHT).numpy().view(np.int64)[0]
        return stream

    def _make(self, place: Place, matrix: RingMatrix) -> NDArray[np.uint8]:
        (index, direction), (width, outputs) = place, matrix.columns(place[1])
        memory = np.zeros(self._bytes(place), dtype=np.uint8)
        content, uniform = memory[:-_MAC_BYTES], self.matrix(width)
        panels = Panels(content[: -8 * HEIGHT], width=outputs, bits=self.bits)
        added = torch.empty(HEIGHT, dtype=torch.int64, device="cpu")
        r, _ = self._preparation.keys[index, direction]
        for first in range(0, HEIGHT, _STEP):
            product = matrix.product(uniform.rows(first, _STEP), direction)
            added[first : first + _STEP] = dot(panels.put(first, product), r)
        content[-8 * HEIGHT :].view(np.int64)[:] = added.numpy() ^ self._hidden(place)
        memory[-_MAC_BYTES:] = np.frombuffer(self._seal(place, content), dtype=np.uint8)
        return memory


class Forecast(NamedTuple):
    """What masks under LWE would cost: bytes of the hints of each direction and of P in memory; multiplications of one
    row by all weights (the hints of a direction take `HEIGHT` times as many); additions of one row here, forward; and
    the relative standard deviation of the error of a product, for the widest rows."""

    forward: int
    backward: int
    uniform: int
    products: int
    additions: int
    error: float


def forecast(groups: Sequence[GroupSpec], *, bits: HintBits, weight_bits: int, training: bool) -> Forecast:
    """Predict what hints cost. The error assumes weights whose largest entry is 3.4 standard deviations, and rows that
    use the whole range: outputs then have a standard deviation of 2^31 / sqrt(d), `e W^T` of 4 rms(W) sqrt(d), and
    rounding of sqrt(h / 12) 2^(32 - bits)."""
    groups = [group for group in groups if group.experts == 1]
    sizes = [(group.inputs, sum(group.outputs)) for group in groups]
    wide, rms = max(d for d, _ in sizes), (1 << weight_bits - 1) / 3.4
    rounding = (WEIGHT / 12) ** 0.5 * (1 << 32 - bits) * (bits < 32)
    return Forecast(
        forward=sum(hint_bytes(o, bits) for _, o in sizes),
        backward=sum(hint_bytes(group.inputs, bits) for group in groups if group.composed is None),
        uniform=panel_bytes(max(wide, *(o for _, o in sizes)) if training else wide, bits=32),
        products=sum(d * o for d, o in sizes),
        additions=sum(WEIGHT * (d + o) for d, o in sizes),
        error=((lattice.SIGMA * rms * wide**0.5) ** 2 + rounding**2) ** 0.5 * wide**0.5 / (1 << 31),
    )


def seconds_to_make(costs: Forecast) -> float:
    """Estimate how long the hints of one direction take here, from the time of one product."""
    matrix = RingMatrix(torch.ones((_STEP, _STEP), dtype=torch.int16, device="cpu"), weight_bits=DEFAULT_WEIGHT_BITS)
    rows = torch.zeros((4 * _STEP, _STEP), dtype=torch.int32, device="cpu")
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        matrix.product(rows)
        seconds.append(time.perf_counter() - began)
    return HEIGHT * costs.products * min(seconds) / (4 * _STEP**3)


def make_hints(
    preparation: Preparation,
    store: WeightStore,
    *,
    bits: HintBits,
    directions: Sequence[Direction] = DIRECTIONS,
    progress: Progress | None = None,
) -> int:
    """Make the hints that are missing or damaged, one after another: a run that was interrupted goes on where it was.
    Hints of another precision are deleted. `store`: the full checkpoint. Returns the bytes of all hints on disk. Raises
    `StorageError`: the folder cannot be written, or has no room."""
    entries, hints = preparation.manifest.groups, Hints(preparation, bits)
    # a stack of experts has no hints, because its rows are not masked in this way
    groups = [GroupIndex(index) for index, entry in enumerate(entries) if entry.experts == 1]
    places = [(i, way) for i in groups for way in directions if way == FORWARD or entries[i].composed is None]
    path = _folder_of(preparation) / _name(bits)
    with storing(path), _opened(preparation) as parent:
        for other in set(get_args(HintBits)) - {bits}:
            parent.delete(_name(other))
        if not (parent.path / _ROWS).exists():
            parent.write(_ROWS, _record(0, secrets.token_hex(16)))
        with parent.subfolder(path.name, create=not path.exists()) as folder:
            missing = [place for place in places if not hints.is_intact(*place)]
            needed, free = sum(hints._bytes(place) for place in missing), shutil.disk_usage(path).free
            if free < needed:
                raise StorageError(
                    f"the hints need {needed / 1e9:,.2f} GB in {path}, and {free / 1e9:,.2f} GB are free: make room, "
                    f"or choose another folder (SYMBIOSIS_PRIV_CACHE)"
                )
            done, total = len(places) - len(missing), len(places)
            for index in groups:
                wanted = [place for place in missing if place[0] == index]
                if progress is not None:
                    progress(done, total)
                if not wanted:
                    continue
                weight = store.quantised(entries[index]).weight
                matrix = RingMatrix(weight, weight_bits=preparation.manifest.weight_bits)
                for place in wanted:
                    partial = f".{secrets.token_hex(8)}"
                    folder.write(partial, hints._make(place, matrix).data)
                    folder.rename(partial, name_of(place))  # a file with this name is complete
                done += len(wanted)
            if progress is not None:
                progress(done, total)
    return sum(map(hints._bytes, places))


def _advice(more: str = "") -> str:
    options = f"--model FULL_CHECKPOINT --federation federation.toml --masking lwe{more}"
    return f"Run `symbiosis-priv tenant prepare {options}`"


def _name(bits: HintBits) -> str:
    return f"lwe-{bits}"


def _folder_of(preparation: Preparation) -> Path:
    if preparation.folder is None:
        raise StorageError("hints are kept beside the verification keys, and these could not be stored (see the log)")
    return preparation.folder


@contextmanager
def _opened(preparation: Preparation) -> Iterator[PrivateFolder]:
    path = _folder_of(preparation)
    with PrivateFolder.open(path.parent) as parent, parent.subfolder(path.name) as folder:
        yield folder


def _record(rows: int, draw: str) -> bytes:
    return f"{rows:020} {draw}".encode()


def _counted(descriptor: int, folder: Path) -> tuple[int, str]:
    """Read the number of rows and the draw of P."""
    found = re.fullmatch(rb"([0-9]{20}) ([0-9a-f]{32})", os.pread(descriptor, 64, 0))
    if found is None:
        raise CheckpointError(f"{folder / _ROWS} is damaged. Delete {folder}, and prepare the model again")
    return int(found[1]), found[2].decode()


@contextmanager
def _counter(preparation: Preparation, *, write: bool = False) -> Iterator[int]:  # the file of the number of rows
    with _opened(preparation) as folder:
        try:
            descriptor = folder.open_file(_ROWS, write=write)
        except FileNotFoundError:
            missing = f"{folder.path / _ROWS} is missing, so rows cannot be counted, and other hints are needed"
            raise CheckpointError(f"{missing}. {_advice()}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _count(preparation: Preparation, draw: str, rows: int) -> None:
    """Add rows to the number on disk, under a lock against other processes, before any of them is used."""
    folder = _folder_of(preparation)
    with _counter(preparation, write=True) as descriptor:
        if not lock(descriptor, patience_s=_PATIENCE_S):
            raise ConfigError(f"another process has locked {folder / _ROWS} for {_PATIENCE_S:g} s; stop it")
        stored, found = _counted(descriptor, folder)
        if found != draw:
            raise CheckpointError(f"another matrix P was prepared in {folder} since this session began; start again")
        if (total := stored + rows) > MOST_ROWS:
            raise ConfigError(
                f"{stored:,} rows were masked under one matrix P, and its parameters are chosen for "
                f"{MOST_ROWS:,}. Delete {folder}, and prepare the model again: that draws another P"
            )
        os.pwrite(descriptor, _record(total, draw), 0)
        os.fsync(descriptor)
