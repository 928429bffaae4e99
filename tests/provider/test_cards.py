"""One process per card: how layers, rates and ports are divided, and what each process has to itself."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st

from provider.config.schema import ExecutorConfig, MetricsConfig, QuotaConfig
from provider.gateway.quota import QuotaMeter
from provider.processes import cards
from provider.processes.cards import BURST_S, Card, cards_of, divided
from provider.serve import Provider
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels import chip as chips
from symbiosis_priv.kernels.chip import Chip
from symbiosis_priv.network.tls import TenantIdentity
from tests.provider.conftest import Configure
from tests.waiting import until

LAYERS = 2


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_the_fullest_card_is_as_empty_as_possible(sizes: list[int], memory: list[int]) -> None:
    """By comparison with every way to divide the layers."""

    def fullest(parts: Sequence[range]) -> float:
        return max(sum(sizes[part.start : part.stop]) / room for part, room in zip(parts, memory, strict=True))

    ways = [
        [range(*bounds) for bounds in itertools.pairwise((0, *cuts, len(sizes)))]
        for cuts in itertools.combinations(range(1, len(sizes)), len(memory) - 1)
    ]
    if not ways:
        with pytest.raises(ConfigError, match="cannot divide"):
            divided(sizes, memory)
        return
    found = divided(sizes, memory)
    assert list(map(list, found)) in [list(map(list, way)) for way in ways]
    assert fullest(found) == min(map(fullest, ways))


def test_cards_have_ranges_of_layers_ports_and_parts_of_the_rates(configure: Configure, store: WeightStore) -> None:
    quota = QuotaConfig(weight=2.0, requests_per_s=100.0, giga_multiply_adds_per_s=5.0)
    config = configure(
        roles=("executor",),
        listen="127.0.0.1:7401",
        metrics=MetricsConfig(listen="127.0.0.1:9464"),
        executor=ExecutorConfig(processes=LAYERS, threads=4),
        quota=quota,
        tenants={"alice": QuotaConfig(rows_per_s=30.0)},
    )
    own = [card.config(config) for card in cards_of(config)]
    assert [one.model.layers for one in own] == ["0", "1"]
    assert [one.listen for one in own] == ["127.0.0.1:7401", "127.0.0.1:7402"]
    assert [one.metrics.listen for one in own] == ["127.0.0.1:9464", "127.0.0.1:9465"]
    assert [(one.executor.device, one.executor.threads) for one in own] == [("cpu", 2)] * LAYERS
    assert sum(one.quota.requests_per_s or 0 for one in own) == pytest.approx(100)
    assert sum(one.quota.giga_multiply_adds_per_s or 0 for one in own) == pytest.approx(5)
    assert sum(one.tenants["alice"].rows_per_s or 0 for one in own) == pytest.approx(30)
    for one in own:  # what each process has to itself
        assert (one.quota.weight, one.limits) == (2.0, config.limits)
        assert (one.name, one.tls, one.usage) == (config.name, config.tls, config.usage)
    with pytest.raises(ConfigError, match="3 cards cannot divide 2 layers"):
        cards_of(configure(roles=("executor",), executor=ExecutorConfig(processes=3)))
    with pytest.raises(ConfigError, match="each card takes the next port"):
        cards_of(configure(roles=("executor",), listen="127.0.0.1:65535", executor=ExecutorConfig(processes=2)))


@pytest.mark.parametrize("devices", ["all", ("cuda:0", "cuda:1")])
def test_layers_are_divided_by_the_memory_of_the_cards(
    devices: Any, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cards of one machine. Memory that all processes take on the machine is added up."""
    found = {"cuda:0": 1 << 33, "cuda:1": 1 << 34}

    def chip_of(device: torch.device) -> Chip:
        return Chip("a GPU", "sm_90", 132, found[str(device)], 232_448)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(chips, "chip_of", chip_of)
    monkeypatch.setattr(cards, "chip_of", chip_of)
    seen: list[Any] = []

    def watched(sizes: Sequence[int], memory: Sequence[int]) -> list[range]:
        seen.append(memory)
        return divided(sizes, memory)

    monkeypatch.setattr(cards, "divided", watched)
    monkeypatch.setattr(cards, "check_plan", lambda plan, multiplies: seen.append(plan))
    config = configure(roles=("executor",), executor=ExecutorConfig(devices=devices))
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, cache=tmp_path))
    assert [(card.device, card.layers) for card in cards_of(config)] == [("cuda:0", "0"), ("cuda:1", "1")]
    assert not list(tmp_path.rglob("*.safetensors"))  # each process packs its layers in the form for its card
    memory, plan = seen
    assert memory == [1 << 33, 1 << 34]
    assert {need.place for need in plan} == {"cpu", "cuda:0", "cuda:1"}
    assert [need.what for need in plan].count("page-locked rows and products") == 2
    with pytest.raises(ConfigError, match="torch sees cuda:0, cuda:1"):
        cards_of(configure(roles=("executor",), executor=ExecutorConfig(devices=("cuda:2",))))


