"""Backends compute the products of offloaded layer groups; `RemoteLinear` calls nothing else.

RingBackend       quantise -> exact integer product -> dequantise. The product comes from
                    Simulation            the tenant's own copy of the weights; no network; the reference
                    session.Session       providers, masked and verified
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.modular import Column, dot
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts, pick, segments
from symbiosis_priv.arithmetic.wraps import uncorrectable
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import RangeError
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.limits import DEFAULT_RING_BITS, GroupIndex, RingBits
from tenant.core.parts import FloatRows, Rows, UncheckedProduct
from tenant.core.verifier import V


class Product(NamedTuple):
    """A product of float rows and the weights of a layer group: `rows @ W.T + b` forward, `rows @ W` backward.
    `inputs`, `outputs`: column blocks of the rows and of the product, float matrices `[r, w_k]` on one device, each
    with one dtype; r may be 0. Outputs are overwritten. `counts`: rows of every expert of a stack. Rows are then
    sorted by expert, each is multiplied by its own expert's matrix alone, and providers see the counts."""

    group: int
    direction: Direction
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    counts: Counts | None = None


class Backend(ABC):
    """Multiplies float rows by the weights of a layer group, forward or backward."""

    facts: Sequence[GroupFacts]

    @abstractmethod
    def compute(self, product: Product) -> None:
        """Compute a product. Raises `NonFiniteError`: inf or nan in the inputs, and nothing was sent; `RangeError`: the
        group is not a stack, or the counts are not those of these rows."""

    def multiply(
        self,
        index: int,
        direction: Direction,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        counts: Counts | None = None,
    ) -> None:
        """Compute the product with these fields."""
        self.compute(Product(index, direction, inputs, outputs, counts))

    def forward_few(self, index: int, x: Tensor, dtype: torch.dtype) -> list[Tensor] | None:
        """Return each member's output `[..., o]`, in `dtype`, of a few inputs `[..., d]`; None if no faster way than
        `multiply` is prepared for them."""
        return None

    def multiply_all(self, products: Sequence[Product]) -> None:
        """Compute several products of at least one row; over a network, in one round trip."""
        for product in products:
            self.compute(product)

    def linear(self, index: int, direction: Direction, rows: Tensor) -> Tensor:
        """Multiply one matrix: float `[r, d]` in, float64 `[r, o]` out."""
        y = rows.new_empty((rows.shape[0], self.facts[index].outputs(direction)), dtype=torch.float64)
        self.multiply(index, direction, [rows], [y])
        return y

    @abstractmethod
    def close(self) -> None:
        """Release threads and connections. A closed backend cannot be used again."""

    def __enter__(self) -> Self:
        """`with backend_of(model):` closes the backend at the end of the block, also after an error."""
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class RingProduct(Protocol):
    def multiply_all(self, products: Sequence[tuple[GroupIndex, Direction, Rows]]) -> None:
        """Call `multiply` for all products. Over a network they are under way at the same time."""

    def multiply(self, index: GroupIndex, direction: Direction, rows: Rows) -> None:
        """Encode the rows, multiply them, verify the product, and let `rows` decode it."""

    def close(self) -> None:
        """Close connections and threads, if there are any."""


class RingRows(Rows):
    """Integer rows, for tests and attacks: int32 `[r, d]`, whose true products fit int32. `product`: int32 `[r, o]`,
    checked. In a narrow ring, two entries of a product may wrap around once."""

    def __init__(
        self, rows: Tensor, *, outputs: int, counts: Counts | None = None, ring_bits: RingBits = DEFAULT_RING_BITS
    ) -> None:
        self.count, self.counts, self.ring_bits = len(rows), counts, ring_bits
        self.most_wraps = int(ring_bits < DEFAULT_RING_BITS)
        self._rows = rows
        self.product = torch.empty((self.count, outputs), dtype=torch.int32, device="cpu")

    def encode(self, out: Tensor, *, v: V | None = None, expected: Tensor | None = None) -> None:
        out.copy_(self._rows)
        if v is None or expected is None:
            return
        if isinstance(v, Column):
            expected[:] = dot(out, v)
            return
        assert self.counts is not None
        for expert, rows in segments(self.counts):
            expected[rows] = dot(out[rows], v[expert])

    def decode(self, product: UncheckedProduct) -> list[int]:
        unmasked, wrong = product.unmasked()
        self.product[product.start : product.start + unmasked.shape[0]] = unmasked
        return wrong

    def selected(self, numbers: Sequence[int], *, halved: bool = False) -> Self:
        if halved:
            raise RangeError(f"integer rows of which more than two products leave a ring of {self.ring_bits} bits")
        copied = copy(self)
        copied.count, copied.counts = len(numbers), self.counts and pick(self.counts, numbers)
        copied._rows, copied.product = self._rows[numbers], self.product[numbers]
        return copied

    def put(self, numbers: Sequence[int], source: Self, places: Sequence[int]) -> None:
        self.product[numbers] = source.product[places]


