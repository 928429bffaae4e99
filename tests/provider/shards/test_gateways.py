"""Every rank of a group has a gateway: the products of one process, one account, and the group's end with any rank."""

import contextlib
import itertools
import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from provider.config.schema import (
    AnnounceConfig,
    ExecutorConfig,
    MetricsConfig,
    QuotaConfig,
    RelayConfig,
    SchedulerConfig,
    UsageConfig,
)
from provider.gateway.usage import read
from provider.operations.top import ask, render
from provider.products.model import LocalOperands
from provider.serve import Provider
from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.certificates.revocation import revoke
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.local import consecutive_ports
from symbiosis_priv.kernels import probe_rows
from symbiosis_priv.network import wire
from tests.experts import write
from tests.provider.clients import Client, execute, toml_of
from tests.provider.conftest import Configure, Keys
from tests.provider.groups import Group
from tests.provider.processes import listening_ports
from tests.waiting import until

REQUESTS = 4  # of each kind, at each gateway


NewGroup = Callable[..., Group]


@pytest.fixture
def new_group(configure: Configure, tmp_path: Path) -> Iterator[NewGroup]:
    with contextlib.ExitStack() as running:

        def make(ranks: int, *, hosts: int = 1, sharding: str = "auto", **options: Any) -> Group:
            executor = ExecutorConfig(threads=1, warm_up=sharding == "auto", sharding=sharding, gateways="all")  # type: ignore[arg-type]
            options.setdefault("usage", UsageConfig(database=tmp_path / "usage.sqlite"))
            config = configure(executor=executor, roles=("executor",), **options)
            path = tmp_path / "provider.toml"
            path.write_text(toml_of(config), encoding="utf-8")
            group = Group(path, ranks, hosts=hosts)
            running.callback(group.close)
            return group

        yield make


def all_products(client: Client, store: WeightStore, seed: int) -> list[torch.Tensor]:
    found = []
    for group in store.served:
        for direction in DIRECTIONS:
            inputs, _ = store.manifest().groups[group].columns(direction)
            for rows in range(1, REQUESTS + 1):
                words = (2 * seed + 1) * probe_rows(4, inputs)[:rows]
                found.append(client.product(execute(group, rows, direction=direction), words))
    return found


@pytest.mark.parametrize(
    ("ranks", "hosts", "sharding"), [(2, 1, "columns"), (2, 1, "gathered"), (2, 2, "auto"), (4, 1, "auto")]
)
def test_every_gateway_gives_the_products_of_one_process_and_one_account_holds_for_all(
    new_group: NewGroup,
    connect: Callable[..., Client],
    keys: Keys,
    provider: Provider,
    store: WeightStore,
    tmp_path: Path,
    ranks: int,
    hosts: int,
    sharding: str,
) -> None:
    """Requests at all gateways at once, which share products. Then one tenant's quota and bill over all gateways."""
    tenants = {"bob": QuotaConfig(requests_per_s=0.1), "carol": QuotaConfig(max_rows_in_flight=2)}
    group = new_group(ranks, hosts=hosts, sharding=sharding, tenants=tenants)
    clients = [connect(to=place) for place in group.places]
    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(lambda n: all_products(clients[n], store, n), range(ranks)))
    alone = connect(to=provider)
    for seed, products in enumerate(found):
        assert all(map(torch.equal, products, all_products(alone, store, seed)))
    bob = [connect("bob", to=place) for place in (group.places[-1], *group.places)]
    first, *others = bob
    rows = probe_rows(2, 64)[:1]
    first.product(execute(0, 1), rows)
    for client in others:
        client.send(execute(0, 1), wire.RING32.pack(rows))
        refused, _ = client.receive()
        assert isinstance(refused, wire.Failure)
        assert refused.code == wire.ErrorCode.BUSY
        assert refused.limit == wire.QuotaLimit(amount=0.1, unit="requests/s")
    carol = connect("carol", to=group.places[-1])
    carol.send(execute(0, 3), wire.RING32.pack(probe_rows(3, 64)))
    assert carol.receive()[0].code == wire.ErrorCode.TOO_LARGE  # type: ignore[union-attr]
    billed_rows = ranks * sum(len(product) for product in found[0])
    expected = {"alice": (ranks * len(found[0]), billed_rows, 0), "bob": (1, 1, ranks), "carol": (0, 0, 1)}

    def bills() -> dict[str, tuple[int, ...]]:
        found = read(tmp_path / "usage.sqlite")
        return {str(row["tenant"]): tuple(int(row[name]) for name in ("requests", "rows", "refused")) for row in found}

    until(lambda: bills() == expected)  # is committed once a second


