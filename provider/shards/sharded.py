"""Ring operands of a group of ranks: each rank holds its shard of every layer group (FSDP2).

Theory of operation. Every rank makes the same units on the meta device, one per layer group that is served, and
`fully_shard` cuts the packed weights of each unit along their outputs. A rank then copies its own shard from the mapped
cache, so no rank holds the whole model. Rank 0 serves (`executor`); the other ranks `follow`. For each product, rank 0
broadcasts a plan, and every rank checks the plan's sequence number before it joins a collective: ranks with different
plans would otherwise gather different layer groups. There are two ways to multiply, and both give the same bits:

    gathered   the unit gathers its weights on every rank, and each rank multiplies some of the rows (FSDP)
    columns    every rank multiplies all rows with its own shard. A shard gives columns of the result forward, and a
               summand of the result backward, where sums wrap modulo 2^32

`gathered` transfers weights and is faster for many rows; `columns` for few rows. `warm_up` measures both, and rank 0
chooses. Weights are sent as bytes, because gloo has no int16. `columns` transfers nothing forward: the ranks read rows
from shared memory and write their columns there (`shared`), chunk by chunk. Backward they read their columns there, and
NCCL adds their summands: in host memory, every card would have to write a whole result, and read the others'. Weights
that are gathered, and rows for experts, go from card to card too. Entries take four bytes between the ranks in a ring
of 24 bits as well: only the arithmetic is narrow.

Directions here are those of the packed weights, which may be a transposed stack of experts. A product with rows for
single experts is computed in a third way, `experts`: every rank has all rows, and multiplies them with the rows of
their experts' matrices in its shard. The sum of the ranks' results is the product.

A rank whose collective fails, or takes longer than the group's timeout, ends. When a rank has ended or stopped, the
supervisor kills the others, and starts the group again. The ranks trust each other, and torch.distributed does not
authenticate: all ranks run on one machine, meet in a folder that no other user can enter, and use the loopback.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from provider.config.memory_plan import slot_entries, widest
from provider.products.model import Operands, use
from provider.shards.shared import SharedRows
from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, FORWARD, Direction, Widths, opposite
from symbiosis_priv.arithmetic.segments import Counts, segments
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, ConfigError, RankLostError
from symbiosis_priv.kernels import Choice, Packed, probe_rows
from symbiosis_priv.limits import DEFAULT_RING_BITS, RingBits

_IDLE = timedelta(days=365)  # between two plans
_TIMED_ROWS = (1, 8, 64, 512)
_NEVER = 1 << 62  # rows
_LEAD = 0  # the rank that serves


def join(rank: int, world: int, folder: Path, device: str, *, timeout: timedelta) -> None:
    """Call `init_process_group` for ranks that meet in a folder: with NCCL on GPUs, where "cuda" is the GPU with the
    rank's number. Raises `RuntimeError`: not all ranks joined the group in time."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    own: torch.device | None = None
    if device.startswith("cuda"):
        own = torch.device(f"cuda:{rank}" if device == "cuda" else device)
        torch.cuda.set_device(own)
    store = FileStore(f"{folder}/store", world)
    store.set_timeout(timeout)
    backend = "nccl" if own else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=own)


class Mode(IntEnum):
    """How the ranks divide a product."""

    STOP = 0
    COLUMNS = 1
    GATHERED = 2
    EXPERTS = 3


@dataclass(frozen=True)
class _Plan:
    sequence: int
    mode: Mode
    group: int = 0
    direction: Direction = FORWARD
    rows: int = 0
    ring_bits: RingBits = DEFAULT_RING_BITS

    def encode(self) -> Tensor:
        """Encode the plan as int64 `[6]`."""
        numbers = [self.sequence, self.mode, self.group, DIRECTIONS.index(self.direction), self.rows, self.ring_bits]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    @classmethod
    def decode(cls, plan: Tensor) -> Self:
        sequence, mode, group, direction, rows, ring_bits = plan.tolist()
        return cls(sequence, Mode(mode), group, DIRECTIONS[direction], rows, ring_bits)