@given(
    rate=st.integers(5, 500),
    groups=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    rows=st.integers(1, 20),
    together=st.integers(1, 3),
)
def test_a_tenant_at_all_cards_gets_its_quota_in_sum(rate: int, groups: list[int], rows: int, together: int) -> None:
    """The tenant goes through the layers as fast as the cards allow, also several passes side by side. In sum it gets
    the rate of one process, a minute's burst, and the last request of each card."""
    quota, total = QuotaConfig(rows_per_s=float(rate)), sum(groups)
    parts = [
        Card(number=0, device="cpu", layers="0", threads=1, listen="a:1", requests=n / total, work=0)._part(quota)
        for n in groups
    ]
    passes = [0.0] * together
    meters, done = [QuotaMeter(0.0, BURST_S) for _ in groups], 0
    for turn in range(20 * together):
        now = passes[turn % together]
        for count, meter, part in zip(groups, meters, parts, strict=True):
            for _ in range(count):
                now += meter.delay(part, now)
                meter.take(rows=rows, work=0)
                done += rows
        passes[turn % together] = now
    assert done <= (rate * (max(passes) + BURST_S) + rows * len(groups)) * (1 + 1e-9)
    if rows * total * together <= rate * BURST_S:
        assert max(passes) <= done / rate * (1 + 1e-6)  # no slower than with one process


def test_a_provider_in_code_has_one_card(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="provider serve"):
        Provider(configure(roles=("executor",), executor=ExecutorConfig(processes=2))).start()


def test_rates_are_divided_again_when_the_file_changes(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a card reads the whole file."""
    whole, source = configure(roles=("executor",), executor=ExecutorConfig(processes=2, threads=1)), tmp_path / "a.toml"
    source.touch()
    found = [msgspec.structs.replace(whole, quota=QuotaConfig(rows_per_s=100.0))]
    monkeypatch.setattr("provider.serve.load", lambda path, whole: found[-1])
    card, tenant = cards_of(whole)[1], TenantIdentity("alice", "sha256:a")
    with Provider(card.config(found[-1]), source=source, adapt=card.config, burst_s=BURST_S) as provider:
        assert provider._gateway is not None
        quotas = provider._gateway.state.quotas
        assert (quotas.of(tenant).rows_per_s, quotas.burst_s) == (100.0 * card.requests, BURST_S)
        found.append(msgspec.structs.replace(whole, quota=QuotaConfig(rows_per_s=40.0)))
        provider.reload()
        until(lambda: quotas.of(tenant).rows_per_s == 40.0 * card.requests)


def test_a_card_that_starts_is_not_told_to_read_its_files_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGHUP would end it, and the provider with it. Nobody reads stdout any more, which ends no card either."""
    loaded = tmp_path / "loaded"
    program = f"""
import pathlib, signal, sys, time
while not pathlib.Path({str(loaded)!r}).exists():
    time.sleep(0.01)
signal.signal(signal.SIGHUP, lambda *_: pathlib.Path({str(loaded)!r}).unlink())
print('{{"event": "listening", "address": "127.0.0.1:7402"}}', flush=True)
sys.stdin.read()
"""

    def unread(file: int, data: bytes) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cards, "Popen", lambda _, **pipes: subprocess.Popen([sys.executable, "-c", program], **pipes))
    monkeypatch.setattr(os, "write", unread)
    card = Card(number=1, device="cpu", layers="1", threads=1, listen="127.0.0.1:0", requests=1.0, work=1.0)
    process = cards._Process(card, tmp_path / "provider.toml")
    until(lambda: process._process is not None)
    process.reload()
    loaded.touch()
    until(process.ready.is_set)
    assert process.card.listen == "127.0.0.1:7402"
    process.reload()
    until(lambda: not loaded.exists())
    process.stop()
    process.join(time.monotonic() + 20)
    assert process.ended.is_set()
