"""The served base model: the products that tenants may ask for.

Ring products use weights of this process (`LocalOperands`) or of a group of ranks (`shards`). On a GPU, rows are copied
in chunks, through page-locked memory: while one chunk is multiplied, the next one is copied to the GPU and the previous
result is copied back, each on its own stream. A single chunk uses one stream. A repeated product of a few rows is one
CUDA graph (`graphs`). Payloads are received into ordinary memory: the copy to page-locked memory overlaps, and tenants
that send slowly would hold page-locked memory. A helper's rows and products take four bytes per entry in a ring of 24
bits, too: its AES and TLS take longer than these copies. On a CPU, the same code runs in order and with ordinary
memory, for the tests.

The float path has unquantised weights in float32, with or without the bias. Only `masking = "paper-pool"` needs it, and
it is off unless the operator enables it.
"""

import ctypes
import functools
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from provider.config.memory_plan import CHUNK, LOCKED_ENTRIES, LOCKED_SLICES, SLOTS, slot_entries, widest
from provider.config.schema import MIB, ExecutorConfig, ProviderConfig
from provider.products.graphs import Graph
from symbiosis_priv.arithmetic.keystream import Keystream, mask_key, ordinary_memory
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts, clip
from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.manifest import GroupEntry, Manifest
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError, DeviceLostError
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.kernels.kernel import PayloadProduct
from symbiosis_priv.limits import DEFAULT_RING_BITS, RingBits
from symbiosis_priv.network.wire import Arithmetic, Effect, Execute

_FEW_ROWS = 16  # most rows of a graph
_MOST_GRAPHS = 2048  # of some 50 KiB on the device (`memory_plan`)


class Operands(ABC):
    """The quantised weights of every served layer group. Computes one product at a time."""

    any_thread = False
    """True if several threads may compute products, one at a time; False if only one thread may."""
    joins = False
    """True if `product` also takes what only `Transfers.product` does: `more` rows, and numbers of 24 bits."""

    @property
    @abstractmethod
    def loaded(self) -> Collection[int]:
        """The layer groups that are in memory."""

    @abstractmethod
    def product(
        self,
        rows: Tensor,
        *,
        index: int,
        direction: Direction,
        counts: Counts | None = None,
        ring_bits: RingBits = DEFAULT_RING_BITS,
        more: Sequence[Tensor] = (),
    ) -> Tensor:
        """`rows @ W.T` forward, `rows @ W` backward, mod 2^ring_bits: the bits above are arbitrary.

        Rows are int32 `[r, inputs]`, the result is int32 `[r, outputs]`, contiguous, both on the CPU. With `counts`,
        each row is multiplied by its own expert's matrix (`RingMatrix.product`).
        """

    def few(self, request: Execute) -> PayloadProduct | None:
        """The product of a request as one compiled call, for any thread; None if there is none (`Kernel.few`)."""
        return None

    def memory(self, entries: int) -> NDArray[np.int32]:
        """Memory for rows that go to the device without another copy. For any thread."""
        return ordinary_memory(entries)

    @abstractmethod
    def warm_up(self) -> Iterator[None]:
        """Prepare the first requests, one small step per `next`, so that they do not wait."""

    @abstractmethod
    def close(self) -> None:
        """Release the weights. The operands cannot be used again."""


