"""A script that `test_sharded.py` runs on every rank of a group. Rank 0 compares sharded products with one process's.

If there is a large model, every rank then loads its shard of it under a limit on its memory.
"""

import contextlib
import resource
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from provider.products.model import LocalOperands
from provider.shards.sharded import Mode, ShardedOperands, join
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.kernels import KERNELS, choice, probe_rows

ROWS = (0, 1, 2, 3, 7, 65, 300)
ROOM = 60 << 20  # bytes: stacks of threads, rows, a layer group while it is read


def products(store: WeightStore, *, quick: bool) -> None:
    """Every layer group, direction and way to divide, at row counts that leave some ranks without rows. `quick`: for
    Triton's interpreter."""
    operands = ShardedOperands(store)
    if dist.get_rank():
        operands.follow()
        return
    local = LocalOperands(store)
    for _ in () if quick else operands.warm_up():
        pass
    assert set(operands.loaded) == set(store.served)
    for mode in (Mode.COLUMNS, Mode.GATHERED) if quick else (Mode.COLUMNS, Mode.GATHERED, None):
        for group in store.served:
            entry = store.manifest().groups[group]
            for direction in DIRECTIONS:
                for count in (3,) if quick else ROWS:
                    rows = probe_rows(max(2, count), entry.columns(direction)[0])[:count]
                    want = local.product(rows, index=group, direction=direction)
                    got = operands.product(rows, index=group, direction=direction, mode=mode)
                    assert torch.equal(got, want), (mode, entry.name, direction, count)
                    assert got.is_contiguous()
                    if not quick or (group == 0 and direction == FORWARD):
                        narrow = operands.product(rows, index=group, direction=direction, ring_bits=24, mode=mode)
                        assert not ((narrow ^ want) << 8).any()
                        assert not (quick and torch.equal(narrow, want)), "all four limbs are multiplied"
                    if entry.experts > 1:
                        by_expert(local, operands, group, direction, entry, count)
        print(f"equal: {mode and mode.name} on {dist.get_world_size()} ranks")
    operands.close()


def by_expert(
    local: LocalOperands, operands: ShardedOperands, group: int, direction: Direction, entry: GroupEntry, count: int
) -> None:
    """Check products of rows for some experts only, whose matrices lie on one rank or on several."""
    counts = (count, 0, count // 2, 1)[: entry.experts]
    rows = probe_rows(max(2, sum(counts)), entry.by_expert.columns(direction)[0])[: sum(counts)]
    want = local.product(rows, index=group, direction=direction, counts=counts)
    got = operands.product(rows, index=group, direction=direction, counts=counts)
    assert torch.equal(got, want), (entry.name, direction, counts)
    if count == 7:
        narrow = operands.product(rows, index=group, direction=direction, counts=counts, ring_bits=24)
        assert not ((narrow ^ want) << 8).any()


def limited(store: WeightStore, *, whole: int) -> None:
    """Load and multiply where a rank may allocate its shard and some room, but not all weights.

    Call this after `products`, because torch's late imports take as much memory as a small model's shard.
    """
    store.matrix(0)
    status = Path("/proc/self/status").read_text()
    used = 1024 * int(status.partition("VmData:")[2].split()[0])
    room = whole // dist.get_world_size() + ROOM
    assert room < whole
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
    operands = ShardedOperands(store)
    if not dist.get_rank():
        for group, entry in enumerate(store.manifest().groups):
            for direction in DIRECTIONS:
                operands.product(probe_rows(2, entry.columns(direction)[0]), index=group, direction=direction)
        operands.close()
        with contextlib.suppress(RuntimeError):  # the limit is effective
            torch.empty(whole, dtype=torch.int8)
            raise AssertionError
        print("loaded")
    else:
        operands.follow()


def main(
    rank: str,
    ranks: str,
    meeting: str,
    checkpoint: str,
    experts: str,
    cache: str,
    weight_bits: str,
    kernel: str,
    layers: str,
    *large: str,
) -> None:
    """`experts`: a mixture of experts. `large`: a checkpoint, its cache and the bytes of its weights; or nothing."""
    join(int(rank), int(ranks), Path(meeting), "cpu", timeout=timedelta(seconds=60))
    served = LayerRange.parse(layers) if layers else None
    if quick := kernel.startswith("triton"):  # in its interpreter, the self-test takes seconds; other tests run it
        choice.passes_self_test = lambda kernel, device, weight_bits: True  # type: ignore[assignment]
    used = list[object]()
    torch.cpu.set_device = used.append  # type: ignore[assignment]
    if kernel != "auto":  # or, where an expert's matrix cannot be cut, `plain`
        choice.candidates = lambda device: [KERNELS[kernel], KERNELS["plain"]]
    with torch.no_grad():
        bits = int(weight_bits)
        if not quick:
            products(WeightStore(Path(checkpoint), cache=Path(cache), layers=served, weight_bits=bits), quick=quick)
        products(WeightStore(Path(experts), cache=Path(cache) / "experts", weight_bits=bits), quick=quick)
        if large:
            path, large_cache, whole = large
            limited(WeightStore(Path(path), cache=Path(large_cache)), whole=int(whole))
    assert used, "a thread that multiplies has not chosen its device"
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
