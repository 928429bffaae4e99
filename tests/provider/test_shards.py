"""A group of ranks gives the products of one process, however it shards; who is lost is named, and the group returns.

Every group here is real: processes that torchrun starts, gloo between them, FSDP2 underneath.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from symbiosis_priv.weights import WeightStore

SCRIPT = Path(__file__).with_name("sharded_products.py")


def run_group(ranks: int, *arguments: str) -> str:
    """What rank 0 of a group prints; every rank runs `SCRIPT`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*torchrun, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(("ranks", "weight_bits", "kernel"), [(2, 10, "auto"), (4, 8, "int32")])
def test_sharded_products_are_those_of_one_process(
    gpt2_store: WeightStore, tmp_path: Path, ranks: int, weight_bits: int, kernel: str
) -> None:
    printed = run_group(ranks, str(gpt2_store.path), str(tmp_path), str(weight_bits), kernel)
    assert printed.splitlines() == [f"equal: {way} on {ranks} ranks" for way in ("columns", "gathered", "auto")]