@pytest.mark.parametrize("sharding", ["columns", "gathered"])
def test_rows_for_single_experts_of_tenants_of_several_ranks_share_products(
    new_group: NewGroup, connect: Callable[..., Client], tmp_path: Path, cache: Path, sharding: str
) -> None:
    """In rings of 32 and 24 bits, until some requests have shared a product."""
    path = write("Mixtral", tmp_path / "experts", num_local_experts=3, intermediate_size=96, num_hidden_layers=1)
    store = WeightStore(path, cache=cache)
    local = LocalOperands(store)
    group = new_group(2, sharding=sharding, checkpoint=path, metrics=MetricsConfig(listen="127.0.0.1:0"))
    stacks = [index for index in store.served if store.manifest().groups[index].experts > 1]
    clients = [connect(to=place) for place in group.places for _ in range(3)]

    def ask_all(number: int) -> None:
        counts = ((number, 0, 2), (1, 2, 0), (0, 5, number))[number % 3]
        for index, direction, ring_bits in itertools.product(stacks, DIRECTIONS, (32, 24)):
            inputs, _ = store.manifest().entry(index, by_expert=True).columns(direction)
            rows = (number + 1) * probe_rows(max(2, sum(counts)), inputs)[: sum(counts)]
            request = msgspec.structs.replace(
                execute(index, len(rows), direction=direction), counts=counts, ring_bits=ring_bits
            )
            want = local.product(rows, group=index, direction=direction, counts=counts)
            got = clients[number].product(request, request.encoding.unpack(request.encoding.pack(rows), rows=len(rows)))
            assert not ((got - want) & ((1 << ring_bits) - 1)).any()

    def shared() -> bool:
        with ThreadPoolExecutor(len(clients)) as threads:
            list(threads.map(ask_all, range(len(clients))))
        report = ask(group.metrics).executor
        return report is not None and report.batch_requests.total > sum(report.batch_requests.counts)

    until(shared, within_s=60)


def test_connections_at_all_gateways_give_a_tenant_one_share(
    new_group: NewGroup, connect: Callable[..., Client], save_llama: Callable[..., Path]
) -> None:
    """Bob has six connections at each gateway, alice has twelve at the second one. Every connection has a request
    waiting, and a product has room for one, so both get the same number of rows. With a share for each gateway, bob
    would get twice as many."""
    rows, spare, width, finished = 64, 4, 2048, threading.Event()
    path = save_llama(hidden_size=width, intermediate_size=64, num_hidden_layers=1)  # the executor is the slowest part
    scheduler = SchedulerConfig(max_batch_rows=rows)
    group = new_group(
        2, sharding="columns", scheduler=scheduler, metrics=MetricsConfig(listen="127.0.0.1:0"), checkpoint=path
    )
    bob = [connect("bob", to=place) for place in group.places for _ in range(6)]
    alice = [connect("alice", to=group.places[1]) for _ in range(12)]
    payload = wire.RING32.pack(probe_rows(rows, width))

    def keep_asking(client: Client) -> None:
        for _ in range(spare):  # more requests than answers are under way, so that no gateway waits for this process
            client.send(execute(1, rows), payload)
        while not finished.is_set():
            assert isinstance(client.receive()[0], wire.Result)
            client.send(execute(1, rows), payload)

    def served() -> dict[str, int]:
        return {one.tenant.partition("@")[0]: one.counts.rows for one in ask(group.metrics).tenants}

    with ThreadPoolExecutor(len(bob) + len(alice)) as threads:
        running = [threads.submit(keep_asking, client) for client in (*bob, *alice)]
        try:
            until(lambda: min(served().get(name, 0) for name in ("alice", "bob")) > 10 * rows)
            first = served()
            until(lambda: served()["bob"] - first["bob"] > 120 * rows, within_s=60)
            last = served()
        finally:
            finished.set()
    for each in running:
        each.result()
    assert 2 / 3 < (last["bob"] - first["bob"]) / (last["alice"] - first["alice"]) < 3 / 2


