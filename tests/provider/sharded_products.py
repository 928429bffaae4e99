"""Run by `test_shards.py` on every rank of a group: rank 0 compares sharded products with those of one process."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from provider.operands import LocalOperands
from provider.shards import ShardedOperands
from symbiosis_priv.kernels import probe_rows
from symbiosis_priv.ring import DIRECTIONS
from symbiosis_priv.weights import WeightStore

ROWS = (0, 1, 2, 3, 7, 65, 300)


def main(checkpoint: str, cache: str, weight_bits: str, kernel: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    store = WeightStore(Path(checkpoint), weight_bits=int(weight_bits), cache=Path(cache), kernel=kernel)
    for sharding in ("columns", "gathered", "auto"):
        operands = ShardedOperands(store, sharding=sharding)
        if not operands.leads:
            operands.follow()
            continue
        local = LocalOperands(store)
        for _ in operands.warm_up():
            pass
        for group, entry in enumerate(store.manifest().groups):
            for direction in DIRECTIONS:
                for count in ROWS:
                    rows = probe_rows(max(2, count), entry.columns(direction)[0])[:count]
                    want = local.product(rows, group=group, direction=direction)
                    got = operands.product(rows, group=group, direction=direction)
                    assert torch.equal(got, want), (sharding, entry.name, direction, count)
                    assert got.is_contiguous()
        operands.close()
        print(f"equal: {sharding} on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