class LocalOperands(Operands):
    """Weights of this process. A layer group is loaded at its first product."""

    any_thread = True

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._matrices: dict[int, RingMatrix] = {}
        device = torch.device(store.device)
        self._transfers = None
        if device.type != "cpu":
            self._transfers = Transfers(
                device, widest=widest([store.manifest().groups[index] for index in store.served])
            )
            self._matrix(store.served[0])  # compiles the kernel's programs before the executor says that it is ready
        self._few: dict[tuple[int, Direction, int, RingBits], PayloadProduct | None] = {}  # on a GPU
        self.joins = self._transfers is not None

    @property
    def loaded(self) -> Collection[int]:
        return self._matrices.keys()

    def product(
        self,
        rows: Tensor,
        *,
        index: int,
        direction: Direction,
        counts: Counts | None = None,
        ring_bits: RingBits = DEFAULT_RING_BITS,
        more: Sequence[Tensor] = (),
    ) -> Tensor:
        matrix = self._matrix(index)
        if self._transfers:
            return self._transfers.product(matrix, rows, direction, counts=counts, ring_bits=ring_bits, more=more)
        return matrix.product(rows, direction, counts=counts, ring_bits=ring_bits)

    def few(self, request: Execute) -> PayloadProduct | None:
        matrix, shape = self._matrix(request.group), (request.direction, request.rows, request.ring_bits)
        if self._transfers is None:
            return matrix.few(*shape)
        if (key := (request.group, *shape)) not in self._few and len(self._few) < _MOST_GRAPHS:
            self._few[key] = self._transfers.few(matrix, *shape)
        return self._few.get(key)

    def memory(self, entries: int) -> NDArray[np.int32]:
        return self._transfers.memory(entries) if self._transfers else super().memory(entries)

    def warm_up(self) -> Iterator[None]:
        for index in self._store.served:
            self._matrix(index)
            yield

    def close(self) -> None:
        self._few.clear()
        self._matrices.clear()

    def _matrix(self, index: int) -> RingMatrix:
        matrix = self._matrices.get(index)
        if matrix is None:
            matrix = self._matrices[index] = self._store.matrix(index)
        return matrix


class _Slot:
    """Memory for one chunk of rows and their product: page-locked on the host, and on the device."""

    def __init__(self, entries: int, device: torch.device, event: Any) -> None:
        pinned = device.type == "cuda"
        self.host_rows, self.host_product = (
            torch.empty(entries, dtype=torch.int32, device="cpu", pin_memory=pinned) for _ in range(2)
        )
        self.rows, self.product = (torch.empty(entries, dtype=torch.int32, device=device) for _ in range(2))
        self.done = event
        """Recorded when the product is in `host_product`."""


