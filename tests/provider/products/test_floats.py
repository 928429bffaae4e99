"""The float path: off by default, and limited in memory."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from provider.config.schema import MIB, ExecutorConfig
from provider.products.model import FloatGroups, ServedModel
from provider.serve import Provider
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError, ProviderError
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from tenant.masking.paper_pool import PaperPoolBackend, PaperPoolOptions
from tenant.preparation.keys import prepare
from tests.provider.clients import Client, Service, execute
from tests.provider.conftest import Configure, Connect, Keys, Launch

CPU = torch.device("cpu")


def sizes(store: WeightStore) -> list[int]:
    """Bytes of each group in float32, room for a bias included."""
    return [4 * entry.stacked_outputs * (entry.inputs + 1) for entry in store.manifest().groups]


def test_floats_are_off_by_default(connect: Connect, store: WeightStore) -> None:
    client = connect()
    width = store.manifest().groups[0].inputs
    for arithmetic in ("float", "float_bias_free"):
        for rows in (0, 1):
            reply = client.ask(execute(0, rows, arithmetic=arithmetic), bytes(4 * width * rows))
            assert isinstance(reply, wire.Failure)
            assert reply.code == wire.ErrorCode.NOT_SERVED
            message = str(ProviderError(code=reply.code, provider="alpha", detail=reply.detail))
            assert "float = true under [executor]" in message
            assert "masking = 'pad'" in message


def test_the_refusal_of_floats_names_the_setting(
    provider: Provider, keys: Keys, store: WeightStore, tmp_path: Path
) -> None:
    host, port = parse_address(provider.address)
    alice = keys.tenants["alice"]
    federation = Federation(
        model_digest=provider.model_digest,
        weight_bits=store.weight_bits,
        tenant_certificate=alice.certificate,
        tenant_key=alice.key,
        peers=(Peer("alpha", "A", "executor", host, port, keys.provider.certificate),),
    )
    prepared = prepare(store, digest=provider.model_digest, columns=8, cache=tmp_path)
    with pytest.warns(UserWarning, match="masking = 'pad'"):
        backend = PaperPoolBackend(
            federation, prepared, PaperPoolOptions(pool_size=2, noise_scale=1.0), deadline_s=20.0
        )
    with pytest.raises(
        ProviderError, match=r"masking = 'pad', or ask its operator to set float = true under \[executor\]"
    ):
        backend.linear(0, "forward", torch.ones(1, store.manifest().groups[0].inputs))
    backend.close()


def test_a_model_without_a_float_path_refuses_floats(store: WeightStore) -> None:
    rows = torch.zeros((1, store.manifest().groups[0].inputs))
    with pytest.raises(ConfigError, match="float = true"):
        ServedModel(store).product(rows, group=0, direction="forward", arithmetic="float")


def test_the_least_recently_used_groups_are_dropped(store: WeightStore) -> None:
    room = sizes(store)
    groups = FloatGroups(store, device=CPU, memory=max(room) + min(room))
    for index in [*range(len(room)), 0, 1, 0, 2]:
        assert groups.group(index).weight.shape == (
            store.manifest().groups[index].stacked_outputs,
            store.manifest().groups[index].inputs,
        )
        assert groups.used == sum(room[i] for i in groups.loaded) <= max(room) + min(room)
    small = min(range(len(room)), key=room.__getitem__)
    others = [i for i in range(len(room)) if i != small][:2]
    groups = FloatGroups(store, device=CPU, memory=room[small] + max(room[i] for i in others))
    groups.group(others[0])
    kept = groups.group(small)
    groups.group(others[1])  # the least recently used group was dropped
    assert set(groups.loaded) == {small, others[1]}
    assert groups.group(small) is kept


def test_a_memory_limit_below_the_largest_group_is_refused(save_llama: Callable[..., Path], cache: Path) -> None:
    store = WeightStore(save_llama(hidden_size=512, intermediate_size=1024, num_hidden_layers=1), cache=cache)
    needed = -(-max(sizes(store)) // MIB)
    assert needed > 1
    with pytest.raises(ConfigError, match=rf"float_memory_mib = {needed - 1} .* set it to {needed} or more"):
        ServedModel(store, float_memory=(needed - 1) * MIB)
    ServedModel(store, float_memory=needed * MIB)


def ask_every_group(service: Service, client: Client, store: WeightStore) -> int:
    """Request one row from every group, twice. Returns the growth of the provider after the first round, in bytes."""
    before = 0
    for _ in range(2):
        for index, entry in enumerate(store.manifest().groups):
            rows = torch.ones((1, entry.inputs))
            client.ask(execute(index, 1, arithmetic="float"), wire.RING32.pack(rows))
            before = before or resident(service.process.pid)
    return resident(service.process.pid) - before


def resident(pid: int) -> int:
    """Bytes of private memory; pages of the checkpoint's file, which the system can take back at any time, do not
    count."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@pytest.fixture(scope="module")
def forty_eight_mib(save_llama: Callable[..., Path]) -> Path:
    """A model with a little more than 48 MiB of float weights."""
    return save_llama(hidden_size=512, intermediate_size=1536, num_hidden_layers=4)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("on", [False, True])
def test_one_row_requests_do_not_keep_the_model_in_memory(
    configure: Configure,
    connect: Connect,
    launch: Launch,
    forty_eight_mib: Path,
    cache: Path,
    on: bool,
) -> None:
    """A provider keeps no more of 48 MiB of float weights than the configured amount."""
    bound = 8
    store = WeightStore(forty_eight_mib, cache=cache)
    assert sum(sizes(store)) > 48 * MIB
    executor = ExecutorConfig(threads=1, warm_up=False, float_path=on, float_memory_mib=bound)
    service = launch(configure(checkpoint=forty_eight_mib, executor=executor))
    client = connect(to=service)
    grown = ask_every_group(service, client, store)
    # while a group is loaded, its copy in the checkpoint's dtype exists, too
    assert grown < (2 * bound if on else 2) * MIB


def test_the_memory_limit_is_read_from_the_file(configure: Configure, connect: Connect) -> None:
    config = configure(executor=ExecutorConfig(threads=1, float_path=True, float_memory_mib=7))
    assert config.executor.float_memory == 7 * MIB
    assert b'"float":true' in msgspec.json.encode(config.executor)
    assert ExecutorConfig().float_memory is None
    with Provider(config) as provider:
        client = connect(to=provider)
        assert client.product(execute(0, 1, arithmetic="float"), torch.zeros(1, 64)).shape[0] == 1
