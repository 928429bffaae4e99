"""The memory plan: its figures, their truth, and the refusal of a provider that does not fit."""

import dataclasses

import pytest
import torch

from provider.config.memory_plan import Need, check_plan, memory_plan, widest
from provider.config.schema import MIB, ExecutorConfig
from provider.products.model import Transfers
from provider.serve import Provider
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels import bits_per_weight, chip as chips
from symbiosis_priv.kernels.chip import Chip
from tests.provider.conftest import Configure


def test_the_plan_equals_the_memory_that_is_loaded(configure: Configure, store: WeightStore) -> None:
    manifest = store.manifest()
    packed = sum(store.matrix(index).nbytes for index in range(len(manifest.groups)))
    needs = {need.what: need for need in memory_plan(configure(), manifest, store.served)}
    ring = needs["ring weights, both directions"]
    assert ring.size <= packed <= 1.5 * ring.size  # small matrices are padded to a kernel's block size
    assert (ring.place, ring.kind) == ("cpu", f"int{bits_per_weight(10, 'cpu')}")
    assert needs["matrices in flight"].size == 64 * MIB
    assert "float weights" not in needs
    with_floats = configure(executor=ExecutorConfig(float_memory_mib=100))
    floats = next(need for need in memory_plan(with_floats, manifest, store.served) if need.what == "float weights")
    assert (floats.size, floats.kind) == (100 * MIB, "float32")


def test_the_plan_counts_every_process(configure: Configure, store: WeightStore) -> None:
    """Four ranks share the weights; each of them gathers a layer group and is a separate process."""

    def needs(executor: ExecutorConfig) -> dict[str, int]:
        return {n.what: n.size for n in memory_plan(configure(executor=executor), store.manifest(), store.served)}

    alone, ranks = needs(ExecutorConfig()), needs(ExecutorConfig(ranks=4))
    apart = needs(ExecutorConfig(own_process=True))
    ring, python = "ring weights, both directions", "Python and torch"
    assert ranks[ring] == apart[ring] == alone[ring]
    assert (apart[python], ranks[python]) == (2 * alone[python], 5 * alone[python])
    largest = max(group.inputs * group.stacked_outputs for group in store.manifest().groups)
    gathered = ranks["a layer group, gathered by each rank"]
    assert gathered == 4 * 2 * largest * bits_per_weight(10, "cpu") // 8  # FSDP's buffer, and the copy of it


def test_a_plan_that_does_not_fit_is_refused_with_the_numbers(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = r"needs [\d,]+ MiB on cpu, of [\d,]+ MiB .* in flight 1,048,576 MiB"
    with pytest.raises(ConfigError, match=numbers):
        Provider(configure(max_inflight_mib=1 << 20)).start()
    monkeypatch.setattr("provider.config.memory_plan._container_limit", lambda: 10 * MIB)
    with pytest.raises(ConfigError, match="of 10 MiB"):
        Provider(configure()).start()


def test_only_served_layers_are_counted(configure: Configure, store: WeightStore) -> None:
    manifest = store.manifest()
    whole, *parts = (
        memory_plan(configure(), manifest, groups)[0].size for groups in (store.served, range(3), range(3, 9))
    )
    assert len(store.served) == 9
    assert sum(parts) == whole


def chip_of(device: torch.device) -> Chip | None:
    return Chip("H100", "sm_90", 132, 80 << 30, 227 << 10) if device.type == "cuda" else None


def test_a_plan_for_gpus(configure: Configure, store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, CUDA's own memory, rows and products on each GPU; and on the host, page-locked memory."""
    monkeypatch.setattr(chips, "chip_of", chip_of)

    def plan(executor: ExecutorConfig) -> list[Need]:
        return memory_plan(configure(executor=executor), store.manifest(), store.served)

    alone = {(n.place, n.what): n.size for n in plan(ExecutorConfig(device="cuda:1"))}
    moved = Transfers(torch.device("cpu"), widest=widest(store.manifest().groups))
    locked = [m.nbytes for slot in moved._slots for m in (slot.host_rows, slot.host_product)]
    host = sum(1 << (size - 1).bit_length() for size in locked)  # as torch's `CachingHostAllocator` rounds
    assert host > sum(locked)
    near = sum(m.nbytes for slot in moved._slots for m in (slot.rows, slot.product))
    assert alone["cpu", "page-locked rows and products"] == host + 64 * MIB  # of a helper's keystreams
    assert near < alone["cuda:1", "rows and products"] < 2 * near
    ranks = {(n.place, n.what): n.size for n in plan(ExecutorConfig(device="cuda", ranks=2))}
    for place in ("cuda:0", "cuda:1"):
        assert ranks[place, "ring weights, both directions"] == alone["cuda:1", "ring weights, both directions"] // 2
        assert ranks[place, "CUDA"] == alone["cuda:1", "CUDA"] > 500 * MIB
        assert ranks[place, "rows and products"] > 16_384 * 8 * widest(store.manifest().groups)


def test_a_model_that_does_not_fit_on_a_gpu_is_refused(
    configure: Configure, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        chips, "chip_of", lambda device: (chip := chip_of(device)) and dataclasses.replace(chip, memory=600 * MIB)
    )
    for executor in (ExecutorConfig(device="cuda:1"), ExecutorConfig(device="cuda", ranks=2)):
        with pytest.raises(ConfigError, match=r"on cuda:[01], of 600 MiB available .*CUDA 768 MiB"):
            check_plan(memory_plan(configure(executor=executor), store.manifest(), store.served), multiplies=False)


def test_what_other_programs_use_of_a_gpu_is_not_available(
    configure: Configure, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the process that multiplies asks: its context is in the plan."""
    monkeypatch.setattr(chips, "chip_of", chip_of)
    monkeypatch.setattr(chips, "free_memory", lambda device: 0 if device.index == 1 else 80 << 30)
    used, free = (
        memory_plan(configure(executor=ExecutorConfig(device=device)), store.manifest(), store.served)
        for device in ("cuda:1", "cuda:2")
    )
    with pytest.raises(ConfigError, match=r"on cuda:1, of 768 MiB available"):
        check_plan(used, multiplies=True)
    check_plan(used, multiplies=False)
    check_plan(free, multiplies=True)
