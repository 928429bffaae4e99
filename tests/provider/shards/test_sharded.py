"""A group of ranks computes the products of one process, with each sharding; a lost rank is named, and the group
restarts.

Every group here is real: processes with gloo and FSDP2.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from provider.config.schema import ExecutorConfig, ProviderConfig
from provider.executor import supervisor
from provider.executor.supervisor import ExecutorProcess
from provider.logs import JsonLines
from provider.serve import Provider
from provider.shards.sharded import ShardedOperands, join
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels import KERNELS
from tests import warm
from tests.builds import only
from tests.experts import write
from tests.provider.clients import execute
from tests.provider.processes import has_ended, listening_addresses
from tests.waiting import until

SCRIPT = Path(__file__).with_name("sharded_products.py")
WIDTH = 64  # layer groups of the tiny Llama
needs_interpreter = pytest.mark.skipif(
    not KERNELS["triton-int8"].supports(torch.device("cpu")), reason="needs Triton's interpreter"
)
Configure = Callable[..., ProviderConfig]
Connect = Callable[..., Any]


def run_group(ranks: int, folder: Path, *arguments: object) -> list[str]:
    """Return the lines that rank 0 of a group prints. Every rank runs `SCRIPT`; the ranks meet in an empty folder."""

    def run_rank(rank: int) -> list[str]:
        words = [sys.executable, str(SCRIPT), *map(str, (rank, ranks, folder, *arguments))]
        done = warm.run(words, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.splitlines()

    folder.mkdir()
    with ThreadPoolExecutor(ranks) as group:
        return next(iter(group.map(run_rank, range(ranks))))


@pytest.mark.parametrize(
    ("ranks", "weight_bits", "kernel", "layers"),
    [(2, 10, "auto", ""), (4, 8, "plain", "1"), pytest.param(2, 10, "triton-int8", "1", marks=needs_interpreter)],
    ids=str,
)
def test_sharded_products_are_those_of_one_process(
    save_gpt2: Callable[..., Path],
    save_llama: Callable[..., Path],
    tmp_path: Path,
    ranks: int,
    weight_bits: int,
    kernel: str,
    layers: str,
) -> None:
    """Products of a whole model, which the ranks themselves quantise, and of the second of two layers, for which only
    that layer is packed.

    The group with a whole model also loads a model that is larger than the memory of each rank (RLIMIT_DATA): 140 MiB
    packed.
    """
    path = save_gpt2(vocab_size=61, n_positions=32, n_embd=48, n_layer=2 if layers else 1)
    # three experts: with two or four ranks, one expert's matrix lies on several ranks; odd heights are for GPUs
    inner = 33 if kernel.startswith("triton") else 96
    experts = write("Mixtral", tmp_path / "experts", num_local_experts=3, intermediate_size=inner, num_hidden_layers=1)
    wanted = [f"equal: {way} on {ranks} ranks" for way in ("COLUMNS", "GATHERED", None)] * 2
    if kernel.startswith("triton"):  # the experts only, and no measurement
        wanted = wanted[:2]
    large: tuple[object, ...] = ()
    if not layers:
        checkpoint = save_llama(hidden_size=1024, intermediate_size=4096, num_hidden_layers=7, num_key_value_heads=4)
        store = WeightStore(checkpoint, cache=tmp_path / "large")
        whole = sum(store.matrix(group).nbytes for group in range(len(store.manifest().groups)))
        large = checkpoint, tmp_path / "large", whole
        wanted.append("loaded")
    else:
        for model, folder, served in ((path, "small", LayerRange.parse(layers)), (experts, "small/experts", None)):
            cache = tmp_path / folder
            with only(kernel):
                WeightStore(model, cache=cache, layers=served, weight_bits=weight_bits).manifest()
    assert (
        run_group(ranks, tmp_path / "ranks", path, experts, tmp_path / "small", weight_bits, kernel, layers, *large)
        == wanted
    )
    assert len(list(tmp_path.glob("small/weights/*-*.safetensors"))) == 4


def test_a_hanging_rank_is_named_and_the_group_starts_again(
    configure: Configure, connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hanging rank is found long before the group's timeout.

    Tenants are told immediately that the provider is busy, and get the same bits later. The ranks end with the gateway.
    `tests/end_to_end/test_ranks.py` kills a rank.
    """
    monkeypatch.setattr(supervisor, "_FIRST_BACKOFF_S", 2.0)  # tenants are refused for that long
    caplog.set_level("INFO")
    settings = ExecutorConfig(ranks=2, threads=1, hang_timeout_s=300)
    with Provider(configure(executor=settings)) as provider:
        group = provider.executor
        assert isinstance(group, ExecutorProcess)
        assert listening_addresses(group.pids) == {"127.0.0.1"}
        client = connect(to=provider)
        rows = torch.arange(4 * WIDTH, dtype=torch.int32).reshape(4, WIDTH)
        before = client.product(execute(0, 4), rows)
        for restarts, rank in enumerate((1, 0), start=1):
            lost = group.pids
            assert len(lost) == 2
            os.kill(lost[rank], signal.SIGSTOP)
            after, refused = client.until_served(execute(0, 4), rows, within=60)
            assert torch.equal(before, after)
            assert refused > 5  # a tenant that knows another provider does not wait for this one to start
            assert provider.status().restarts == restarts
            ends = [JsonLines().format(one) for one in caplog.records if one.getMessage() == "executor_ended"]
            assert f'"rank": {rank}, "status": "no heartbeat"' in ends[-1]
            assert all(map(has_ended, lost))
        left = group.pids
        for process in group._processes:  # as the system does when the gateway is killed
            assert process.stdin is not None
            process.stdin.close()
        until(lambda: all(map(has_ended, left)), within_s=30)


