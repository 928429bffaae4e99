"""`masking = "lwe"` (experimental): rows hidden from one untrusted provider, without a second party.

Theory of operation. The mask of a row is `n = c P + e` modulo 2^32 (`symbiosis_priv.arithmetic.lattice`): P is a
uniform matrix of the tenant's own, c a sparse secret and e a small error, both fresh for each row, from the session's
keystream (docs/lwe.md). The tenant has computed `E = P W^T` when it prepared (`tenant.preparation.hints`), so the
effect that it subtracts is `c E`. What comes back is the product of the row `x + e`, exactly.

Verification. The check is that of every scheme, for the row x + e: `y R = (x + e) V` modulo p. A hint is rounded:
E + delta is stored, so the tenant subtracts `c (E + delta)`, and

    y R = (x + e) V - sum_k c_k D_k,        D_k = delta_k R modulo p.

`LwePad.correction` returns the terms that the row itself does not explain. No tolerance, and soundness is unchanged:
an executor's error is not 0 if the check fails, for every c and e, so a verdict depends on the executor's errors alone.
This needs a hint that is the tenant's own: with one wrong row of E, each verdict would tell whether c_k is 0. So hints
are sealed, and a refused product whose answer was right is traced to a damaged hint (`LwePad.wrong_effects`).

Scale. e and the rounding of a hint take room in the range of int32 that is known in advance (`Headroom`), so that no
product leaves it. Nothing of c or e outlives its row. Parameters are fixed: only those above are offered.

Where an address of memory depends on c, an attacker on the tenant's machine might learn it. That machine is trusted.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis_priv.arithmetic import lattice
from symbiosis_priv.arithmetic.keystream import Keystream, StreamKey, derive
from symbiosis_priv.arithmetic.lattice import NOISE_WORDS, WORDS
from symbiosis_priv.arithmetic.modular import PRIME, Column, dot
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction, Headroom
from symbiosis_priv.checkpoints.weights import Progress, WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.limits import DEFAULT_RING_BITS, HintBits, RingBits
from tenant.core.pads import EffectSource, Pad, PadOrder, Share, row_range
from tenant.core.verifier import Place
from tenant.masking.scheme import Materials, SessionScheme
from tenant.preparation.hints import Hints, headroom, make_hints
from tenant.preparation.prepared import Preparation
from tenant.worker import Worker

_PIECE = 1 << 20  # bytes of keystream that are expanded at a time for errors


class Lwe(SessionScheme):
    """Hides rows from every provider, if LWE is hard. Exact for the row x + e, verified. Experimental."""

    name = "lwe"
    summary = "no party, if sparse-secret LWE is hard; one provider is enough (experimental)"
    roles = frozenset({"executor"})
    hides_from = frozenset({"executor", "helper", "all but a helper", "executor+helper"})
    assumption = "sparse-secret LWE (experimental)"
    error = "exact for x + e"
    stacks = False
    keeps_hints = True

    def check(self, federation: Federation, *, ring_bits: RingBits = DEFAULT_RING_BITS) -> None:
        super().check(federation, ring_bits=ring_bits)
        if ring_bits != DEFAULT_RING_BITS:
            raise ConfigError(
                f"masking = 'lwe' needs ring_bits = {DEFAULT_RING_BITS}, not {ring_bits}: its error would be too large "
                f"in a narrow ring. Leave ring_bits out, or choose masking = 'pad' or 'local'"
            )

    def prepare(
        self,
        preparation: Preparation,
        store: WeightStore,
        *,
        bits: HintBits,
        training: bool,
        progress: Progress | None = None,
    ) -> int:
        directions: tuple[Direction, ...] = DIRECTIONS if training else (FORWARD,)
        return make_hints(preparation, store, bits=bits, directions=directions, progress=progress)

    def headroom(self, preparation: Preparation) -> Headroom:
        return headroom(Hints.find(preparation).bits)

    def effects(self, materials: Materials) -> EffectSource:
        return LweSource(materials)


class LweSource(EffectSource):
    """Makes masks, and their effects from the hints, on a thread of its own."""

    keeps_masks = True

    def __init__(self, materials: Materials) -> None:
        super().__init__(materials.facts, materials.secret)
        self._keys, self._hints = materials.preparation.keys, Hints.find(materials.preparation)
        self._seed = materials.secret.seed_for("lwe")
        self._streams: dict[Place, tuple[Keystream, Keystream]] = {}
        self.workers = [Worker("lwe")]

    def draw(self, order: PadOrder) -> Pad:
        entry, place = self._facts[order.index].entry, (order.index, order.direction)
        if order.counts is not None or entry.experts > 1:
            raise ConfigError(f"masking = 'lwe' does not mask rows for stacks of experts ({entry.name}); choose 'pad'")
        if place not in self._streams:
            width, name = entry.columns(order.direction).rows, entry.name

            def stream(purpose: str, words: int) -> Keystream:
                return Keystream(StreamKey(derive(self._seed, purpose, name, order.direction)), width=words)

            self._streams[place] = stream("lwe secret", WORDS), stream("lwe error", NOISE_WORDS * width)
        self._hints.reserve(order.rows)
        first, (_, v) = self._burn(order), self._keys[place]
        rows = LweRows(place, first, order.rows, self._hints, self._streams[place], v)
        return LwePad(order.rows, (Share(None, rows, first, self.workers[0].submit(rows.effect)),))


class _Made(NamedTuple):
    """What belongs to some rows: c until the effect is computed, the masks `c P + e`, and `LwePad.correction`."""

    secrets: Tensor
    masks: Tensor
    corrections: Tensor


class LweRows:
    """Masks `c P + e` of consecutive rows, made once by the first thread that needs them, and their effect. `first`:
    number of the first row in the keystreams of c and of e, `streams`. `v`: V of the matrix."""

    def __init__(
        self, place: Place, first: int, rows: int, hints: Hints, streams: tuple[Keystream, Keystream], v: Column
    ) -> None:
        self._place, self._first, self._rows = place, first, rows
        self._hints, self._streams, self._v = hints, streams, v
        self._lock = threading.Lock()
        self._made: _Made | None = None

    def add_to(self, matrix: Tensor, *, first_row: int) -> None:
        matrix += self._masks_of(first_row, len(matrix))

    def expand(self, first_row: int, rows: int) -> Tensor:
        return self._masks_of(first_row, rows).clone()

    def make_ahead(self, first_row: int, rows: int) -> None:
        """Nothing to do: masks are made when they are drawn."""

    def correction(self, first_row: int, rows: int) -> Tensor:
        """Return `e V - sum_k c_k D_k` modulo p of some rows, int64 `[rows]`."""
        return row_range(self._make().corrections, first_row - self._first, rows)

    def effect(self) -> Tensor:
        """Compute the product of all c with the hint, int32 `[r, o]`. Afterwards c is forgotten."""
        panels, _ = self._hints.hint(*self._place)
        effect = torch.zeros((self._rows, panels.width), dtype=torch.int32, device="cpu")
        made = self._make()
        panels.add_product(made.secrets, effect)
        self._made = made._replace(secrets=made.secrets[:0])
        return effect

    def has_intact_hint(self) -> bool:
        return self._hints.is_intact(*self._place)

    def _masks_of(self, first_row: int, rows: int) -> Tensor:
        return row_range(self._make().masks, first_row - self._first, rows)

    def _make(self) -> _Made:
        with self._lock:
            if self._made is None:
                of_secrets, of_noise = self._streams
                _, added = self._hints.hint(*self._place)
                secrets = lattice.secrets(of_secrets.expand(self._first, self._rows))
                masks = torch.empty((self._rows, len(self._v)), dtype=torch.int32, device="cpu")
                step = max(1, _PIECE // (4 * NOISE_WORDS * len(self._v)))
                for start in range(0, self._rows, step):
                    piece = masks[start : start + step]
                    piece.copy_(lattice.noise(of_noise.expand(self._first + start, len(piece))))
                corrections = (dot(masks, self._v) - lattice.weigh(secrets, added)).remainder_(PRIME)
                self._hints.matrix(len(self._v)).add_product(secrets, masks)
                self._made = _Made(secrets, masks, corrections)
            return self._made


class LwePad(Pad):
    """A pad whose effects are those of `c P` alone, to the precision of the hint."""

    @property
    def _source(self) -> LweRows:
        source = self.shares[0].keystream
        assert isinstance(source, LweRows)
        return source

    def correction(self) -> Tensor:
        return self._source.correction(self.shares[0].first_row, self.rows)

    def wrong_effects(self, is_product: Callable[[Tensor, Tensor], bool]) -> list[Peer | None]:
        """An effect is no product of the mask. It is wrong if the hint is, which is a fault of this machine."""
        return [] if self._source.has_intact_hint() else [None]