def test_a_revoked_tenant_is_cut_off_at_every_gateway_and_all_ranks_are_shown(
    new_group: NewGroup,
    connect: Callable[..., Client],
    configure: Configure,
    keys: Keys,
    store: WeightStore,
    tmp_path: Path,
) -> None:
    """A tenant that trains at one rank has the priority of training at the others."""
    listed = tmp_path / "revoked.txt"
    tls = msgspec.structs.replace(configure().tls, revoked=listed)
    revoke(listed, [keys.tenants["bob"].certificate])
    group = new_group(2, tls=tls, metrics=MetricsConfig(listen="127.0.0.1:0"))
    clients = [connect(to=place) for place in group.places]
    for client in clients:
        client.product(execute(0, 1), probe_rows(2, 64)[:1])
    report = ask(group.metrics).executor
    assert report is not None
    assert sum(report.waits["fine_tuning"].counts) == 0
    outputs = store.manifest().groups[0].columns("backward")[0]
    clients[1].product(execute(0, 6, direction="backward"), probe_rows(8, outputs)[:6])
    clients[0].product(execute(0, 1), probe_rows(2, 64)[:1])  # its tenant trains, at another rank
    report = ask(group.metrics).executor
    assert report is not None
    assert sum(report.waits["fine_tuning"].counts) == 2

    def shown() -> bool:
        status = ask(group.metrics)
        assert status.connections == sum(each.connections for each in status.gateways)
        shown = [(each.rank, each.address, each.requests, each.rows) for each in status.gateways]
        return shown == [(rank, place.address, 2, 2 + 5 * rank) for rank, place in enumerate(group.places)]

    until(shown, within_s=20)
    with (console := Console(width=400)).capture() as screen:
        console.print(render(ask(group.metrics), None, 0.0))
    assert f"rank 1 at {group.places[1].address}: 1 connections, 2 products of 7 rows" in screen.get()
    with urllib.request.urlopen(f"http://{group.metrics}/metrics") as page:
        text = page.read().decode()
        assert 'symbiosis_provider_rank_requests_total{rank="1"} 2.0' in text
        assert 'symbiosis_provider_rank_rows_total{rank="0"} 2.0' in text
    revoke(listed, [keys.tenants["alice"].certificate])
    assert all(client.at_end() for client in clients)


@pytest.mark.parametrize(
    ("rank", "sent"),
    [(0, signal.SIGTERM), (1, signal.SIGKILL), (1, signal.SIGSTOP)],
    ids=["stops", "is killed", "hangs"],
)
def test_the_group_ends_with_any_of_its_ranks(
    new_group: NewGroup, connect: Callable[..., Client], rank: int, sent: signal.Signals
) -> None:
    """A stop is clean: every process ends with status 0. A loss is named in the log. Each rank has its own port."""
    group = new_group(2)
    pids = group.pids()
    ports = {own: int(place.address.rpartition(":")[2]) for own, place in enumerate(group.places)}
    assert all(ports[own] in listening_ports([pids[own]]) for own in (0, 1))
    assert ports[1] not in listening_ports([pids[0]])  # so no row of its tenants reaches the gateway of rank 0
    client = connect(to=group.places[1])
    client.product(execute(0, 1), probe_rows(2, 64)[:1])
    os.kill(pids[rank], sent)
    lost = sent != signal.SIGTERM
    assert group.nodes[0].wait(60) == (-signal.SIGKILL if lost else 0)
    assert client.at_end()
    assert ("not answering: rank 1" in group.log_file.read_text()) == lost


def test_a_rank_whose_port_is_taken_ends_the_group_and_the_log_says_why(new_group: NewGroup) -> None:
    port = consecutive_ports("127.0.0.1", 2)
    with (
        socket.create_server(("127.0.0.1", port + 1)),
        pytest.raises(AssertionError, match=f"start_failed.*127.0.0.1:{port + 1}.*in use"),
    ):
        new_group(2, listen=f"127.0.0.1:{port}", stop_timeout_s=0.5)


@pytest.mark.parametrize("table", ["relay", "registry", "helper", "float"])
def test_what_other_gateways_cannot_account_for_is_refused_by_name(configure: Configure, table: str) -> None:
    config = configure(executor=ExecutorConfig(gateways="all"), roles=("executor",))
    changes: dict[str, Any] = {
        "relay": {"relay": RelayConfig(helpers=(Path("helper.pem"),))},
        "registry": {"registry": AnnounceConfig(announce=("127.0.0.1:1",), authority=Path("a.pem"))},
        "helper": {"roles": ("executor", "helper")},
        "float": {"executor": ExecutorConfig(gateways="all", float_path=True)},
    }
    with pytest.raises(ValueError, match=f'gateways = "all" does not work with .*{table}'):
        msgspec.structs.replace(config, **changes[table])
    with pytest.raises(ConfigError, match=r"provider\.processes\.launch"):
        Provider(config)
