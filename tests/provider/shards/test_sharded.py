"""A group of ranks computes the products of one process, with each sharding; a lost rank is named, and the group
restarts.

Every group here is real: processes with gloo and FSDP2. torchrun starts the groups that serve.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
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
from provider.executor.supervisor import ExecutorGroup
from provider.serve import Provider
from provider.shards import rank_group
from provider.shards.sharded import ShardedOperands
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.kernels import KERNELS
from symbiosis_priv.network import wire
from tests import warm
from tests.builds import only
from tests.experts import write
from tests.provider.clients import execute, toml_of
from tests.provider.processes import has_ended, listening_addresses
from tests.waiting import until

SCRIPT = Path(__file__).with_name("sharded_products.py")
TWO_NODES = Path(__file__).parents[3] / "examples/deploy/two-nodes.sh"
WIDTH = 64  # layer groups of the tiny Llama
needs_interpreter = pytest.mark.skipif(
    not KERNELS["triton-int8"].supports(torch.device("cpu")), reason="needs Triton's interpreter"
)
Configure = Callable[..., ProviderConfig]
Connect = Callable[..., Any]
Requests = tuple[Callable[..., wire.Execute], Callable[..., wire.Effect]]


def free_port() -> int:
    """A free port below those that Linux (from 32,768) and macOS give to connections."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", secrets.choice(range(16384, 32768)))) as one,
        ):
            return int(one.getsockname()[1])


def run_group(ranks: int, folder: Path, *arguments: object) -> list[str]:
    """Return the lines that rank 0 of a group prints. Every rank runs `SCRIPT`; the ranks meet in an empty folder."""

    def run_rank(rank: int) -> list[str]:
        environment = {"GLOO_SOCKET_IFNAME": "lo", rank_group.FOLDER_VARIABLE: str(folder)}
        environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        words = [sys.executable, str(SCRIPT), *map(str, arguments)]
        done = warm.run(words, capture_output=True, text=True, timeout=200, env={**os.environ, **environment})
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
    wanted = [f"equal: {way} on {ranks} ranks" for way in ("columns", "gathered", "auto")] * 2
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


def ranks_of(provider: Provider) -> dict[int, int]:
    """Process ids by rank."""
    assert isinstance(provider.executor, ExecutorGroup)
    agent = provider.executor.pid
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    names = {pid: Path(f"/proc/{pid}/comm").read_text().split() for pid in map(int, children)}
    return {int(number): pid for pid, (name, number) in names.items()}


def test_a_group_uses_a_private_folder_restarts_after_a_hanging_rank_and_ends_with_torchrun(
    configure: Configure, connect: Connect, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hanging rank is found long before the group's timeout, whatever torchrun options the environment has.

    Tenants are told immediately that the provider is busy, and get the same bits later.
    `tests/end_to_end/test_ranks.py` kills a rank.
    """
    monkeypatch.setenv("PET_STANDALONE", "1")
    monkeypatch.setattr(supervisor, "_FIRST_BACKOFF_S", 2.0)  # forks start soon; tenants are refused for that long
    settings = ExecutorConfig(ranks=2, threads=1, hang_timeout_s=300)
    with Provider(configure(executor=settings)) as provider:
        assert isinstance(provider.executor, ExecutorGroup)
        assert not listening_addresses([provider.executor.pid])  # no store: the ranks meet in a folder
        assert listening_addresses(ranks_of(provider).values()) == {"127.0.0.1"}
        client = connect(to=provider)
        rows = torch.arange(4 * WIDTH, dtype=torch.int32).reshape(4, WIDTH)
        before = client.product(execute(0, 4), rows)
        for restarts, rank in enumerate((1, 0), start=1):
            lost = ranks_of(provider)
            assert lost.keys() == {0, 1}
            os.kill(lost[rank], signal.SIGSTOP)
            after, refused = client.until_served(execute(0, 4), rows, within=60)
            assert torch.equal(before, after)
            assert refused > 5  # a tenant that knows another provider does not wait for this one to start
            assert provider.status().restarts == restarts
            assert f"not answering: rank {rank}" in capfd.readouterr().err
            assert all(map(has_ended, lost.values()))
        end_with_their_torchrun(provider.executor.pid, ranks_of(provider))


def end_with_their_torchrun(agent: int, ranks: dict[int, int]) -> None:
    """Check that all ranks end with their torchrun, even a rank that hangs."""
    os.kill(ranks[0], signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    until(lambda: all(map(has_ended, ranks.values())), within_s=30)


def test_the_models_digest_is_broadcast_with_gloo(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is on the CPU, and with GPUs the default group is NCCL's."""
    broadcast, groups = dist.broadcast, []

    def noted(tensor: torch.Tensor, source: int, group: Any = None) -> Any:
        groups.append(group)
        return broadcast(tensor, source, group=group)

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(rank_group.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(dist, "broadcast", noted)
    rank_group.join("cpu", timeout=timedelta(seconds=30))
    try:
        operands = ShardedOperands(WeightStore(store.path, cache=tmp_path / "cache"))
        assert groups
        assert None not in groups
        operands.close()
    finally:
        dist.destroy_process_group()


def test_two_machines_serve_one_model(
    configure: Configure, connect: Connect, provider: Provider, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Runs the commands of `examples/deploy/two-nodes.sh`, as on two machines: same bits as a provider with all layers.

    If one machine is lost, the other one ends and logs the reason.
    """
    path = tmp_path / "provider.toml"
    path.write_text(toml_of(configure(roles=("executor",))), encoding="utf-8")
    port = free_port()
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$GLOO_SOCKET_IFNAME" "$@"\n', encoding="utf-8")
    python.chmod(0o700)
    environment = {**os.environ, "CONFIG": str(path), "INTERFACE": "lo", "OMP_NUM_THREADS": "1", "PORT": str(port)}
    nodes: list[warm.Popen] = []
    for number in (0, 1):
        script = ["sh", str(TWO_NODES), str(number), "127.0.0.1"]
        shown = subprocess.run(script, env=environment | {"PYTHON": str(python)}, stdout=subprocess.PIPE, check=True)
        interface, *words = shown.stdout.decode().splitlines()
        nodes.append(
            warm.Popen(
                [sys.executable, *words],
                env=environment | {"GLOO_SOCKET_IFNAME": interface},
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        )
    try:
        assert nodes[0].stdout is not None
        line = nodes[0].stdout.readline()
        assert line, "it ended; its reason is above"
        ready = json.loads(line)
        served = SimpleNamespace(address=ready["address"], model_digest=ready["model_digest"])
        rows = torch.arange(4 * WIDTH, dtype=torch.int32).reshape(4, WIDTH)
        got = connect(to=served).product(execute(0, 4), rows)
        assert torch.equal(got, connect(to=provider).product(execute(0, 4), rows))
        assert listening_addresses([nodes[0].pid]) == {"127.0.0.1"}  # torchrun's store, at the given address
        nodes[1].kill()
        assert nodes[0].wait(60) == 1
        assert "not answering: rank 1" in capfd.readouterr().err
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait(20)
            assert node.stdout is not None
            node.stdout.close()