class Transfers:
    """Computes products on one device, in chunks of rows, in one thread at a time. All memory is taken at once and used
    by turns (`SLOTS`): what products need does not grow with their rows.

    Args:
        widest: most columns of rows and products.
        chunk: most rows of one copy.
    """

    def __init__(self, device: torch.device, *, widest: int, chunk: int = CHUNK) -> None:
        self._device = device
        self._chunk, self._entries = chunk, slot_entries(widest, chunk=chunk)
        self._module: Any = torch.get_device_module(device)
        use(device)
        stream = torch.cuda.Stream if device.type == "cuda" else self._module.Stream
        self._up, self._down = stream(device), stream(device)
        self._slots = [_Slot(self._entries, device, self._module.Event()) for _ in range(SLOTS)]
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._locked = list[Tensor | None]([None] * LOCKED_SLICES)  # those not in use; None: not made yet

    def product(
        self,
        matrix: RingMatrix,
        rows: Tensor,
        direction: Direction,
        *,
        counts: Counts | None = None,
        ring_bits: RingBits = DEFAULT_RING_BITS,
        more: Sequence[Tensor] = (),
    ) -> Tensor:
        """`RingMatrix.product` from host memory to host memory: int32 `[r, width]` to `[r, columns]`, contiguous. The
        rows go on in `more`. Numbers of 24 bits may be as on the wire: uint8 `[r, 3 width]` to `[r, 3 columns]`."""
        use(self._device)
        parts = [rows, *more]
        widths, dtype = matrix.columns(direction, by_expert=counts is not None), parts[0].dtype
        columns = widths.result * parts[0].shape[1] // widths.rows
        result = torch.empty((sum(map(len, parts)), columns), dtype=dtype, device="cpu")
        chunk = min(self._chunk, self._entries // max(widths))
        compute = self._module.current_stream(self._device)
        up, down = (compute, compute) if len(result) <= chunk else (self._up, self._down)
        waiting: deque[tuple[_Slot, Tensor]] = deque()  # slots in use, and the parts of the result that they will have
        try:
            for place, (some, target) in enumerate(zip(_chunks(parts, chunk), result.split(chunk), strict=True)):
                if len(waiting) == len(self._slots):
                    self._finish(*waiting.popleft())
                slot, count = self._slots[place % len(self._slots)], len(target)
                host_rows, host = _part(slot.host_rows, count, some[0]), _part(slot.host_product, count, target)
                near_rows = slot.rows[: count * widths.rows].view(count, widths.rows)
                near = slot.product[: count * widths.result].view(count, widths.result)
                # the CPU copies while the device works on earlier parts
                source = some[0] if len(some) == 1 and some[0].is_pinned() else torch.cat(some, out=host_rows)
                with self._module.stream(up):
                    if dtype == torch.uint8:
                        packed = torch.empty_like(source, device=self._device).copy_(source, non_blocking=True)
                        _low_bytes(near_rows).copy_(packed.view(-1, 3), non_blocking=True)
                    else:
                        near_rows.copy_(source, non_blocking=True)
                compute.wait_stream(up)
                part_counts = None if counts is None else clip(counts, place * chunk, count)
                matrix.product(near_rows, direction, counts=part_counts, ring_bits=ring_bits, out=near)
                down.wait_stream(compute)
                with self._module.stream(down):
                    if dtype == torch.uint8:
                        packed = torch.empty_like(target, device=self._device)
                        packed.view(-1, 3).copy_(_low_bytes(near), non_blocking=True)
                        host.copy_(packed, non_blocking=True)
                    else:
                        host.copy_(near, non_blocking=True)
                    slot.done.record()
                waiting.append((slot, target))
            while waiting:
                self._finish(*waiting.popleft())
        except BaseException:
            self._module.synchronize(self._device)  # what is in flight would overwrite the next product
            raise
        return result

    def few(
        self, matrix: RingMatrix, direction: Direction, count: int, ring_bits: RingBits
    ) -> "functools.partial[None] | None":
        """The product of `count` rows from payload to payload; None if these are too many. It is called by one thread
        at a time, and not while `product` is. With a ring of 24 bits, three bytes of an entry are copied to the device
        and back."""
        slot, spare = self._slots[:2]
        width, columns = matrix.columns(direction)
        if count > _FEW_ROWS or count * max(width, columns) > self._entries:
            return None
        size, inputs, outputs = ring_bits // 8, count * width, count * columns
        rows, product = slot.rows[:inputs].view(count, width), slot.product[:outputs].view(count, columns)
        sent = slot.host_rows.view(torch.uint8)[: size * inputs]
        returned = slot.host_product.view(torch.uint8)[: size * outputs]
        entries, result = (part.view(-1).view(torch.uint8) for part in (rows, product))
        narrow = size < 4
        # the same bytes on the device; 24 bits are not where the entries are
        near = spare.rows.view(torch.uint8)[: len(sent)] if narrow else entries
        near_returned = spare.product.view(torch.uint8)[: len(returned)] if narrow else result

        def start() -> None:
            near.copy_(sent, non_blocking=True)
            if narrow:
                _low_bytes(rows).copy_(near.view(-1, size), non_blocking=True)
            matrix.product(rows, direction, ring_bits=ring_bits, out=product)
            if narrow:
                near_returned.view(-1, size).copy_(_low_bytes(product), non_blocking=True)
            returned.copy_(near_returned, non_blocking=True)

        graph = Graph(start, self._device, stream=self._up, pool=self._pool)
        return functools.partial(self._repeat, graph, slot, sent, returned)

    def _repeat(self, graph: Graph, slot: _Slot, sent: Tensor, returned: Tensor, payload: int, answer: int) -> None:
        use(self._device)
        ctypes.memmove(sent.data_ptr(), payload, len(sent))
        try:
            graph()
            slot.done.record()
            slot.done.synchronize()
        except BaseException:
            self._module.synchronize(self._device)  # what is in flight would overwrite the next product
            raise
        ctypes.memmove(answer, returned.data_ptr(), len(returned))

    def memory(self, entries: int) -> NDArray[np.int32]:
        """Page-locked memory for rows, which `product` does not copy on the CPU; ordinary memory for long rows, and
        while `LOCKED_SLICES` of it are in use. For any thread."""
        if entries > LOCKED_ENTRIES:
            return ordinary_memory(entries)
        try:
            memory = self._locked.pop()
        except IndexError:
            return ordinary_memory(entries)
        if memory is None:
            use(self._device)
            pinned = self._device.type == "cuda"
            memory = torch.empty(LOCKED_ENTRIES, dtype=torch.int32, device="cpu", pin_memory=pinned)
        array: NDArray[np.int32] = memory[:entries].numpy()
        weakref.finalize(array, self._locked.append, memory)  # views of it keep it
        return array

    def _finish(self, slot: _Slot, target: Tensor) -> None:
        slot.done.synchronize()
        target.copy_(_part(slot.host_product, len(target), target))


def _part(memory: Tensor, count: int, like: Tensor) -> Tensor:
    """`count` rows with the width and dtype of `like` at the beginning of a slot's memory."""
    return memory.view(like.dtype)[: count * like.shape[1]].view(count, like.shape[1])


def _low_bytes(entries: Tensor) -> Tensor:
    """The three bytes of each of contiguous integers that a ring of 24 bits has."""
    return entries.view(-1).view(torch.uint8).view(-1, 4)[:, :3]


def _chunks(parts: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Divide matrices that follow each other, none of them empty, into chunks of `size` rows, or fewer in the last."""
    chunk, room = list[Tensor](), size
    for part in parts:
        for piece in part.tensor_split(list(range(room, len(part), size))):
            chunk.append(piece)
            room -= len(piece)
            if not room:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


class FloatGroups:
    """The served groups: weight float32 `[o, d]`, and bias float32 `[o]` or None; members are stacked as in the ring.
    Each is loaded at its first product, and kept. Not thread-safe. Raises `ConfigError`: they need more than `memory`
    bytes."""

    def __init__(self, store: WeightStore, *, device: torch.device, memory: int) -> None:
        self._store, self._device = store, device
        self.loaded: dict[int, tuple[Tensor, Tensor | None]] = {}
        entries = [store.manifest().groups[index] for index in store.served]
        needed = sum(4 * entry.stacked_outputs * (entry.inputs + 1) for entry in entries)  # with room for biases
        if needed > memory:
            raise ConfigError(
                f"float_memory_mib = {memory // MIB} does not hold the served layer groups in float32: "
                f"set it to {-(-needed // MIB)} or more, or leave it out"
            )

    def group(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Return one group."""
        if index not in self.loaded:
            self.loaded[index] = self._load(index, self._store.manifest().groups[index])
        return self.loaded[index]

    def _load(self, index: int, entry: GroupEntry) -> tuple[Tensor, Tensor | None]:
        layers, outputs = self._store.layers(index), list(entry.outputs)
        weight = torch.empty((sum(outputs), entry.inputs), dtype=torch.float32, device="cpu")
        bias = torch.zeros(sum(outputs), dtype=torch.float32, device="cpu")
        for layer, part, its_bias in zip(layers, weight.split(outputs), bias.split(outputs), strict=True):
            for rows, columns, matrix in layer.blocks():
                part[rows, columns] = matrix
            if layer.bias is not None:
                its_bias.copy_(layer.bias)
        biased = any(layer.bias is not None for layer in layers)
        return weight.to(self._device), bias.to(self._device) if biased else None


def device_of(settings: ExecutorConfig) -> str:
    """The device of this process, with its index: threads differ in what "cuda" alone means. Raises `ConfigError`:
    torch cannot use the device; GPUs are not tried, which would make a context."""
    if settings.device != "cuda":
        return settings.device if settings.device.startswith("cuda:") else str(_require_usable(settings.device))
    return f"cuda:{dist.get_rank() if dist.is_initialized() else 0}"


def use(device: torch.device) -> None:
    """Make a device the current one of this thread. Every thread begins with the first device, where Triton would
    launch, and page-locked memory would make a context."""
    torch.get_device_module(device).set_device(device)


def open_store(config: ProviderConfig) -> WeightStore:
    """Open the weight store of a configuration."""
    model, executor = config.model, config.executor
    return WeightStore(
        resolve(model.checkpoint),
        weight_bits=model.weight_bits,
        cache=model.cache,
        device=device_of(executor),
        layers=model.layer_range,
        scope=model.scope,
    )


def _require_usable(device: str | torch.device) -> torch.device:
    """Return the device. Raises ConfigError if a value cannot be copied to it and back."""
    try:
        usable = torch.device(device)
        torch.zeros(1, dtype=torch.float32, device=usable).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device = '{device}' cannot be used here ({reason}); use cpu, or cuda with a GPU") from error
    return usable


class ServedModel:
    """Computes products of every served layer group, one at a time, for the executor. Without `operands`, ring products
    use the store's weights in this process; without `float_memory`, in bytes, there is no float path. Raises
    `ConfigError`: this machine or this torch does not support the device."""

    def __init__(
        self, store: WeightStore, *, operands: Operands | None = None, float_memory: int | None = None
    ) -> None:
        self._store = store
        self._device = _require_usable(store.device)
        self.operands = operands or LocalOperands(store)
        self._floats = None if float_memory is None else FloatGroups(store, device=self._device, memory=float_memory)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the whole model."""
        return self._store.manifest()

    @property
    def served(self) -> range:
        return self._store.served

    @property
    def groups_loaded(self) -> int:
        return len({*self.operands.loaded, *(self._floats.loaded if self._floats else ())})

    def product(
        self,
        rows: Tensor,
        *,
        index: int,
        direction: Direction,
        arithmetic: Arithmetic,
        counts: Counts | None = None,
        ring_bits: RingBits = DEFAULT_RING_BITS,
        more: Sequence[Tensor] = (),
    ) -> Tensor:
        """`rows @ W.T` forward, `rows @ W` backward: `[r, inputs]` to `[r, outputs]`, contiguous, on the CPU; int32 for
        the ring, float32 otherwise. `float` adds the bias forward; other products add none. With `counts` and
        `ring_bits` (ring only), see `Operands.product`. Raises `ConfigError`: a float product without a float path.
        (The gateway refuses such requests.)"""
        if arithmetic == "ring":
            return self.operands.product(
                rows, index=index, direction=direction, counts=counts, ring_bits=ring_bits, more=more
            )
        if self._floats is None:
            raise ConfigError("float products are not served here: set float_memory_mib under [executor]")
        weight, bias = self._floats.group(index)
        rows = rows.to(self._device)
        product = (
            linear(rows, weight, bias if arithmetic == "float" else None) if direction == FORWARD else rows @ weight
        )
        return product.cpu()

    def few(self, request: Execute) -> PayloadProduct | None:
        """See `Operands.few`; None unless a request is for one matrix and the ring."""
        return None if request.counts is not None or request.arithmetic != "ring" else self.operands.few(request)

    def require_device(self) -> None:
        """Compute a small product, to test the device.

        Raises:
            DeviceLostError: the device fails.
        """
        try:
            _require_usable(self._device)
        except ConfigError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                return
            raise DeviceLostError(f"device {self._device} has failed for good: {error}") from error

    def mask_rows(self, request: Effect) -> Tensor:
        """The keystream rows of an effect request, int32 `[rows, inputs]`. Their product is the effect."""
        entry = self.manifest.entry(request.group, by_expert=request.counts is not None)
        key = mask_key(request.seed, group_name=entry.name, direction=request.direction)
        inputs, _ = entry.columns(request.direction)
        keystream = Keystream(key, width=inputs)
        return torch.from_numpy(keystream.expanded(request.first_row, request.rows, self.operands.memory))