class Unit(nn.Module):
    """A module whose one parameter is a layer group's packed weights as bytes, on the meta device until `load`. Keeps
    no reference to the data of `whole`, which may be a mapped file."""

    def __init__(self, whole: Packed, choice: Choice) -> None:
        super().__init__()
        self._granule = choice.few.granule
        nothing = torch.empty(0, dtype=whole.data.dtype, device="cpu")  # a view of the data would keep its file mapped
        self._whole = replace(whole, data=nothing)
        self._choice = choice
        self._dtype = whole.data.dtype
        shape = whole.data.view(torch.int8).shape
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.int8, device="meta"), requires_grad=False)

    def forward(self, rows: Tensor, direction: Direction, out: Tensor, ring_bits: RingBits) -> None:
        """Compute the product with all weights, which FSDP gathers for this call, in `out`."""
        self._product(replace(self._whole, data=self.weight.view(self._dtype)), rows, direction, out, ring_bits)

    def load(self, whole: Tensor, *, rank: int, world: int, device: torch.device) -> None:
        """Copy this rank's shard from the mapped file, without reading other shards. Call this after `fully_shard`."""
        self.to_empty(device=device)
        local = self._local()
        first = _chunk(len(whole), world) * rank
        local.copy_(whole.view(torch.int8)[first : first + len(local)])

    def columns_of(self, rank: int, world: int) -> slice:
        """The outputs in the shard of a rank."""
        each = _chunk(self.weight.shape[0], world) * self._granule
        return slice(min(self._whole.outputs, each * rank), min(self._whole.outputs, each * (rank + 1)))

    def columns(self, direction: Direction, *, experts: int = 1) -> Widths:
        """The widths of a product with all weights, or with one of `experts` matrices."""
        return replace(self._whole, outputs=self._whole.outputs // experts).columns(direction)

    def multiply_experts(
        self, columns: slice, counts: Counts, rows: Tensor, direction: Direction, out: Tensor, ring_bits: RingBits
    ) -> None:
        """Compute this rank's summand of a product of rows that are sorted by expert, in `out`, which holds zeros. An
        expert's matrix is a range of outputs; `columns` are the outputs in the shard, from `columns_of`."""
        height = self._whole.outputs // len(counts)
        shard = replace(self._whole, outputs=columns.stop - columns.start, data=self._local().view(self._dtype))
        for expert, segment in segments(counts):
            first = expert * height
            start, stop = max(columns.start, first), min(columns.stop, first + height)
            if start >= stop:
                continue
            weights = self._choice.few.cut(shard, start - columns.start, stop - columns.start)
            here = slice(start - first, stop - first)
            if direction == FORWARD:
                product = rows.new_empty((segment.stop - segment.start, stop - start))
                self._product(weights, rows[segment], direction, product, ring_bits)
                out[segment, here] = product
            else:
                self._product(weights, rows[segment, here].contiguous(), direction, out[segment], ring_bits)

    def multiply_shard(
        self, columns: slice, rows: Tensor, direction: Direction, out: Tensor, ring_bits: RingBits
    ) -> None:
        """Compute the product with this rank's shard only, in `out`: columns of the result forward; backward, a summand
        of it, from the shard's columns of the rows."""
        outputs = columns.stop - columns.start
        weights = replace(self._whole, outputs=outputs, data=self._local().view(self._dtype))
        if outputs:
            self._product(weights, rows, direction, out, ring_bits)
        else:
            out.zero_()

    def _local(self) -> Tensor:
        assert isinstance(self.weight, DTensor)  # outside `forward`
        return self.weight.to_local()

    def _product(self, weights: Packed, rows: Tensor, direction: Direction, out: Tensor, ring_bits: RingBits) -> None:
        if out.numel():
            self._choice.kernel(len(rows)).product(weights, rows, direction, out, ring_bits=ring_bits)


def _chunk(granules: int, world: int) -> int:
    """Number of granules that `Shard(0)` gives to a rank; the last ranks get fewer or none."""
    return -(-granules // world)


class ShardedOperands(Operands):
    """The ring products of a group of ranks. Every rank makes one; rank 0 computes products, the other ranks `follow`.
    Raises `CheckpointError`: the ranks have different models, or serve different layers; `ConfigError`: the weights
    cannot be packed, or the ranks cannot share memory."""

    def __init__(self, store: WeightStore) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._device = torch.device(store.device)
        self._entries = store.manifest().groups
        self._sequence = 0
        self._crossover: dict[tuple[int, int, Direction], int] = {}
        self._plans = dist.new_group(backend="gloo", timeout=_IDLE)
        what = f"{store.manifest().digest}, layer groups {store.served.start} to {store.served.stop - 1}"
        mine = torch.frombuffer(bytearray(hashlib.sha256(what.encode()).digest()), dtype=torch.uint8)
        theirs = mine.clone()
        dist.broadcast(theirs, _LEAD, group=self._plans)  # NCCL takes no tensor on the CPU
        if not torch.equal(mine, theirs):
            raise CheckpointError(f"rank {self._rank} has {what}; rank 0 differs: give all ranks the same [model]")
        if self._rank == _LEAD:
            for index in store.served:
                store.matrix(index)  # one at a time: packs a missing layer group, checks an existing one
        dist.barrier(self._plans)
        use(self._device)  # FSDP gathers on the current one
        mesh = init_device_mesh(self._device.type, (self._world,))
        self._units: dict[int, Unit] = {}
        for index in store.served:
            whole, choice = store.packed(index)
            unit = self._units[index] = Unit(whole, choice)
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
            unit.load(whole.data, rank=self._rank, world=self._world, device=self._device)
        entries = slot_entries(widest([self._entries[index] for index in store.served]))
        try:
            self._shared = SharedRows.of(entries, self._device, self._plans)
        except OSError as error:
            raise ConfigError(
                f"ranks cannot share memory here ({error}): allow memfd_create and /proc/PID/fd, or write ranks = 1"
            ) from error

    @property
    def loaded(self) -> Collection[int]:
        return self._units.keys()

    def product(
        self,
        rows: Tensor,
        *,
        index: int,
        direction: Direction,
        counts: Counts | None = None,
        ring_bits: RingBits = DEFAULT_RING_BITS,
        more: Sequence[Tensor] = (),
        mode: Mode | None = None,
    ) -> Tensor:
        """See `Operands.product`. `mode`: the way to multiply dense rows; None for the faster one. Raises
        `RankLostError`: a rank did not take part. The group cannot be used any more."""
        use(self._device)
        direction, total = self._packed(index, direction), len(rows)
        _, outputs = self._widths(index, direction, by_expert=counts is not None)
        out = torch.empty((total, outputs), dtype=torch.int32, device="cpu")
        if not total:
            return out
        if counts is not None:
            mode = Mode.EXPERTS
        elif mode is None:
            crossover = self._crossover.get((*self._widths(index, direction), direction), _NEVER)
            mode = Mode.GATHERED if total >= crossover else Mode.COLUMNS
        plan = _Plan(self._sequence + 1, mode, index, direction, total, ring_bits)
        with self._ending_on_error(self._name_of(plan)):
            if mode is Mode.COLUMNS:  # before the other ranks hear of the product
                self._shared.put(rows[: self._shared.chunk(*self._widths(index, direction))])
            self._announce(plan)
            self._compute(plan, rows.contiguous(), out, counts)
        return out

    def warm_up(self) -> Iterator[None]:
        """Measure both ways to multiply for every shape, on rank 0; one product per `next`."""
        for index in self._units:
            for direction in DIRECTIONS:
                packed = self._packed(index, direction)
                shape = (*self._widths(index, packed), packed)
                if shape in self._crossover:
                    continue
                for count in _TIMED_ROWS:
                    rows = probe_rows(count, shape[0])
                    seconds = dict.fromkeys((Mode.COLUMNS, Mode.GATHERED), math.inf)
                    for mode in (*seconds, *seconds):
                        start = time.perf_counter()
                        self.product(rows, index=index, direction=direction, mode=mode)
                        seconds[mode] = min(seconds[mode], time.perf_counter() - start)
                        yield
                    if seconds[Mode.GATHERED] < seconds[Mode.COLUMNS]:
                        self._crossover[shape] = count
                        break
                else:
                    self._crossover[shape] = _NEVER

    def follow(self) -> None:
        """Take part in products until rank 0 closes; for every rank but rank 0. Raises `RankLostError`: a rank did not
        take part, or the plan of rank 0 is not the next plan."""
        use(self._device)
        while True:
            message = _Plan(0, Mode.STOP).encode()
            with self._ending_on_error("the next plan"):
                dist.broadcast(message, _LEAD, group=self._plans)
            plan = _Plan.decode(message)
            self._sequence += 1
            if plan.sequence != self._sequence:
                raise RankLostError(f"rank {self._rank} expected plan {self._sequence} and got {plan.sequence}")
            if plan.mode is Mode.STOP:
                return
            with self._ending_on_error(self._name_of(plan)):
                self._compute(plan, None, None)

    def close(self) -> None:
        """End the other ranks. Only rank 0 calls this."""
        with self._ending_on_error("the last plan"):
            self._announce(_Plan(self._sequence + 1, Mode.STOP))

    # Together

    def _packed(self, index: int, direction: Direction) -> Direction:
        """The direction of the packed weights that a direction of the model's matrix has."""
        return opposite(direction) if self._entries[index].transposed else direction

    def _widths(self, index: int, direction: Direction, *, by_expert: bool = False) -> Widths:
        experts = self._entries[index].experts if by_expert else 1
        return self._units[index].columns(direction, experts=experts)

    def _announce(self, plan: _Plan) -> None:
        self._sequence = plan.sequence
        dist.broadcast(plan.encode(), _LEAD, group=self._plans)

    # Matrices that rank 0 has on the CPU; the other ranks pass None

    def _compute(self, plan: _Plan, rows: Tensor | None, out: Tensor | None, counts: Counts | None = None) -> None:
        """Take part in a product. Rank 0 has the rows, the memory for their products, and the counts."""
        if plan.mode is Mode.EXPERTS:
            self._compute_experts(plan, rows, out, counts)
        elif plan.mode is Mode.GATHERED:
            self._compute_gathered(plan, rows, out)
        else:
            self._compute_columns(plan, rows, out)

    def _compute_experts(self, plan: _Plan, rows: Tensor | None, out: Tensor | None, counts: Counts | None) -> None:
        unit, experts = self._units[plan.group], self._entries[plan.group].experts
        numbers = torch.tensor(counts or [0] * experts, dtype=torch.int64, device="cpu")
        dist.broadcast(numbers, _LEAD, group=self._plans)
        inputs, outputs = self._widths(plan.group, plan.direction, by_expert=True)
        product, columns = self._matrix(plan.rows, outputs).zero_(), unit.columns_of(self._rank, self._world)
        shared = self._matrix(plan.rows, inputs) if rows is None else rows.to(self._device)
        dist.broadcast(shared, _LEAD)
        unit.multiply_experts(
            columns, tuple(numbers.tolist()), shared, plan.direction, product, ring_bits=plan.ring_bits
        )
        self._sum(product, out)

    def _compute_gathered(self, plan: _Plan, rows: Tensor | None, out: Tensor | None) -> None:
        inputs, outputs = self._widths(plan.group, plan.direction)
        each = [len(part) for part in torch.empty(plan.rows, dtype=torch.int8, device="cpu").tensor_split(self._world)]
        if rows is None:
            _exchange(dist.irecv, {_LEAD: (mine := self._matrix(each[self._rank], inputs))})
        else:
            mine, *others = (part.to(self._device) for part in rows.split(each))
            _exchange(dist.isend, dict(enumerate(others, start=1)))
        product = self._matrix(len(mine), outputs)
        self._units[plan.group](mine, plan.direction, product, plan.ring_bits)
        if out is None:
            _exchange(dist.isend, {_LEAD: product})
            return
        own, *parts = out.split(each)
        own.copy_(product)
        arriving = [
            part if self._device.type == "cpu" else torch.empty_like(part, device=self._device) for part in parts
        ]
        _exchange(dist.irecv, dict(enumerate(arriving, start=1)))
        for part, there in zip(parts, arriving, strict=True):
            part.copy_(there)

    def _compute_columns(self, plan: _Plan, rows: Tensor | None, out: Tensor | None) -> None:
        """Rank 0 has put the first chunk of rows into the shared memory."""
        unit, (inputs, outputs) = self._units[plan.group], self._widths(plan.group, plan.direction)
        shared = self._shared
        columns, chunk = unit.columns_of(self._rank, self._world), shared.chunk(inputs, outputs)
        for start in range(0, plan.rows, chunk):
            count = min(chunk, plan.rows - start)
            if start:
                if rows is not None:
                    shared.put(rows[start : start + count])
                dist.barrier()
            part = None if out is None else out[start : start + count]
            if plan.direction == FORWARD:
                product = self._matrix(count, columns.stop - columns.start)
                here = shared.take(count, inputs, slice(0, inputs))
                unit.multiply_shard(columns, here, FORWARD, product, plan.ring_bits)
                shared.write(product, columns, width=outputs)
                dist.barrier()
                if part is not None:
                    part.copy_(shared.result(count, outputs))
            else:
                product, here = self._matrix(count, outputs), shared.take(count, inputs, columns)
                unit.multiply_shard(columns, here, BACKWARD, product, plan.ring_bits)
                self._sum(product, part)

    def _sum(self, product: Tensor, out: Tensor | None) -> None:
        """Write the sum of all ranks' results to rank 0's `out`."""
        dist.reduce(product, _LEAD, op=dist.ReduceOp.SUM)  # int32 sums wrap
        if out is not None:
            out.copy_(product)

    def _matrix(self, rows: int, width: int) -> Tensor:
        return torch.empty((rows, width), dtype=torch.int32, device=self._device)

    # Failure

    @contextmanager
    def _ending_on_error(self, what: str) -> Iterator[None]:
        """End this rank if a step fails, because the ranks may then disagree about the next plan."""
        try:
            yield
        except Exception as error:
            raise RankLostError(f"{what} failed: {error}") from error

    def _name_of(self, plan: _Plan) -> str:
        return f"product {plan.sequence} ({self._entries[plan.group].name}, {plan.direction})"


def _exchange(operation: Callable[..., dist.Work | None], tensors: dict[int, Tensor]) -> None:
    """Send or receive tensors, one for each rank, as one batch: NCCL starts them together. The other side does so, too,
    because NCCL matches batches with batches."""
    if batch := [dist.P2POp(operation, tensor, rank) for rank, tensor in tensors.items() if tensor.numel()]:
        for work in dist.batch_isend_irecv(batch):
            work.wait()