@pytest.mark.parametrize(
    ("beats", "ends", "found"),
    [
        ((400, 400, 1, 0), None, (2, None)),
        ((400, 1, 400), None, (1, None)),
        ((120, 1, 1, 1), None, (1, None)),  # most ranks stop at the same time
        ((9, 9), 1, (1, 7)),
        ((400,), 0, (0, 7)),
    ],
)
def test_the_rank_is_named_that_ends_or_misses_its_heartbeats(
    beats: tuple[int, ...], ends: int | None, found: tuple[int, int | None]
) -> None:
    """A rank that starts has no heartbeat yet."""
    group, pipes = ExecutorProcess.__new__(ExecutorProcess), [os.pipe() for _ in beats]
    for (_, pipe), count in zip(pipes, beats, strict=True):
        os.write(pipe, count * b".")
    with contextlib.ExitStack() as files:
        ranks = [files.enter_context(os.fdopen(read, "rb", 0)) for read, _ in pipes]
        group._processes = [SimpleNamespace(stdout=rank, wait=lambda: 7) for rank in ranks]  # type: ignore[misc]
        for rank, (_, pipe) in enumerate(pipes):
            files.callback(os.close, pipe) if rank != ends else os.close(pipe)
        assert group._wait() == found


def test_ranks_that_may_not_share_memory_are_named(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    join(0, 1, tmp_path, "cpu", timeout=timedelta(seconds=30))
    try:
        with pytest.raises(ConfigError, match="allow memfd_create"):
            ShardedOperands(WeightStore(store.path, cache=tmp_path / "cache"))
    finally:
        dist.destroy_process_group()


def test_the_models_digest_is_broadcast_with_gloo(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is on the CPU, and with GPUs the default group is NCCL's."""
    broadcast, groups = dist.broadcast, []

    def noted(tensor: torch.Tensor, source: int, group: Any = None) -> Any:
        groups.append(group)
        return broadcast(tensor, source, group=group)

    monkeypatch.setattr(dist, "broadcast", noted)
    join(0, 1, tmp_path, "cpu", timeout=timedelta(seconds=30))
    try:
        operands = ShardedOperands(WeightStore(store.path, cache=tmp_path / "cache"))
        assert groups
        assert None not in groups
        operands.close()
    finally:
        dist.destroy_process_group()