class RingBackend(Backend):
    """Quantises rows, calls a `RingProduct`, and dequantises. The results have the same bits for every scheme."""

    def __init__(self, facts: Sequence[GroupFacts], products: RingProduct) -> None:
        self.facts = facts
        self.products = products
        self._few = getattr(products, "forward_few", None)  # a session's

    def forward_few(self, index: int, x: Tensor, dtype: torch.dtype) -> list[Tensor] | None:
        return None if self._few is None else self._few(index, self.facts[index], x, dtype)

    def compute(self, product: Product) -> None:
        if not product.inputs[0].shape[0]:
            return
        rows = self._rows(*product)
        self.products.multiply(GroupIndex(product.group), product.direction, rows)
        _return(rows, product.outputs)

    def multiply_all(self, products: Sequence[Product]) -> None:
        rows = [self._rows(*product) for product in products]
        self.products.multiply_all([(GroupIndex(p.group), p.direction, r) for p, r in zip(products, rows, strict=True)])
        for product, its_rows in zip(products, rows, strict=True):
            _return(its_rows, product.outputs)

    def _rows(
        self, index: int, way: Direction, inputs: Sequence[Tensor], outputs: Sequence[Tensor], counts: Counts | None
    ) -> FloatRows:
        if not inputs[0].is_cpu:
            inputs, outputs = _on_host(inputs), [_host_like(out) for out in outputs]
        return FloatRows(self.facts[index], way, inputs, outputs, counts)

    def close(self) -> None:
        self.products.close()


def _return(rows: FloatRows, outputs: Sequence[Tensor]) -> None:
    for out, result in zip(outputs, rows.outputs, strict=True):
        if out is not result:
            out.copy_(result, non_blocking=True)  # torch keeps page-locked memory until the copy is done


def _on_host(parts: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU. All copies are started before the first one is waited for."""
    copies = [_host_like(part).copy_(part.detach(), non_blocking=True) for part in parts]
    for device in {part.device for part in parts if part.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _host_like(tensor: Tensor) -> Tensor:
    """Allocate CPU memory of a tensor's shape and dtype; page-locked for CUDA, because other copies are slow."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def multiply_again(rows: Rows, numbers: Sequence[int], multiply: Callable[[Rows], None]) -> None:
    """Multiply rows again at half their scale, because their products wrapped around too often."""
    sent = numbers if rows.counts is None else _like_every_expert(numbers, rows.counts)
    again = rows.selected(sent, halved=True)
    multiply(again)
    rows.put(numbers, again, [sent.index(number) for number in numbers])


def _like_every_expert(numbers: Sequence[int], counts: Counts) -> Sequence[int]:
    """Add rows of the other experts until each has the same number of rows, or all of its rows: otherwise the counts,
    which providers see, would show the experts that mode "flat" hides."""
    chosen = set(numbers)
    spans = [range(rows.start, rows.stop) for _, rows in segments(counts)]
    most = max(len(chosen.intersection(span)) for span in spans)
    for span in spans:
        others = [row for row in span if row not in chosen]
        chosen.update(others[: most - len(span) + len(others)])
    return sorted(chosen)


class Simulation:
    """A `RingProduct` of the tenant's own weights, without network and masks. The reference for all schemes."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._matrices: dict[GroupIndex, RingMatrix] = {}

    def multiply(self, index: GroupIndex, direction: Direction, rows: Rows) -> None:
        entry = self._store.manifest().entry(index, by_expert=rows.counts is not None)
        inputs, _ = entry.columns(direction)
        xq = torch.empty((rows.count, inputs), dtype=torch.int32, device="cpu")
        rows.encode(xq)
        product = self.product(index, direction, xq, counts=rows.counts)
        rows.decode(UncheckedProduct(0, product))
        if rows.most_wraps and (again := uncorrectable(product, ring_bits=rows.ring_bits)):
            multiply_again(rows, again, partial(self.multiply, index, direction))

    def multiply_all(self, products: Sequence[tuple[GroupIndex, Direction, Rows]]) -> None:
        for product in products:
            self.multiply(*product)

    def product(self, index: GroupIndex, direction: Direction, rows: Tensor, *, counts: Counts | None = None) -> Tensor:
        """Compute a product modulo 2^32: int32 `[r, d]` in, int32 `[r, o]` out."""
        if index not in self._matrices:
            self._matrices[index] = self._store.matrix(index)
        return self._matrices[index].product(rows, direction, counts=counts)

    def close(self) -> None:
        self._matrices.clear()
